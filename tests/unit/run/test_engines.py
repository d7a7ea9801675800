"""Weights go from the learner to the engine in an order that leaves room for both."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_rl.run.engines import LearnerWeights, hand_over, load_beside


class Told:
    """A learner and a generator in one, which note what they are asked for."""

    def __init__(self, offloads: bool = True) -> None:
        self.notes: list[str] = []
        self.num_updates = 3
        self.config = SimpleNamespace(offload=SimpleNamespace(is_on=offloads))
        self.offload = SimpleNamespace(come_back=lambda: self.notes.append("come back"))

    def export_weights(self):
        yield "name", self.num_updates

    def step_aside(self, weights: bool = True) -> None:
        self.notes.append("all aside" if weights else "all but weights aside")

    def wake(self) -> None:
        self.notes.append("wake")

    def sleep(self) -> None:
        self.notes.append("sleep")

    def refit(self, weights: LearnerWeights, version: int) -> None:
        self.notes.append(f"refit {version}")
        assert list(weights) == list(weights) == [("name", version)]


@pytest.mark.parametrize("offloads", [True, False])
def test_what_is_not_sent_leaves_before_the_engine_wakes_and_the_weights_after_they_are_sent(offloads):
    both, phases = Told(offloads), []

    @contextmanager
    def phase(name: str):
        phases.append(name)
        yield

    hand_over(both, both, phase)
    assert both.notes == ["all but weights aside", "wake", "refit 3", "all aside"]
    assert phases == (["offload", "refit", "offload"] if offloads else ["refit"])


def test_a_learner_is_filled_while_the_engine_sleeps():
    both = Told()
    assert load_beside(both, both, lambda: both.notes.append("load") or 7) == 7
    assert both.notes[:3] == ["sleep", "come back", "load"]
    assert both.notes[3:] == ["all but weights aside", "wake", "refit 3", "all aside"]
