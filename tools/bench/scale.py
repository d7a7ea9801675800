"""Cost of this project's own code in a step of 32 to 1024 ranks, beside the engines' time by `plan`.

    python -m tools.bench.scale [--quick] [--json] [--processes 4 8 16]

Ranks are processes with gloo on this machine, and run the package's own functions from an engine's answer to the packed
rows of the learner's passes, on responses and routes made up here (48 layers, 8 of 128 experts). Each stage's processor
time, memory and bytes received, of the rank that has most, are fitted by non-negative least squares to

    tokens of a rank + bytes of routes of a rank + sequences of a rank + sequences of the step + ranks

and these unit costs give the time at any size. A: 2048 responses of 8k tokens on 32 ranks, B: 8192 of 32k on 256.
Bytes from other ranks take their time over the hosts' network (`plan.hardware`). Reward functions run in worker
processes and are measured by themselves, and so is taking the answers of rollout servers (`tools.bench.answers`).
Waiting for slower ranks is not counted, nor are checkpoints, which do not come with every step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import socket
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.data import RewardConfig
from megatron_rl.instruments.plan import GPUS, make_plan, make_workload
from megatron_rl.instruments.plan.hardware import GIB
from megatron_rl.instruments.plan.memory import DRIVERS, RECORD, OwnCode, own_code
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import shape_of
from megatron_rl.rewards import Rewarder
from megatron_rl.types import Group, Prompt, Rollout

try:
    from tools.bench import answers
    from tools.bench.scale_ranks import TENSOR, run_rank
    from tools.bench.unit_costs import Found, Setting, line, unit_costs
except ModuleNotFoundError:  # started by its path: as a module it finds its neighbours
    again = [sys.executable, "-m", "tools.bench.scale", *sys.argv[1:]]
    sys.exit(subprocess.run(again, cwd=Path(__file__).resolve().parents[2], check=False).returncode)

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "router_replay" / "grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"
PROMPT = 256  # mean tokens
ROUTE_BYTES = 48 * 8  # of a token: layers and experts of the recipe's model
SIZES = {"A": (128, 8192, 4), "B": (512, 32512, 32), "C": (2048, 32512, 128)}  # prompts, response tokens, nodes of 8


def workload(prompts: int, response: int, nodes: int) -> Workload:
    """The recipe with 16 responses to each of ``prompts``, all of ``response`` tokens."""
    changes = (
        f"batch.prompts={prompts}",
        f"rollout.max_response_length={response}",
        f"data.prompt.max_length={PROMPT}",
    )
    recipe = load_recipe(RECIPE, changes)
    return make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"], nodes, 8, response, PROMPT)


def settings_for(ranks: int, quick: bool) -> list[Setting]:
    """Few long sequences, four times as long ones, and many short ones: what tells the unit costs apart."""
    length, many = (512, 512) if quick else (2048, 2048)
    return [
        Setting(ranks, 4 * ranks, length, True),
        Setting(ranks, 4 * ranks, 4 * length, True),
        Setting(ranks, 4 * ranks, 4 * length, False),
        Setting(ranks, many, 16, True),
        Setting(ranks, many, 16, False),
        Setting(ranks, 4 * many, 16, False),
    ]


def measure(settings: list[Setting], recipe: Recipe) -> tuple[Found, int]:
    """Start the ranks, which inherit what is imported here. Returns also the sockets that a rank has open."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    ranks = range(settings[0].ranks)
    processes = [context.Process(target=run_rank, args=(rank, port, recipe, settings, results)) for rank in ranks]
    for process in processes:
        process.start()
    answers = [results.get(timeout=1200) for _ in settings]
    for process in processes:
        process.join()
    return {setting: costs for setting, costs, _ in answers}, answers[-1][2]


def reward_seconds(quick: bool) -> float:
    """Of one response of 8k tokens with a boxed answer, in one worker process: every other one needs algebra."""
    text = "Let $x$ be a real number with $x^2 = 2x$, so that we have to look at two cases. " * 400
    boxed = (r"\boxed{\sqrt{\frac{3}{4}}}", r"\boxed{\frac{3}{7}}")
    none, count = np.zeros(0, dtype=np.float32), 8 if quick else 32
    rollouts = [Rollout(f"x/{i}", [1], none, none, none, "stop", text=text + boxed[i % 2]) for i in range(count)]
    group, seconds = Group(Prompt("x", [1], r"\frac{\sqrt{3}}{2}"), rollouts), []
    with Rewarder(RewardConfig(name="math", num_workers=1), 8192) as rewarder:
        rewarder.score([group])
        for _ in range(3):
            start = time.perf_counter()
            rewarder.score([group])
            seconds.append((time.perf_counter() - start) / count)
    return float(f"{statistics.median(seconds):.3g}")


def table(sizes: dict[str, tuple[Workload, OwnCode]]) -> list[str]:
    """Seconds and bytes of each stage, beside the engines' time."""
    lines = [f"{'':<16}" + "".join(f"{f'{name}: {w.ranks} ranks':>28}" for name, (w, _) in sizes.items())]
    lines.append(f"{'stage':<16}" + f"{'s':>10}{'MB':>9}{'peak MB':>9}" * len(sizes))
    columns = [{stage.name: stage for stage in (*own.stages, *own.aside)} for _, own in sizes.values()]
    for name in columns[0]:
        cells = [f"{c[name].seconds:>10.2f}{c[name].received / 1e6:>9.1f}{c[name].peak / 1e6:>9.0f}" for c in columns]
        lines.append(f"{name:<16}" + "".join(cells))
    for label, values in summary(sizes).items():
        lines.append(f"{label:<16}" + "".join(f"{value:>28.2f}" for value in values))
    return lines


def growth(measured: Found) -> list[str]:
    """Peak memory of a rank at the same share of a growing job."""
    share = {
        s.ranks: costs for s, costs in measured.items() if s.routes and s.sequences == 4 * s.ranks and s.length > 4000
    }
    lines = [f"peak MB of a rank with four sequences: {', '.join(map(str, share))} ranks"] * bool(share)
    for stage in next(iter(share.values()), {}):
        lines.append(f"  {stage:<14}" + "".join(f"{costs[stage].peak / 1e6:>8.1f}" for costs in share.values()))
    return lines


def summary(sizes: dict[str, tuple[Workload, OwnCode]]) -> dict[str, list[float]]:
    own = [own.seconds for _, own in sizes.values()]
    plan = [make_plan(work).time.total for work, _ in sizes.values()]
    return {
        "own code, s": own,
        "plan's step, s": plan,
        "own / plan, %": [100 * a / b for a, b in zip(own, plan)],
        "GiB a rank": [own.host_rank / GIB for _, own in sizes.values()],
        "GiB a node": [own.host_node / GIB for _, own in sizes.values()],
        "sockets a rank": [own.sockets for _, own in sizes.values()],
    }


def totals(work: Workload, own: OwnCode) -> dict[str, float]:
    return {
        "own_s": round(own.seconds, 3),
        "plan_s": round(make_plan(work).time.total, 1),
        "host_gib_rank": round(own.host_rank / GIB, 3),
        "host_gib_node": round(own.host_node / GIB, 2),
    }


def write(record: dict[str, object]) -> None:
    git = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    origin = f"python -m tools.bench.scale --write, at {commit}, 2 cores of an AMD EPYC (Zen 4)"
    text = json.dumps({"origin": origin, "drivers": DRIVERS, **record}, indent=1)
    RECORD.write_text(re.sub(r"\[\s+([^]]*?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text) + "\n")


def _units(units: dict[str, dict[str, list[float]]]) -> list[str]:
    """Processor time of each driver, in microseconds."""
    lines = [f"{'µs of':<16}" + "".join(f"{name:>14}" for name in DRIVERS)]
    return lines + [
        f"{stage:<16}" + "".join(f"{1e6 * unit:>14.4f}" for unit in costs["seconds"]) for stage, costs in units.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter and fewer sequences, and no more than 8 ranks")
    parser.add_argument("--json", action="store_true", help="print the totals of A and B alone")
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8, 16], metavar="N")
    parser.add_argument("--write", action="store_true", help="put the unit costs on record for `plan`")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    recipe, costs_by_name, sockets = load_recipe(RECIPE), {}, {}
    for ranks in (n for n in options.processes if n <= 8 or not options.quick):
        start = time.perf_counter()
        costs, sockets[ranks] = measure(settings_for(ranks, options.quick), recipe)
        costs_by_name |= costs
        print(f"{ranks} ranks: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    units = unit_costs(costs_by_name, ROUTE_BYTES, TENSOR)
    record = {
        "reward_s": reward_seconds(options.quick),
        "fetch": answers.unit_costs(options.quick),
        "turns": answers.stitching_costs(options.quick),
        "sockets": line(sockets),
        "stages": units,
    }
    if options.write:
        write(record)
    works = {name: workload(*size) for name, size in SIZES.items()}
    sizes = {name: (work, own_code(work, record)) for name, work in works.items()}
    if options.json:
        print(json.dumps({name: totals(*sizes[name]) for name in ("A", "B")}))
        return 0
    print("\n".join([*_units(units), "", *growth(costs_by_name), "", *table(sizes)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
