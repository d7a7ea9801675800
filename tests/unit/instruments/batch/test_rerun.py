"""The update of a stored batch, as the loop makes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.batch.rerun import _with_model, check_replayable, repeat_update
from megatron_rl.run.recorded_batches import RecordedBatch
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe


def test_the_schedule_sees_lengths_at_optimizer_steps_as_in_training():
    """Four updates a batch: the batch of step 10 comes after 40 of them."""
    batch, seen = stored_rollouts(10, minibatches=4), []
    learner = learner_at_40(seen)
    repeat_update(learner, RecordedBatch(batch, 40, {}))
    assert seen == [(40, sum(s.length for s in batch.sequences) / len(batch.sequences))]
    assert learner.step == 11


def learner_at_40(seen: list) -> SimpleNamespace:
    return SimpleNamespace(
        num_updates=40,
        step=10,
        scheduler=SimpleNamespace(observe_length=lambda *observed: seen.append(observed)),
        update=lambda batch: {"actor/pg_loss": 0.0},
    )


def test_what_the_learner_scores_is_of_the_repeated_update_alone():
    """Without `scoring` or `reference` their metrics would be the stored ones, beside another po."""
    batch = stored_rollouts(10, teacher=True)
    for sequence in batch.sequences:
        sequence.scoring_logprobs = sequence.reference_logprobs = np.zeros(sequence.length, np.float32)
    repeat_update(learner_at_40([]), RecordedBatch(batch, 40, {}))
    assert {(s.scoring_logprobs, s.reference_logprobs) for s in batch.sequences} == {(None, None)}
    assert all(s.teacher_logprobs is not None for s in batch.sequences)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batch": {"minibatches": 1}, "scoring": "bf16"}, "minibatches: 1, but the stored batch has 4"),
        ({"teacher": {"top_k": 129}}, "top_k: 129, but the model has 128 tokens"),
    ],
)
def test_what_a_stored_batch_does_not_have_is_refused(sections, message):
    batch = stored_rollouts(0, minibatches=4)
    check_replayable(tiny_recipe(batch={"minibatches": 4}), batch)
    with pytest.raises(InputError, match=message):
        check_replayable(tiny_recipe(**{"batch": {"minibatches": 4}, **sections}), batch)


def test_other_weights_leave_the_reference_where_the_run_started():
    other = Path("/of/a/later/step")
    changed = _with_model(tiny_recipe(reference={}), other)
    assert (changed.model.path, changed.reference.path) == (other, MODEL)
    assert _with_model(tiny_recipe(reference={"path": "/own"}), other).reference.path == Path("/own")
    assert _with_model(tiny_recipe(), other).reference is None
