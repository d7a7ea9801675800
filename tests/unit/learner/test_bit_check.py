"""The gate of exact mode, without a model: what it lets through, what it compares, and what it cannot do without."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.errors import RunEnded
from megatron_rl.learner import bit_check as gate
from megatron_rl.types import Batch
from tests.support.tiny import stored_rollouts, tiny_recipe


@pytest.fixture
def batch() -> Batch:
    batch = stored_rollouts(0, num_sequences=3)
    for sequence in batch.sequences:
        sequence.exact_logprobs = sequence.inference_logprobs.copy()
    return batch


def check(batch: Batch, logprobs: dict[int, np.ndarray], compare: int | str = "all") -> float:
    recipe = tiny_recipe(exact={"gate": compare})
    return gate.check(SimpleNamespace(recipe=recipe), batch, logprobs, "pass", range(len(batch.sequences)))


def recorded(batch: Batch) -> dict[int, np.ndarray]:
    return {i: sequence.exact_logprobs.copy() for i, sequence in enumerate(batch.sequences)}


def test_equal_bits_pass(batch):
    assert check(batch, recorded(batch)) == 0.0


@pytest.mark.parametrize("change", [lambda x: np.nextafter(x, np.float32(0)), lambda x: np.float32("nan")])
def test_one_bit_and_nan_end_the_run(batch, change, monkeypatch):
    monkeypatch.setattr(gate, "first_divergence", lambda *_: "Somewhere")
    recording = recorded(batch)
    recording[1][0] = change(recording[1][0])
    with pytest.raises(RunEnded, match=r"sequence 'train:1/0', response token 0 .* 1 of \d+ .*Somewhere"):
        check(batch, recording)


def test_nothing_recorded_is_no_agreement(batch):
    recording = recorded(batch)
    batch.sequences[2].exact_logprobs = None
    with pytest.raises(AssertionError, match="sequence 'train:2/0' has no exact_logprobs"):
        check(batch, recording)


@pytest.mark.parametrize("compare", [1, 2, 3, 4])
def test_a_sample_is_drawn_anew_in_every_step(batch, compare, monkeypatch):
    """A wrong sequence ends the run in the steps whose sample has it, and in no other."""
    monkeypatch.setattr(gate, "first_divergence", lambda *_: "Somewhere")
    caught = []
    for batch.step in range(30):
        for wrong in range(3):
            recording = recorded(batch)
            recording[wrong] = recording[wrong] + 1
            try:
                check(batch, recording, compare)
            except RunEnded:
                caught.append((batch.step, wrong))
    assert len(caught) == 30 * min(compare, 3)
    assert {wrong for _, wrong in caught} == {0, 1, 2}
