"""What a recipe may not ask of the model that it names, and layouts that people run."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.model_rules import beyond_exact, layout_problems, model_problems, rollout_problems, stage_layers
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from, read_architecture, shape_of
from megatron_rl.model.families import FAMILIES
from tests.support.families import DENSE
from tests.support.tiny import MODEL, tiny_recipe

GLM = architecture_from(KNOWN_MODELS["GLM-4.5-Air"])

LING = architecture_from(KNOWN_MODELS["Ling-mini-2.0"])

MOONLIGHT = architecture_from(KNOWN_MODELS["Moonlight-16B-A3B"])

SHARED = architecture_from(KNOWN_MODELS["Qwen1.5-MoE-A2.7B"])


def test_the_exact_engine_has_shared_experts_and_no_sigmoid_router():
    exact = tiny_recipe(rollout={"engine": "exact"})
    assert model_problems(exact, SHARED, 1) == []
    (problem,) = [p for p in model_problems(exact, GLM, 1) if p.startswith("rollout.engine")]
    assert problem.startswith("rollout.engine: exact, but the model (glm4_moe) has a sigmoid router")
    assert beyond_exact(replace(GLM, sigmoid_router=False), 1) == (
        "the model (glm4_moe) has rotary embeddings of a part of each head"
    )


def test_the_exact_engine_has_norms_over_all_heads_on_one_tensor_parallel_rank():
    olmoe = architecture_from(KNOWN_MODELS["OLMoE-1B-7B-0924"])
    exact = {"engine": "exact"}
    (problem,) = model_problems(tiny_recipe(rollout=exact, learner={"parallel": {"tensor": 2}}), olmoe, 2)
    assert problem.startswith("rollout.engine: exact, but olmoe has norms over all heads")
    assert "learner.parallel.tensor: 2" in problem
    assert model_problems(tiny_recipe(rollout=exact), olmoe, 1) == []


def test_the_exact_engine_has_no_latent_attention():
    alone = replace(MOONLIGHT, sigmoid_router=False)
    assert beyond_exact(alone, 1) == "the model (deepseek_v3) has latent attention"
    assert [beyond_exact(a, 2) for a in (read_architecture(MODEL), architecture_from(KNOWN_MODELS["Qwen3-8B"]))] == [
        None,
        None,
    ]


@pytest.mark.parametrize("model", [GLM, LING], ids=["GLM-4.5-Air", "Ling-mini-2.0"])
@pytest.mark.parametrize(("learner", "rollout"), [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")])
def test_a_router_that_vllm_has_in_fp32_alone_is_asked_for_on_both_sides(model, learner, rollout):
    def said(**precision) -> list[str]:
        recipe = tiny_recipe(learner={"dtype": learner}, rollout={"dtype": rollout}, precision=precision)
        return [p for p in model_problems(recipe, model, 1) if "precision.fp32_router: false" in p]

    assert len(said()) == 1
    assert said(fp32_router=True) == []
    assert not [p for p in model_problems(tiny_recipe(), model, 1) if "fp32_router" in p]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"learner": {"parallel": {"context": 2}}},
            "learner.parallel.context: 2, but the model",
        ),
        ({"rollout": {"quantization": {"kv_cache": "fp8"}}}, "rollout.quantization.kv_cache: fp8, but the model"),
        ({"rollout": {"quantization": {"weights": "int4"}}}, "rollout.quantization.weights: int4, but the model"),
    ],
)
def test_what_no_latent_attention_has_is_refused(sections, said):
    problems = model_problems(tiny_recipe(**sections), MOONLIGHT, 2)
    assert any(problem.startswith(said) for problem in problems), problems
    assert model_problems(tiny_recipe(), MOONLIGHT, 1, "cpu") == []
    assert model_problems(tiny_recipe(precision={"fp32_router": True, "fp32_head": True}), MOONLIGHT, 1) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"rollout": {"dtype": "fp32"}},
            "rollout.dtype: fp32, but the model (gpt_oss) has attention sinks, which vLLM",
        ),
        ({"rollout": {"engine": "exact"}}, "rollout.engine: exact, but the model (gpt_oss) has attention sinks and"),
        ({"learner": {"parallel": {"context": 2}}}, "learner.parallel.context: 2, but the model"),
        ({"learner": {"parallel": {"expert_tensor": 2}}}, "learner.parallel.expert_tensor: 2, but the experts of"),
        ({"rollout": {"quantization": {"kv_cache": "fp8"}}}, "rollout.quantization.kv_cache: fp8, but the model"),
        ({"rollout": {"quantization": {"weights": "int4"}}}, "rollout.quantization.weights: int4, but the model"),
    ],
)
def test_what_no_attention_with_sinks_has_is_refused(sections, said):
    gpt_oss = architecture_from(KNOWN_MODELS["gpt-oss-20b-bf16"])
    bf16 = {"rollout": {"dtype": "bf16"}, "learner": {"dtype": "bf16"}}
    mixed = {key: bf16.get(key, {}) | sections.get(key, {}) for key in bf16 | sections}
    problems = model_problems(tiny_recipe(**mixed), gpt_oss, 2)
    assert any(problem.startswith(said) for problem in problems), problems
    assert model_problems(tiny_recipe(**bf16), gpt_oss, 1, "cpu") == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"engine": "exact"}}, "rollout.engine: exact, but the model (qwen3_next) has gated delta nets"),
        ({"rollout": {"quantization": {"kv_cache": "fp8"}}}, "rollout.quantization.kv_cache: fp8, but the model"),
        ({"rollout": {"quantization": {"weights": "fp8"}}}, "rollout.quantization.weights: fp8, but the model"),
        ({"learner": {"parallel": {"tensor": 32}}}, "learner.parallel.tensor: 32 does not divide the key heads of"),
        (
            {"learner": {"parallel": {"tensor": 2, "context": 16}}},
            "learner.parallel.tensor · context: 32 does not divide the key heads of delta nets (linear_num_key_heads) "
            "(16)",
        ),
        ({"rollout": {"tensor_parallel": 32}}, "rollout.tensor_parallel: 32 does not divide the 16 key heads of delta"),
    ],
)
def test_what_no_delta_net_has_is_refused(sections, said):
    model = architecture_from(KNOWN_MODELS["Qwen3-Next-80B-A3B-Instruct"])
    problems = model_problems(tiny_recipe(**sections), model, 32)
    assert any(problem.startswith(said) for problem in problems), problems
    assert model_problems(tiny_recipe(learner={"parallel": {"tensor": 2, "context": 2}}), model, 4) == []


@pytest.mark.parametrize(("tensor", "dtype", "block"), [(1, "bf16", 1056), (4, "bf16", 528), (1, "fp32", 544)])
def test_a_step_of_fewer_tokens_than_a_state_takes_is_refused_on_cuda(tensor, dtype, block):
    """A layer's state: 32 · 128 · 128 numbers of 4 bytes, and 3 · 8192 inputs. A token's cache: 2 · 2 · 256 numbers."""
    model = architecture_from(KNOWN_MODELS["Qwen3-Next-80B-A3B-Instruct"])
    own = {"dtype": dtype, "tensor_parallel": tensor, "max_num_seqs": 8}

    def said(device: str, **more) -> list[str]:
        rollout = RolloutConfig(**own, **more)
        problems = rollout_problems(rollout, model, 16, 4, device)
        return [problem for problem in problems if f"below a delta net's block of {block} tokens" in problem]

    assert said("cuda", max_num_batched_tokens=block - 1)
    for device, more in (("cuda", {"max_num_batched_tokens": block}), ("cuda", {}), ("cpu", {})):
        assert not said(device, **more)
    assert not said("cuda", max_num_batched_tokens=block - 1, enforce_eager=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (32, 32), (64, 128), (256, 256)])
def test_widths_of_delta_nets_that_vllm_lacks_in_bf16_on_a_cpu_are_refused(widths, dtype):
    model = architecture_from(KNOWN_MODELS["Qwen3-Next-80B-A3B-Instruct"])
    model = replace(model, linear=replace(model.linear, key_width=widths[0], value_width=widths[1]))
    precision = {"fp32_router": True, "fp32_head": True}
    recipe = tiny_recipe(learner={"dtype": dtype}, rollout={"dtype": dtype}, precision=precision)
    said = [problem for problem in model_problems(recipe, model, 1, "cpu") if "linear_key_head_dim" in problem]
    assert bool(said) == (dtype == "bf16" and widths not in ((64, 64), (128, 128)))
    assert not [problem for problem in model_problems(recipe, model, 1, "cuda") if "linear_key_head_dim" in problem]


def test_a_latent_vector_that_vllm_has_no_kernel_for_on_a_cpu_is_refused():
    other = replace(MOONLIGHT, latent=replace(MOONLIGHT.latent, rank=256))
    (problem,) = model_problems(tiny_recipe(), other, 1, "cpu")
    assert "kv_lora_rank 256 and qk_rope_head_dim 64; vLLM on a CPU has latent attention for 576" in problem


def test_a_step_of_too_few_tokens_is_refused():
    architecture = read_architecture(MODEL)
    fields = {"max_num_seqs": 8, "max_response_length": 24}
    few, short, enough = (RolloutConfig(max_num_batched_tokens=n, **fields) for n in (7, 8, 40))
    assert "is below rollout.max_num_seqs (8)" in rollout_problems(few, architecture, 16)[0]
    assert rollout_problems(short, architecture, 16, device="cuda") == []
    assert (
        "is below the 40 tokens of the longest sequence" in rollout_problems(short, architecture, 16, device="cpu")[0]
    )
    assert rollout_problems(enough, architecture, 16, device="cpu") == []


@pytest.mark.parametrize(("scale", "refused"), [(1.0, 0), (2.5, 1)])
def test_fp16_where_vllm_leaves_out_the_scale_of_experts_is_refused(scale, refused):
    values = {"model_type": "glm4_moe", **KNOWN_MODELS["GLM-4.5-Air"], "routed_scaling_factor": scale}
    recipe = tiny_recipe(rollout={"dtype": "fp16"}, learner={"dtype": "fp16"}, precision={"fp32_router": True})
    problems = model_problems(recipe, architecture_from(values), 1)
    assert len([problem for problem in problems if "vLLM leaves out the factor 2.5" in problem]) == refused


def test_biases_that_a_router_does_not_have_are_not_moved():
    recipe = tiny_recipe(routing={"bias_update_rate": 0.001})
    assert model_problems(recipe, MOONLIGHT, 1) == []
    (problem,) = model_problems(recipe, read_architecture(MODEL), 1)
    assert problem.startswith("routing.bias_update_rate: 0.001, but the routers of qwen3_moe have no biases")


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("qwen3_moe", "qwen2_moe", "olmoe", *DENSE)]
)
def test_exact_mode_is_refused_in_one_message_where_it_lacks_something(family):
    architecture = architecture_from({"model_type": family, **next(iter(FAMILIES[family].known.values()))})
    recipe = tiny_recipe(rollout={"engine": "exact"}, precision={"fp32_router": True})
    said = [problem for problem in model_problems(recipe, architecture, 1) if "exact" in problem]
    assert len(said) == 1
    assert said[0].endswith("; use vllm")


LARGE = shape_of(Path("models/Qwen3-235B-A22B"))[0]


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_share_all_layers_and_the_ends_have_fewest(layers, stages):
    shared = stage_layers(layers, stages)
    assert (len(shared), sum(shared)) == (stages, layers)
    assert all(size == shared[1] for size in shared[1:-1])
    assert max(shared[0], shared[-1]) <= max(shared)
    assert abs(shared[0] - shared[-1]) <= 1


def test_the_published_pipeline_is_legal():
    """NeMo-RL's: 94 layers over 8 stages, 11 on the first and the last."""
    assert stage_layers(94, 8) == [11, 12, 12, 12, 12, 12, 12, 11]
    assert layout_problems(ParallelConfig(tensor=2, pipeline=8, context=2, expert=16), LARGE, 128) == []


@given(st.integers(1, 100), st.integers(1, 64))
def test_a_stage_without_layers_is_refused_with_the_largest_number_that_has_none(layers, stages):
    shape = replace(LARGE, num_layers=layers, moe_layers=(True,) * layers)
    problems = layout_problems(ParallelConfig(pipeline=stages), shape, None)
    assert bool(problems) == (min(stage_layers(layers, stages)) < 1)
    for problem in problems:
        most = int(problem.split("; ")[1].split()[0])
        assert layout_problems(ParallelConfig(pipeline=most), shape, None) == []


@pytest.mark.parametrize(
    ("heads", "keys", "size", "told"),
    [
        (64, 4, 1, None),
        (64, 4, 4, None),
        (64, 4, 8, None),  # vLLM copies each key/value head to two GPUs
        (64, 4, 16, None),
        (64, 4, 3, "does not divide the 64 attention heads"),
        (12, 4, 6, "neither divides the 4 key/value heads nor is a multiple of them"),
    ],
)
def test_engines_hold_or_copy_key_value_heads(heads, keys, size, told):
    shape = replace(LARGE, num_heads=heads, num_kv_heads=keys)
    problems = rollout_problems(RolloutConfig(tensor_parallel=size, max_response_length=64), shape, 64)
    assert [told in problem for problem in problems] == [True] * (told is not None)
