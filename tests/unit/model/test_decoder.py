"""What follows from a decoder's numbers: padding of its vocabulary, and what the learner cannot build."""

from dataclasses import replace

import pytest

from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from

MOE = architecture_from(KNOWN_MODELS["Qwen3-30B-A3B"])
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(("vocabulary", "ranks", "padded"), [(10, 1, 10), (10, 4, 12), (12, 4, 12), (13, 4, 16)])
def test_the_vocabulary_is_padded_to_what_ranks_share_evenly(vocabulary, ranks, padded):
    assert replace(MOE, vocab_size=vocabulary).padded_vocab_size(ranks) == padded


def test_a_model_without_experts_is_dense():
    assert (MOE.is_moe, replace(MOE, num_experts=0).is_moe) == (True, False)


@pytest.mark.parametrize(("chosen", "fits"), [(1, False), (2, True), (4, True), (5, False)])
def test_from_two_to_all_experts_may_be_chosen(chosen, fits):
    (*problems,) = replace(MOE, num_experts=4, experts_per_token=chosen).problems()
    assert (problems == []) == fits
    assert all(f"num_experts_per_tok is {chosen} of 4 experts" in problem for problem in problems)


def test_llama_3s_scaling_of_any_factor_is_built_and_no_other():
    scaled = replace(MOE, rope_scaling=LLAMA3)
    assert (scaled.problems(), scaled.llama3_factor) == ([], 32.0)
    assert (MOE.problems(), MOE.llama3_factor) == ([], None)
    assert replace(MOE, rope_scaling={**LLAMA3, "factor": 8.0}).llama3_factor == 8.0
    for other in ({**LLAMA3, "low_freq_factor": 2.0}, {"type": "yarn", "factor": 4.0}, {**LLAMA3, "factor": 0.0}):
        (problem,) = replace(MOE, rope_scaling=other).problems()
        assert "only Llama 3's" in problem
        assert replace(MOE, rope_scaling=other).llama3_factor is None


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2-Instruct"])
def test_yarn_is_for_latent_attention(name):
    large = architecture_from(KNOWN_MODELS[name])
    assert (large.problems(), large.llama3_factor) == ([], None)
    assert large.yarn.factor * large.yarn.original_max_position_embeddings == large.max_position_embeddings
    (problem,) = replace(large, max_position_embeddings=large.max_position_embeddings + 1).problems()
    assert "the most that vLLM takes" in problem
    scaling = large.rope_scaling
    without = {key: value for key, value in scaling.items() if key != "mscale"}
    for other in (
        LLAMA3,
        without,
        scaling | {"factor": 1.0},
        scaling | {"beta_fast": 0.5},
        scaling | {"truncate": True},
    ):
        (problem,) = replace(large, rope_scaling=other).problems()
        assert "only yarn with factor" in problem
        assert replace(large, rope_scaling=other).yarn is None
    assert replace(MOE, rope_scaling=scaling).yarn is None


def test_yarn_with_sinks_has_all_keys_that_vllm_asks_for_and_no_other():
    model = architecture_from(KNOWN_MODELS["gpt-oss-20b-bf16"])
    assert (model.problems(), model.llama3_factor) == ([], None)
    assert (model.yarn.truncate, model.yarn.mscale, model.yarn.factor) == (False, None, 32.0)
    scaling = model.rope_scaling
    for other in (
        None,
        LLAMA3,
        {key: value for key, value in scaling.items() if key != "beta_fast"},
        scaling | {"mscale": 1.0},
        scaling | {"attention_factor": 1.5},
        scaling | {"truncate": 1},
        scaling | {"factor": 1.0},
        scaling | {"beta_fast": 0.5},
    ):
        (problem,) = replace(model, rope_scaling=other).problems()
        assert "not supported with attention sinks" in problem
        assert replace(model, rope_scaling=other).yarn is None
    (problem,) = replace(model, max_position_embeddings=32 * 4096 + 1).problems()
    assert "the most that vLLM takes" in problem


def test_some_layers_of_a_model_keep_their_kinds():
    model = architecture_from(KNOWN_MODELS["Qwen3-Next-80B-A3B-Instruct"])
    part = model.of_layers([0, 3, 47])
    assert (part.num_layers, part.linear_layers, part.moe_layers) == (3, (True, False, False), (True,) * 3)
    assert [part.is_linear(layer) for layer in range(3)] == [True, False, False]
    assert architecture_from(KNOWN_MODELS["gpt-oss-20b-bf16"]).of_layers([1, 2]).windows == (None, 128)
