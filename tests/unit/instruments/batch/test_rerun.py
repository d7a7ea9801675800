"""The update of a stored batch, as the loop makes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from megatron_rl.instruments.batch.rerun import _with_model, repeat_update
from megatron_rl.run.recorded_batches import RecordedBatch
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe


def test_the_schedule_sees_lengths_at_optimizer_steps_as_in_training():
    """Four updates a batch: the batch of step 10 comes after 40 of them."""
    batch, seen = stored_rollouts(10, minibatches=4), []
    learner = SimpleNamespace(
        num_updates=40,
        step=10,
        scheduler=SimpleNamespace(observe_length=lambda *observed: seen.append(observed)),
        update=lambda batch: {"actor/pg_loss": 0.0},
    )
    repeat_update(learner, RecordedBatch(batch, 40, {}))
    assert seen == [(40, sum(s.length for s in batch.sequences) / len(batch.sequences))]
    assert learner.step == 11


def test_other_weights_leave_the_reference_where_the_run_started():
    other = Path("/of/a/later/step")
    changed = _with_model(tiny_recipe(reference={}), other)
    assert (changed.model.path, changed.reference.path) == (other, MODEL)
    assert _with_model(tiny_recipe(reference={"path": "/own"}), other).reference.path == Path("/own")
    assert _with_model(tiny_recipe(), other).reference is None
