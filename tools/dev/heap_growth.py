"""Does the learner's memory grow with its updates? Resident memory, and what glibc says is in use and free, of rank 0.

    torchrun --nproc-per-node 2 -m tools.dev.heap_growth [--updates 2000] [--set tensor=2] [--keep-freed]

A leak shows as growth of what is in use; growth of what is free is glibc keeping freed memory, which a run gives back
(`megatron_rl/process/host.py`; --keep-freed: does not). The tiny model, stored rollouts, no engine.
"""

from __future__ import annotations

import argparse
import warnings

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.process import host
from megatron_rl.process.ranks import world_rank
from tests.support.tiny import stored_rollouts, tiny_recipe

warnings.filterwarnings("ignore")

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="updates between lines")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=SIZE", help="a key of learner.parallel")
    parser.add_argument("--keep-freed", action="store_true", help="leave freed memory with glibc")
    options = parser.parse_args()
    parallel = {key: int(size) for key, size in (item.split("=") for item in options.set)}
    learner = Learner(tiny_recipe(learner={"parallel": parallel, "optimizer": {"lr": 1e-6}}))
    batches = [stored_rollouts(step) for step in range(8)]
    freed, times, largest = host.FreedMemory(), 0, 0
    if world_rank() == 0:
        print(f"{'updates':>8} {'resident':>9} {'largest':>9} {'in use':>9} {'free':>9}  MiB; given back")
    for update in range(options.updates + 1):
        learner.update(batches[update % len(batches)])
        times += 0 if options.keep_freed else freed.give_back()
        largest = max(largest, host.resident_bytes())
        if update % options.every == 0 and world_rank() == 0:
            heap = host.heap()
            sizes = (host.resident_bytes(), largest, heap.uordblks, heap.fordblks)
            print(f"{update:>8} " + " ".join(f"{size / MIB:>9.1f}" for size in sizes) + f"  {times}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
