"""A training run with real engines, and faults at chosen places of it."""

from megatron_rl.__main__ import main
from tests.reliability.programs import arm


def train(arguments: list[str], faults: list[dict]) -> int:
    """`megatron-rl train`; its exit status. ``faults``: see `arm`."""
    for fault in faults:
        arm(**fault)
    return main(["train", *arguments])
