"""Split the training-inference mismatch of a stored batch into its causes: one table, one bar chart.

    megatron-rl attribute runs/my-run --step 40

Needed: the batch with the engine's routes (routing.replay: r3, or routing.telemetry: true) and the weights of its step
(see `megatron-rl replay --help`). The chart goes to RUN/plots/. One process; a layout of several ranks is gathered
into one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, required=True, help="step of the stored batch")
    parser.add_argument("--weights", default="exact", metavar="exact|nearest|DIR", help="as in `megatron-rl replay`")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.stored import attribution
    from megatron_rl.stored import rerun as flight
    from megatron_rl.stored.batches import batch_path, load_batch

    directory, recipe = flight.open_run(arguments.run, flight.layout_overrides("tp=1"))
    recorded = load_batch(batch_path(directory.batches, arguments.step))
    found = attribution.attribute(directory, recipe, recorded, arguments.weights)
    total = found.stages[0].std ** 2
    print(f"step {arguments.step}, {found.num_tokens} response tokens, weights: {found.weights}")
    if old := sum(int((s.policy_versions < recorded.policy_version).sum()) for s in recorded.batch.sequences):
        print(f"note: {old} tokens were sampled with older weights than the step's; that part is in the remainder")
    rows = [("everything", found.stages[0].what, f"{found.stages[0].std:.4g}", f"{total:.3e}", "100.0%")]
    for (cause, part), stage in zip(found.parts(), [*found.stages[1:], None], strict=True):
        what = stage.what if stage else "rounding of the rollout engine"
        left = f"{stage.std:.4g}" if stage else ""
        rows.append((cause, what, left, f"{part:.3e}", f"{part / total:.1%}" if total else ""))
    print(flight.format_table(["cause", "taken away by", "std left", "variance", "share"], rows))
    chart = directory.plots / f"mismatch_step_{arguments.step:08d}.png"
    attribution.draw(found, f"{arguments.run.name}, step {arguments.step}", chart)
    print(f"chart: {chart}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"parts": dict(found.parts()), "std": {s.cause: s.std for s in found.stages}}, indent=1)
        )
    return EXIT_DONE
