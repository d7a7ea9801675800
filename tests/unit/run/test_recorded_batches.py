"""Batches on disk: nothing is lost, nothing needs this package to be read, old ones go."""

from __future__ import annotations

import json
import resource
from dataclasses import fields

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.errors import InputError
from megatron_rl.run.recorded_batches import (
    batch_bytes,
    batch_path,
    delete_batch,
    keep_batch,
    load_batch,
    record_batch,
    recorded_steps,
)
from megatron_rl.types import SET_ARRAYS, Batch, Rollout
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import stored_rollouts, tiny_recipe


def full_batch(step: int = 3) -> Batch:
    batch = stored_rollouts(step, minibatches=2)
    with_routes(batch, random_routes(batch))
    for s in batch.sequences:
        s.old_logprobs, s.current_logprobs = s.inference_logprobs - 0.1, s.inference_logprobs - 0.2
    return batch


def test_a_batch_survives_the_disk(tmp_path):
    batch = full_batch()
    loaded = load_batch(record_batch(tmp_path, batch, 7, {"actor/grad_norm": 0.25, "bad": float("nan")}))
    assert loaded.policy_version == 7
    assert loaded.metrics == {"actor/grad_norm": 0.25}
    assert loaded.batch.minibatches == batch.minibatches
    for got, want in zip(loaded.batch.sequences, batch.sequences, strict=True):
        for field in fields(Rollout):
            left, right = getattr(got, field.name), getattr(want, field.name)
            if isinstance(right, np.ndarray):
                assert left.dtype == right.dtype, field.name
                assert np.array_equal(left, right), field.name
            else:
                assert left == right, field.name


@pytest.mark.parametrize(
    "names",
    [("head_tokens", "head_logprobs"), ("kept_tokens", "head_logprobs"), ("teacher_tokens", "teacher_set_logprobs")],
)
def test_heads_survive_the_disk(tmp_path, names):
    """And sets of a teacher; log-probs of another number of tokens are damage."""
    batch, random = stored_rollouts(3), np.random.default_rng(0)
    for s in batch.sequences:
        setattr(s, names[0], random.integers(-1, 99, (s.length, 5), dtype=np.int32))
        values = -random.random((s.length, 5), np.float32)
        values[getattr(s, names[0]) < 0] = -np.inf
        setattr(s, names[1], values)
    path = record_batch(tmp_path, batch, 7)
    for got, want in zip(load_batch(path).batch.sequences, batch.sequences, strict=True):
        for name in SET_ARRAYS:
            left, right = getattr(got, name), getattr(want, name)
            assert (left is None) == (right is None), name
            assert left is None or (left.dtype == right.dtype and np.array_equal(left, right)), name

    for s in batch.sequences:
        setattr(s, names[1], getattr(s, names[1])[:, 1:])
    with pytest.raises(InputError, match=f"{names[1]} has another shape"):
        load_batch(record_batch(tmp_path / "other", batch, 7))


def test_absent_fields_stay_absent(tmp_path):
    loaded = load_batch(record_batch(tmp_path, stored_rollouts(0), 0)).batch
    assert loaded.sequences[0].old_logprobs is None
    assert loaded.sequences[0].routed_experts is None
    assert loaded.sequences[0].route_checksums is None


def test_the_files_say_enough_by_themselves(tmp_path):
    """What the module's docstring promises a reader who has only safetensors and JSON."""
    batch = full_batch()
    path = record_batch(tmp_path, batch, 0)
    arrays, described = load_file(path.with_suffix(".safetensors")), json.loads(path.read_text())
    start, stop = arrays["cu_seqlens"][4:6]
    assert arrays["tokens"][start:stop].tolist() == batch.sequences[4].whole.tolist()
    first, last = arrays["cu_response"][4:6]
    assert (arrays["current_logprobs"][first:last] == batch.sequences[4].current_logprobs).all()
    assert (arrays["routed_experts"][start - 4 : stop - 5] == batch.sequences[4].routed_experts).all()
    assert described["sequences"][4]["id"] == "train:4/0"


@pytest.mark.parametrize("limit", [300, 20000], ids=["arrays", "description"])
def test_where_files_cannot_grow_nothing_of_the_step_is_left(tmp_path, limit):
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    batch = full_batch()
    assert record_batch(tmp_path, batch, 0, dict.fromkeys(map(str, range(3000)), 1.0)).stat().st_size > 20000
    size = batch_path(tmp_path, batch.step).with_suffix(".safetensors").stat().st_size
    assert 300 < size < 20000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, own[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            record_batch(tmp_path, batch, 0, dict.fromkeys(map(str, range(3000)), 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, own)
    assert not list(tmp_path.iterdir())


def test_kept_batches_are_not_deleted(tmp_path):
    for step in range(4):
        record_batch(tmp_path, stored_rollouts(step), step, keep=step == 1)
    keep_batch(tmp_path, 2)
    assert [delete_batch(tmp_path, step) for step in range(4)] == [True, False, False, True]
    assert recorded_steps(tmp_path) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 4, "arrays of deleted batches are left, or partial files"
    assert batch_bytes(tmp_path, 1) == sum(file.stat().st_size for file in tmp_path.glob("step_00000001.*"))
    assert load_batch(batch_path(tmp_path, 2)).batch.step == 2


def test_missing_and_foreign_batches_are_named(tmp_path):
    path = record_batch(tmp_path, stored_rollouts(2), 0)
    with pytest.raises(InputError, match="recorded steps: 2 "):
        load_batch(batch_path(tmp_path, 5))
    path.write_text(path.read_text().replace('"format_version": 3', '"format_version": 2'))
    with pytest.raises(InputError, match="format_version 2, this version reads 3"):
        load_batch(path)


def test_a_part_that_was_not_copied_is_named(tmp_path):
    path = record_batch(tmp_path, stored_rollouts(2), 0)
    path.with_suffix(".safetensors").unlink()
    with pytest.raises(InputError, match=r"its part step_00000002.safetensors is missing"):
        load_batch(path)


def test_an_alarm_cannot_ask_for_what_the_recorder_refuses():
    alarm = {"name": "high", "metric": "actor/grad_norm", "above": 1.0, "then": ["record_batch"]}
    with pytest.raises(ValueError, match=r"record_batches: off, but alarm 'high' wants record_batch"):
        tiny_recipe(recorder={"record_batches": "off"}, monitor={"alarms": [alarm]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda described, arrays: described["sequences"].pop(), "its parts do not hold each of"),
        (lambda described, arrays: described["minibatches"][0].append(99), "its mini-batches do not hold each of"),
        (
            lambda described, arrays: described["sequences"][0].update(prompt_length=1),
            "lengths of its sequences do not",
        ),
        (lambda described, arrays: described["sequences"][0].pop("prompt_length"), "KeyError: 'prompt_length'"),
        (lambda described, arrays: described.update(parts=3), "TypeError"),
        (lambda described, arrays: described.update(parts=[{"file": "../x", "sequences": [0]}]), "ValueError"),
        (
            lambda described, arrays: arrays["cu_seqlens"].__setitem__(1, 10**6),
            "the lengths of its",
        ),
        (lambda described, arrays: arrays.update(tokens=arrays["tokens"][:-1]), "tokens has the shape"),
        (lambda described, arrays: arrays["tokens"].__setitem__(0, -1), "tokens holds a negative number"),
        (
            lambda described, arrays: arrays["inference_logprobs"].__setitem__(0, 0.5),
            "that is not a log-prob",
        ),
        (lambda described, arrays: arrays.pop("cu_response"), "KeyError: 'cu_response'"),
    ],
)
def test_an_altered_batch_is_named(tmp_path, change, message):
    path = record_batch(tmp_path, stored_rollouts(2), 0)
    described, arrays = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
    described["parts"][0].pop("sha256")  # as in batches that earlier versions recorded
    change(described, arrays)
    path.write_text(json.dumps(described))
    save_file(arrays, path.with_suffix(".safetensors"))
    with pytest.raises(
        InputError, match=f"recorded batch .*step_00000002.json: altered or damaged .*{message}|{message}"
    ):
        load_batch(path)


def test_another_token_in_a_recorded_batch_is_named(tmp_path):
    """Every value is one that a batch may have: the digest alone tells."""
    path = record_batch(tmp_path, stored_rollouts(2), 0)
    arrays = load_file(path.with_suffix(".safetensors"))
    arrays["tokens"][0] ^= 1
    save_file(arrays, path.with_suffix(".safetensors"))
    with pytest.raises(InputError, match=r"step_00000002.safetensors is not the file that was recorded"):
        load_batch(path)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff" * 100, b"[" * 100_000])
def test_a_file_of_a_batch_that_is_something_else_is_named(tmp_path, suffix, content):
    path = record_batch(tmp_path, stored_rollouts(2), 0)
    path.with_suffix(suffix).write_bytes(content)
    with pytest.raises(InputError, match=r"recorded batch .*altered or damaged"):
        load_batch(path)
