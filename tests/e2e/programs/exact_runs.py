"""What the ranks of test_exact_layouts.py run: the command line, several times in one start of the ranks."""

from megatron_rl.__main__ import main
from megatron_rl.run import start
from tests.support.layouts import leave_layout


def train(runs: list[list[str]]) -> list[int]:
    """The exit status of each run; one that fails is the last."""
    start.shutdown = leave_layout  # the next run is in the same world
    results = []
    for arguments in runs:
        results.append(main(arguments))
        if results[-1]:
            break
    return results
