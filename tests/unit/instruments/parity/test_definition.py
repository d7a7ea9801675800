"""The float64 definition of each family is transformers' model; a tap that is off is named; bad input is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import InputError
from megatron_rl.instruments.parity import report, transformers_taps, witnesses
from megatron_rl.instruments.parity.compare import compare
from megatron_rl.instruments.parity.definition import Checkpoint
from megatron_rl.instruments.parity.delta_net import evaluation_of
from megatron_rl.instruments.parity.families import FAMILIES
from megatron_rl.instruments.parity.record import Record, in_words, joined, place
from megatron_rl.model.families import FAMILIES as SUPPORTED
from tests.support.tiny import MODEL
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint
from tools.dev.parity_bench import MODELS, make_models

SEQUENCES = ([3, 17, 5, 80, 80, 2, 9, 41, 100, 6, 6, 12], [1, 2, 3], [99, 4, 31, 7])
NAN = float("nan")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


def witness(path: Path, dtype: torch.dtype = torch.float32) -> Record:
    return transformers_taps.taps_of(transformers_taps.load(path, dtype), SEQUENCES, 1.0)


def test_every_family_has_a_definition_or_is_refused(tmp_path):
    assert set(FAMILIES) <= set(SUPPORTED)
    for family in set(SUPPORTED) - set(FAMILIES):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(InputError, match=f"model_type is '{family}'; there are qwen3_moe, qwen3_next"):
            Checkpoint(tmp_path)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_transformers_is_within_every_bound(models, model, dtype):
    checkpoint, record = Checkpoint(models[model]), witness(models[model], dtype)
    result = compare(checkpoint, [record])
    assert result.failures == [], result.verdict()
    wanted = set(evaluation_of(checkpoint, record).taps())
    has_gate = FAMILIES[model].shared == "shared_expert" if model in FAMILIES else False
    left_out = {"0.shared", "1.shared"} if has_gate else set()  # its gate is no module
    left_out |= {"1.attention"} if "1.gated" in wanted else set()
    assert {error.tap for error in result.errors} == wanted - left_out


@pytest.mark.parametrize("model", MODELS)
def test_an_operator_that_is_off_is_named(models, model):
    """Each tap alone is moved by ten bounds: the first failure is there, or where the tap is an input."""
    checkpoint, record = Checkpoint(models[model]), witness(models[model])
    clean = {error.tap: error for error in compare(checkpoint, [record]).errors}
    for tap in [tap for tap in record.taps if not tap.endswith(("chosen", "embedding"))]:
        before = record.taps[tap].clone()
        row = len(before) // 2
        record.taps[tap][row] += 10 * clean[tap].largest_bound
        result = compare(checkpoint, [record])
        assert result.first[0].tap == tap, (tap, result.verdict())
        assert result.first[0].worst == record.sequence_of(int(record.predicting[row]) if tap == "logprob" else row)
        record.taps[tap] = before


def test_llama3_scaling_is_transformers(tmp_path):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    save_checkpoint(build_model(build_tiny_config("llama", "nano", rope_parameters=rope)), tmp_path)
    checkpoint, record = Checkpoint(tmp_path), witness(tmp_path)
    assert compare(checkpoint, [record]).failures == []
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compare(Checkpoint(tmp_path), [record]).first[0].tap == "0.q_rope"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """DeepSeek-V3 with latent queries, four groups of experts of which a token takes two, and another epsilon than
    that of its latent norms."""
    folder = tmp_path_factory.mktemp("grouped")
    experts = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    more = {"q_lora_rank": 48, "kv_lora_rank": 64, "rms_norm_eps": 1e-3, "initializer_range": 0.2}
    model = build_model(build_tiny_config("deepseek_v3", "nano", vocab_size=120, **experts, **more))
    save_checkpoint(model, folder)
    return folder


def test_latent_queries_and_groups_of_experts_are_transformers(grouped):
    checkpoint, record = Checkpoint(grouped), witness(grouped)
    result = compare(checkpoint, [record])
    assert result.failures == [], result.verdict()
    taps = {error.tap for error in result.errors}
    assert {"0.q_latent", "0.q_latent_norm", "0.kv_latent_norm", "1.chosen"} <= taps
    # Without taps of it, the choice of the definition is the same.
    chosen = record.taps.pop("1.chosen")
    assert evaluation_of(checkpoint, record).chosen(1).equal(chosen)


def test_an_expert_outside_of_the_best_groups_is_a_fault(grouped):
    """Also one that is better than a chosen one: its group was not taken."""
    checkpoint, record = Checkpoint(grouped), witness(grouped)
    logits, chosen = record.taps["1.router_logits"], record.taps["1.chosen"]
    sound = chosen.clone()
    scores = evaluation_of(checkpoint, record).choice_scores(1).value
    inside = {expert // 4 for expert in sound[3].tolist()}
    outside = [e for e in range(16) if e // 4 not in inside]
    worst = min(sound[3].tolist(), key=lambda e: scores[3, e])
    best = max(outside, key=lambda e: scores[3, e])
    for other in (best, next(e for e in range(16) if e // 4 in inside and e not in sound[3].tolist())):
        chosen[3] = torch.tensor(sorted({*sound[3].tolist(), other} - {worst}))
        assert compare(checkpoint, [record]).first[0].tap == "1.chosen", other
    chosen[3] = sound[3]
    logits[3, best] = logits[3].min() + 1e-9  # whatever is outside stays so
    assert "1.chosen" not in {error.tap for error in compare(checkpoint, [record]).failures}


def test_an_engine_without_keys_and_values_is_held_to_its_latent_vectors(models):
    """vLLM decodes without them. The bound allows both ways to compute, and a fault still passes it."""
    checkpoint, record = Checkpoint(models["deepseek_v3"]), witness(models["deepseek_v3"])
    for tap in [tap for tap in record.taps if tap.endswith((".k", ".v"))]:
        del record.taps[tap]
    result = compare(checkpoint, [record])
    assert result.failures == [], result.verdict()
    record.taps["1.kv_latent_norm"] = record.taps["1.kv_latent_norm"].roll(1, -1)
    assert [error.tap for error in compare(checkpoint, [record]).failures] == ["1.kv_latent_norm", "1.attention"]


def test_a_missing_tap_is_computed_from_those_before(models):
    """The next operator is then held to both: its bound is larger, and a fault of the missing one shows there."""
    checkpoint, record = Checkpoint(models["qwen3"]), witness(models["qwen3"])
    bound = {error.tap: error.bound for error in compare(checkpoint, [record]).errors}
    del record.taps["1.q_norm"]
    result = compare(checkpoint, [record])
    (rope,) = [error for error in result.errors if error.tap == "1.q_rope"]
    assert rope.passes
    assert rope.largest_bound > bound["1.q_rope"]
    record.taps["1.q_rope"] = record.taps["1.q_rope"] * 1.01
    assert compare(checkpoint, [record]).first[0].tap == "1.q_rope"


def test_experts_that_are_not_the_largest_are_a_fault_and_near_ties_are_not(models):
    checkpoint, record = Checkpoint(models["qwen3_moe"]), witness(models["qwen3_moe"])
    logits, chosen = record.taps["0.router_logits"], record.taps["0.chosen"]
    left_out = next(e for e in range(4) if e not in chosen[2].tolist())
    keeps, loses = sorted(chosen[2].tolist(), key=lambda expert: -logits[2, expert])
    record.taps["0.chosen"][2] = torch.tensor(sorted((keeps, left_out)))
    result = compare(checkpoint, [record])
    assert (result.first[0].tap, result.first[0].positions) == ("0.chosen", (2,))
    logits[2, left_out] = logits[2, loses]  # a tie
    (choice,) = [error for error in compare(checkpoint, [record]).errors if error.tap == "0.chosen"]
    assert choice.passes


def test_a_witness_stands_alone_or_all_depart(models):
    checkpoint = Checkpoint(models["llama"])
    first, second = witness(models["llama"]), witness(models["llama"])
    second.witness = "other"
    second.taps["0.mlp"] += 1
    assert (
        "other stands alone: transformers are within their bounds there"
        in compare(checkpoint, [first, second]).verdict()
    )
    first.taps["0.mlp"] += 1
    result = compare(checkpoint, [first, second])
    assert "every witness that has this operator departs from the checkpoint" in result.verdict()
    text = report.as_text(witnesses.of_model(models["llama"], "fp32", SEQUENCES), result)
    assert "layer 0, mlp of other: own error" in text


def test_what_is_no_number_fails(models):
    checkpoint, record = Checkpoint(models["qwen2"]), witness(models["qwen2"])
    record.taps["1.v"][4, 0] = NAN
    error = compare(checkpoint, [record]).first[0]
    assert (error.tap, error.positions) == ("1.v", (4,))


def test_rows_in_another_order_are_put_back():
    record = Record("w", [2, 3], torch.arange(5), torch.float32)
    record.keep("embedding", torch.tensor([[2.0], [3.0], [4.0], [0.0], [1.0]]))
    record.reordered(torch.tensor([3, 4, 0, 1, 2]))
    assert record.taps["embedding"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert [record.sequence_of(row) for row in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert record.predicting.tolist() == [0, 2, 3]
    whole = joined([record, record], "both")
    assert (whole.lengths, len(whole.taps["embedding"])) == ([2, 3, 2, 3], 10)


def test_taps_are_in_the_order_of_the_pass():
    taps = ["logprob", "1.input_norm", "0.output", "embedding", "0.q_rope", "10.q", "final_norm"]
    assert sorted(taps, key=place) == [
        "embedding",
        "0.q_rope",
        "0.output",
        "1.input_norm",
        "10.q",
        "final_norm",
        "logprob",
    ]
    assert in_words("3.q_rope") == "layer 3, q_rope"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; there are qwen3_moe"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'; there are silu"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_type is 'linear'; there are default"),
    ],
)
def test_a_model_without_a_definition_is_refused(tmp_path, change, told):
    config = json.loads((MODEL / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    with pytest.raises(InputError, match=told.replace("[", r"\[")):
        Checkpoint(tmp_path).rotation  # noqa: B018


@pytest.mark.parametrize(
    ("tokens", "told"), [([[5]], "has 1 tokens; 2 … "), ([[5, 128]], "128 is not a token of the model; 0 … 127")]
)
def test_tokens_that_the_model_does_not_have_are_refused(tokens, told):
    with pytest.raises(InputError, match=told):
        witnesses.of_model(MODEL, "fp32", tokens)
