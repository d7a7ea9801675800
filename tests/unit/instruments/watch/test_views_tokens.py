"""Responses of recorded batches token by token: what is read of a batch is what was recorded, and no more is read."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch import views
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.run import recorded_batches as batches
from megatron_rl.run.recorded_batches import BatchSlices, batch_path, delete_batch, load_batch, record_batch
from tests.support.tiny import MODEL, stored_rollouts
from tests.support.written_run import EVIL, WrittenRun


@pytest.fixture
def run(tmp_path) -> WatchedRun:
    return WatchedRun("run", WrittenRun(tmp_path / "run").directory.root)


def written(run: WatchedRun, step: int):
    return WrittenRun(run.directory.root).batch(step)


def split_in_two(path) -> None:
    """The batch at ``path`` as two replicas write it, each every other sequence."""
    described, batch = json.loads(path.read_text()), load_batch(path).batch
    whole = path.with_suffix(".safetensors")
    parts = []
    for replica in range(2):
        its = list(range(replica, len(batch.sequences), 2))
        some = [batch.sequences[i] for i in its]
        arrays = {
            "tokens": np.concatenate([s.tokens for s in some]),
            "cu_seqlens": np.cumsum([0, *(s.length for s in some)]),
            "cu_response": np.cumsum([0, *(s.response_length for s in some)]),
        }
        for name in ("inference_logprobs", "old_logprobs", "loss_mask", "policy_versions"):
            arrays[name] = np.concatenate([getattr(s, name) for s in some])
        file = path.with_name(f"{path.stem}.{replica:04d}.safetensors")
        save_file(arrays, file)
        parts.append({"file": file.name, "sequences": its})
    whole.unlink()
    path.write_text(json.dumps({**described, "parts": parts}))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("block", [1, 40, 2**22])
def test_every_response_is_that_of_the_whole_batch(run, monkeypatch, parts, block):
    monkeypatch.setattr(batches, "BLOCK_TOKENS", block)
    written(run, 3)
    path = batch_path(run.directory.batches, 3)
    if parts == 2:
        split_in_two(path)
    slices = BatchSlices(path)
    for i, s in enumerate(load_batch(path).batch.sequences):
        got = slices.response(i)
        assert got.prompt.tolist() == s.tokens[: s.prompt_length].tolist()
        assert got.tokens.tolist() == s.tokens[s.prompt_length :].tolist()
        assert np.array_equal(got.rollout_logprobs, s.inference_logprobs)
        assert np.array_equal(got.learner_logprobs, s.old_logprobs)
        assert np.array_equal(got.loss_mask, s.loss_mask)
        assert np.array_equal(got.policy_versions, s.policy_versions)
        assert slices.lengths[i] == s.response_length
        assert slices.largest_log_rho[i] == np.abs(s.old_logprobs - s.inference_logprobs).max()


def test_a_response_with_what_both_engines_say_of_it(run):
    sequence = written(run, 3).sequences[5]
    got = views.response(run, 3, 5, 0)
    assert got["ids"] == sequence.tokens[sequence.prompt_length :].tolist()
    assert got["texts"] == [Tokenizer.from_file(str(MODEL / "tokenizer.json")).id_to_token(i) for i in got["ids"]]
    gap = sequence.old_logprobs.astype(np.float64) - sequence.inference_logprobs
    assert got["log_rho"] == [float(f"{value:.6g}") for value in gap]
    assert got["mu"] == [float(f"{math.exp(value):.6g}") for value in sequence.inference_logprobs]
    assert got["strip"] == got["log_rho"]
    assert got["trained"] == sequence.loss_mask.astype(int).tolist()
    rest = views.response(run, 3, 5, 2, number=3)
    assert rest["ids"] == got["ids"][2:5]
    assert rest["start"] == 2


def test_orders(run):
    batch = written(run, 3)
    largest = [float(np.abs(s.old_logprobs - s.inference_logprobs).max()) for s in batch.sequences]
    wanted = {
        "mismatch": sorted(range(24), key=lambda i: -largest[i]),
        "reward": sorted(range(24), key=lambda i: -batch.sequences[i].reward),
        "length": sorted(range(24), key=lambda i: -batch.sequences[i].response_length),
        "batch": list(range(24)),
    }
    for order, expected in wanted.items():
        got = [views.responses(run, 3, order, start, 10)["responses"] for start in (0, 10, 20)]
        assert [about["sequence"] for page in got for about in page] == expected
    with pytest.raises(InputError, match="one of mismatch, reward, length, batch"):
        views.responses(run, 3, "alphabet", 0, 10)


def test_a_batch_without_the_learners_log_probs(run):
    path = batch_path(run.directory.batches, 0)
    record_batch(run.directory.batches, stored_rollouts(0), 0)
    assert BatchSlices(path).largest_log_rho is None
    got = views.response(run, 0, 0, 0)
    assert got["log_rho"] is None
    assert got["strip"] is None
    assert views.responses(run, 0, "mismatch", 0, 2)["order"] == "batch"


def test_a_batch_that_is_deleted_is_an_input_error(run):
    for step in (1, 2):
        written(run, step)
    kept_open = run.batch(1)
    assert delete_batch(run.directory.batches, 1)
    assert run.batch_steps() == [2]
    with pytest.raises(InputError, match="step 1: no recorded batch; there are: 2"):
        run.batch(1)
    with pytest.raises(InputError, match=r"cannot be read.*recorder\.keep"):
        kept_open.response(0)
    with pytest.raises(InputError, match="sequence 24; it has 24"):
        views.response(run, 2, 24, 0)


def test_a_step_that_is_recorded_again_is_read_again(run):
    written(run, 1)
    before = views.response(run, 1, 0, 0)["ids"]
    batch = written(run, 7)
    batch.step = 1
    record_batch(run.directory.batches, batch, 1)
    after = views.response(run, 1, 0, 0)["ids"]
    assert after == batch.sequences[0].tokens[batch.sequences[0].prompt_length :].tolist() != before


def test_probabilities_that_json_does_not_have(run):
    batch = written(run, 1)
    batch.sequences[0].old_logprobs[0] = -np.inf
    record_batch(run.directory.batches, batch, 1)
    got = views.response(run, 1, 0, 0)
    assert got["log_rho"][0] is None
    assert got["po"][0] == 0.0
    json.dumps([got, views.responses(run, 1, "mismatch", 0, 30)], allow_nan=False)


def byte_level() -> Tokenizer:
    """A token for each byte."""
    tokenizer = Tokenizer(
        models.BPE({symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_character_of_several_tokens_is_whole_and_spaces_stay():
    tokenizer = byte_level()
    got = views.texts(tokenizer, np.array(tokenizer.encode("a é  b").ids))
    assert got == ["a", " ", "", "é", " ", " ", "b"]


def test_what_a_model_writes_cannot_turn_the_direction_of_text_or_colour_a_terminal():
    tokenizer = byte_level()
    got = "".join(views.texts(tokenizer, np.array(tokenizer.encode(EVIL).ids)))
    assert "\x1b" not in got
    assert "\u202e" not in got
    assert "\\x1b[31m" in got


def test_numbers_where_the_tokenizer_is_not_here(run):
    sequence = written(run, 3).sequences[0]
    run.directory.recipe.write_text("model: {path: /nowhere}\n")
    got = views.response(run, 3, 0, 0)
    assert not got["has_tokenizer"]
    assert got["texts"] == [f" {token}" for token in sequence.tokens[sequence.prompt_length :]]
