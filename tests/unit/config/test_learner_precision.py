"""Precision in recipes: nine pairs of dtypes, switches for both sides, and the contract that `check` prints."""

import itertools

import pytest
from pydantic import ValidationError

from megatron_rl.config.learner import LossScaleConfig, PrecisionConfig
from megatron_rl.config.model_rules import confirm_contract, contract, first_step_alarms
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import read_architecture
from megatron_rl.run.prepare import check_recipe
from tests.support.tiny import MODEL, tiny_recipe

DTYPES = ("bf16", "fp16", "fp32")


def rows(recipe) -> dict:
    return {row.aspect: row for row in contract(recipe, read_architecture(MODEL))}


@pytest.mark.parametrize(("learner", "rollout"), itertools.product(DTYPES, DTYPES))
def test_every_pair_of_dtypes_is_legal(learner, rollout):
    recipe = tiny_recipe(learner={"dtype": learner}, rollout={"dtype": rollout})
    report = dict(check_recipe(recipe).report)
    assert report["dtype"] == f"learner {learner} · rollout {rollout} · {'same' if learner == rollout else 'rounding'}"
    assert not any(row.verdict == "policy" for row in rows(recipe).values())


def test_one_key_sets_both_sides():
    by_aspect = rows(tiny_recipe(learner={"dtype": "bf16"}, precision={"fp32_head": True}))
    assert (by_aspect["head"].learner, by_aspect["head"].rollout, by_aspect["head"].verdict) == ("fp32", "fp32", "same")
    assert by_aspect["router"].verdict == "rounding"
    by_aspect = rows(tiny_recipe(rollout={"dtype": "bf16"}, learner={"dtype": "bf16"}, precision={"fp32_router": True}))
    assert (by_aspect["router"].learner, by_aspect["router"].rollout) == ("fp32", "fp32")


@pytest.mark.parametrize(
    ("part", "switch"), [("head", {"rollout_fp32_head": True}), ("router", {"rollout_fp32_router": True})]
)
def test_one_sided_switches_need_permission(part, switch):
    with pytest.raises(ValidationError, match=f"rollout_fp32_{part}: true on the rollout engine but false"):
        PrecisionConfig.model_validate(switch)
    allowed = {**switch, "allow_asymmetric": True}
    dtypes = {"learner": {"dtype": "bf16"}, "rollout": {"dtype": "bf16"}}
    row = rows(tiny_recipe(precision=allowed, **dtypes))[part]
    assert (row.learner, row.rollout, row.verdict) == ("bf16", "fp32", "policy")


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 5}])
def test_truncated_sampling_is_refused_unless_asked_for(change):
    with pytest.raises(InputError, match=rf"rollout\.{next(iter(change))}: .*precision\.allow_asymmetric"):
        check_recipe(tiny_recipe(rollout=change))
    check_recipe(tiny_recipe(rollout=change, precision={"allow_asymmetric": True}))


def test_a_learner_that_rounds_alike_has_the_same_weights():
    recipe = tiny_recipe(rollout={"quantization": "int4"}, learner={"quantization": "as_rollout"})
    row = rows(recipe)["weights"]
    assert (row.learner, row.rollout, row.verdict) == ("int4 [1, 128]", "int4 [1, 128]", "same")
    bounds = {rule.name: rule.above for rule in first_step_alarms(recipe, read_architecture(MODEL))}
    assert bounds == {"first-step-difference": 1e-3, "first-step-mismatch": 1e-3}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "rollout.quantization.weights is null and nothing is rounded"),
        ({"learner": {"dtype": "bf16"}}, "learner.dtype bf16, rollout.dtype fp32: the engine would round other"),
        ({"learner": {"lora": {}}}, "with learner.lora, whose adapters are merged"),
        ({"learner": {"parallel": {"tensor": 2}}}, "with learner.parallel.tensor 2: blocks that share a scale"),
        ({"rollout": {"tensor_parallel": 2}}, "with rollout.tensor_parallel 2: blocks that share a scale"),
    ],
)
def test_a_learner_that_cannot_round_alike_is_refused(sections, message):
    learner = {"quantization": "as_rollout", **sections.get("learner", {})}
    rollout = {"quantization": "fp8", **sections.get("rollout", {})} if sections else {}
    with pytest.raises(ValidationError, match=message):
        tiny_recipe(learner=learner, rollout=rollout)


def test_kept_sets_make_one_policy_of_both():
    recipe = tiny_recipe(rollout={"top_p": 0.9, "top_k": 20, "kept_sets": True})
    check_recipe(recipe)
    by_aspect = rows(recipe)
    assert (by_aspect["top-p"].learner, by_aspect["top-p"].rollout, by_aspect["top-p"].verdict) == (
        "0.9",
        "0.9",
        "same",
    )
    assert (by_aspect["top-k"].learner, by_aspect["top-k"].rollout, by_aspect["top-k"].verdict) == ("20", "20", "same")
    bounds = {rule.name: rule.above for rule in first_step_alarms(recipe, read_architecture(MODEL))}
    assert bounds == {"first-step-difference": 1e-3, "first-step-mismatch": 1e-3}


def test_a_dense_model_has_no_router(tmp_path):
    from tools.dev.make_tiny_checkpoint import build_tiny_config

    config = build_tiny_config("qwen3", "nano")
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    for section in ("precision", "scoring"):
        recipe = tiny_recipe(model={"path": str(tmp_path)}, **{section: {"fp32_router": True}})
        with pytest.raises(InputError, match=rf"{section}\.fp32_router: true, but the model \(qwen3\) has no router"):
            check_recipe(recipe)


def test_an_engine_that_does_something_else_breaks_the_contract():
    stated = contract(tiny_recipe(precision={"fp32_head": True}), read_architecture(MODEL))
    kept = {"dtype": "fp32", "head": "fp32", "router": "fp32"}
    confirmed = confirm_contract(stated, kept | {"attention": "SDPA"}, kept | {"attention": "vLLM X"})
    assert next(row for row in confirmed if row.aspect == "attention").rollout == "vLLM X"
    with pytest.raises(InputError, match="dtype: the rollout engine uses bf16, the recipe says fp32"):
        confirm_contract(stated, kept, kept | {"dtype": "bf16"})
    with pytest.raises(InputError, match="log-probs: the rollout engine uses before temperature"):
        confirm_contract(stated, kept, kept | {"log-probs": "before temperature"})


def test_loss_scale_bounds():
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        LossScaleConfig(initial=0.5)


def test_rounded_weights_and_cache_are_rows_of_the_contract():
    """Rounding, not another policy: legal and measured. Without the key there are no such rows."""
    recipe = tiny_recipe(rollout={"quantization": {"weights": "fp8", "block": [1, None], "kv_cache": "fp8"}})
    stated = contract(recipe, read_architecture(MODEL))
    by_aspect = {row.aspect: (row.rollout, row.verdict) for row in stated}
    assert (by_aspect["weights"], by_aspect["kv cache"]) == (("fp8 [1, all]", "rounding"), ("fp8", "rounding"))
    assert not {"weights", "kv cache"} & rows(tiny_recipe()).keys()
    engine = {"weights": "fp8 [1, all], dtype", "kv cache": "fp8"}
    with pytest.raises(
        InputError, match=r"weights: the rollout engine uses fp8 \[1, all\], dtype, the recipe says fp8"
    ):
        confirm_contract(stated, {}, engine)


SEVERAL = {"prompts": 4, "minibatches": 2}
FIRST_FP32 = {"first-step-difference": 1e-3, "first-step-mismatch": 1e-3}


@pytest.mark.parametrize(
    ("sections", "bounds"),
    [
        ({}, {"first-step-difference": 1e-3, "first-step-mismatch": 1e-3}),
        ({"learner": {"dtype": "fp16"}}, {"first-step-difference": 0.02}),
        ({"learner": {"dtype": "bf16"}, "rollout": {"dtype": "fp16"}}, {"first-step-difference": 0.1}),
        ({"rollout": {"quantization": {"weights": "int4", "kv_cache": "fp8"}}}, {"first-step-difference": 0.4}),
        ({"rollout": {"quantization": {"weights": "fp8"}}}, {"first-step-difference": 0.2}),
        ({"rollout": {"top_p": 0.9}, "precision": {"allow_asymmetric": True}}, {}),
        ({"rollout": {"engine": "exact"}, "exact": {"noise": {"kind": "logits", "std": 0.1}}}, {}),
        ({"batch": SEVERAL, "objective": {"policy_term": "vespo"}}, {}),  # pi has moved before the second update
        ({"batch": SEVERAL, "objective": {"anchor": "bypass"}}, {}),
        ({"batch": SEVERAL}, FIRST_FP32),
        ({"objective": {"policy_term": "vespo"}}, FIRST_FP32),
    ],
)
def test_the_first_steps_mismatch_is_bounded_by_the_coarsest_type(sections, bounds):
    alarms = first_step_alarms(tiny_recipe(**sections), read_architecture(MODEL))
    assert {rule.name: rule.above for rule in alarms} == bounds
    assert all(rule.then == ["warn", "stop"] for rule in alarms)


# -- tf32


def on_a_gpu(learner: str, rollout: str, engine: str = "vllm", **precision):
    return tiny_recipe(
        learner={"dtype": learner},
        rollout={"dtype": rollout, "engine": engine},
        precision=precision,
        runtime={"device": "cuda"},
    )


@pytest.mark.parametrize(("learner", "rollout"), [("tf32", "tf32"), ("tf32", "bf16"), ("fp16", "tf32")])
def test_tf32_is_a_dtype_of_its_own(learner, rollout):
    by_aspect = rows(on_a_gpu(learner, rollout))
    assert (by_aspect["dtype"].learner, by_aspect["dtype"].rollout) == (learner, rollout)
    assert by_aspect["dtype"].verdict == ("same" if learner == rollout else "rounding")


@pytest.mark.parametrize(
    ("learner", "rollout", "precision"),
    [
        ("tf32", "fp32", {}),
        ("fp32", "tf32", {}),
        ("tf32", "tf32", {"fp32_head": True}),
        ("tf32", "bf16", {"fp32_router": True}),
        ("bf16", "tf32", {"rollout_fp32_head": True, "allow_asymmetric": True}),
    ],
)
def test_one_process_has_one_kind_of_products(learner, rollout, precision):
    with pytest.raises((InputError, ValidationError), match="one process multiplies all fp32 matrices alike"):
        on_a_gpu(learner, rollout, **precision)


def test_a_server_is_a_process_of_its_own():
    assert rows(on_a_gpu("fp32", "tf32", "vllm_server"))["dtype"].verdict == "rounding"


@pytest.mark.parametrize(
    ("device", "engine", "words"), [("cpu", "vllm", "needs an NVIDIA GPU"), ("cuda", "exact", "no TF32")]
)
def test_where_there_is_no_tf32(device, engine, words):
    with pytest.raises((InputError, ValidationError), match=words):
        tiny_recipe(
            learner={"dtype": "tf32"},
            rollout={"dtype": "tf32", "engine": engine},
            runtime={"device": device},
        )


def test_an_engine_with_tf32_breaks_a_contract_of_fp32():
    stated = contract(tiny_recipe(learner={"dtype": "fp32"}, rollout={"dtype": "fp32"}), read_architecture(MODEL))
    kept = {"dtype": "fp32", "head": "fp32", "router": "fp32"}
    with pytest.raises(InputError, match="dtype: the learner engine uses tf32, the recipe says fp32"):
        confirm_contract(stated, dict.fromkeys(kept, "tf32"), kept)


def test_pairs_of_one_command_have_one_kind_of_products():
    from megatron_rl.instruments.paper.command import parse_pairs

    assert parse_pairs("tf32/tf32,bf16/tf32") == [("tf32", "tf32"), ("bf16", "tf32")]
    assert not any("tf32" in pair for pair in parse_pairs("all"))
    with pytest.raises(InputError, match="--pairs: fp32 and tf32"):
        parse_pairs("tf32/bf16,bf16/fp32")
