"""What a reward that waits costs a step: the time from the last response to the last score.

The judge answers after --seconds and does not compute, like one that runs elsewhere. It is asked for --concurrency
responses at a time, each as soon as it is complete. Real engines sample and learn on the tiny model: in the
learner's process, then on a server, whose batches are sampled within their step and one step ahead. The first steps of
a run are left out; the figures are medians of the others.

The judge's own rate is a bound. If all responses together take it longer than the rest of a step, that step waits for
the difference, whatever the order of work: the column "bound" is that share.

A step that waits for scores one step ahead is not longer by all of it, because servers sample the next batch meanwhile.
With --alone each run is made again with a judge that answers at once, and "costs" is the share of the step that goes
with it. "at least" is the share that the judge's rate alone costs. Both runs need a quiet machine.

    python -m tools.bench.judge [--steps 8] [--prompts 32] [--seconds 0.3] [--concurrency 64] [--alone] [--set a.b=c …]

--prompts: of a step; eight responses each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "recipes" / "tiny"
WARM_UP_STEPS = 2  # the first steps compile, and have nothing begun before them
KINDS = (
    ("in the learner's process", "grpo.yaml", []),
    ("on a server", "servers.yaml", ["rollout.max_staleness=0"]),
    ("on a server, one step ahead", "servers.yaml", ["rollout.max_staleness=1"]),
)
JUDGE = """
import asyncio

async def judge(response, answer):
    await asyncio.sleep({seconds})
    return float(response.rpartition("#")[2] == answer)
"""


def run(folder: Path, recipe: str, settings: list[str]) -> list[dict[str, float]]:
    """Return the metrics of the steps of one run that count."""
    command = [sys.executable, "-m", "megatron_rl", "train", str(TINY / recipe)]
    command += [argument for setting in settings for argument in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    rows = [json.loads(line) for line in (folder / "judged" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "perf/time/generate" in row][WARM_UP_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    parser.add_argument("--prompts", type=int, default=32, help="of a step; eight responses each")
    parser.add_argument("--seconds", type=float, default=0.3, help="that the judge takes for a response")
    parser.add_argument("--concurrency", type=int, default=64, help="responses that it is asked for at a time")
    parser.add_argument("--alone", action="store_true", help="also with a judge that answers at once")
    parser.add_argument("--only", choices=range(len(KINDS)), type=int, nargs="*", default=range(len(KINDS)))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args()
    number = 8 * options.prompts
    whole = -(-number // options.concurrency) * options.seconds
    print(f"{number} responses, {options.seconds:g} s each, {options.concurrency} at a time: {whole:.2f} s together")
    print(
        f"{'generation':<29}{'step':>8}{'waits':>8}{'share':>8}{'bound':>8}"
        + f"{'costs':>8}{'at least':>10}" * options.alone
    )
    for name, recipe, own in (KINDS[number] for number in options.only):
        step, waits, share = judged(recipe, own, options.seconds, options)
        bound = max(0.0, 1 - (step - waits) / whole)
        line = f"{name:<29}{step:>6.2f} s{waits:>6.2f} s{share:>8.1%}{bound:>8.1%}"
        if options.alone:
            at_once, *_ = judged(recipe, own, 0.0, options)
            line += f"{1 - at_once / step:>8.1%}{max(0.0, 1 - at_once / whole):>10.1%}"
        print(line, flush=True)


def judged(recipe: str, own: list[str], seconds: float, options: argparse.Namespace) -> list[float]:
    """Return the median step, what of it waits for scores, and that share, with a judge that takes ``seconds``."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "judge.py").write_text(JUDGE.format(seconds=seconds))
        settings = [f"run_root={folder}", "name=judged", f"num_steps={options.steps + WARM_UP_STEPS}"]
        settings += ["validation.every=0", "checkpoint.every=0", "monitor.plots=false", "rollout.num_samples=8"]
        settings += [f"batch.prompts={options.prompts}", f"reward={folder / 'judge.py'}:judge"]
        settings += [f"reward.concurrency={options.concurrency}", *own, *options.overrides]
        rows = run(folder, recipe, settings)
    names = ("perf/time/step", "perf/time/reward", "perf/reward_frac")
    return [statistics.median(row[key] for row in rows) for key in names]


if __name__ == "__main__":
    main()
