"""verl's scripts as recipes: values whose meaning differs, what has no counterpart, and what is guessed."""

from __future__ import annotations

import pytest

from megatron_rl.__main__ import main
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate import verl
from tests.support.translations import guesses, losses, written

SCRIPT = """#!/bin/bash
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base}
n=${N:-8}
ACTOR=(
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.megatron.context_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']" data.val_files=$HOME/v.parquet \\
    data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=4096 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.rollout.n=$n actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    "${ACTOR[@]}" trainer.nnodes=4 trainer.test_freq=5 trainer.total_epochs=3 EXTRA $@
"""


def translated(tmp_path, *extra, train_rows=1000, **variables):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT.replace("EXTRA", " ".join(extra)))
    translation = verl.translate(file, {"HOME": "/home/u", **variables}, train_rows)
    return written(translation, tmp_path), translation


def test_sizes_and_defaults_are_those_of_verl(tmp_path):
    recipe, translation = translated(tmp_path)
    assert (recipe.batch.prompts, recipe.batch.minibatches, recipe.rollout.num_samples) == (128, 4, 8)
    assert recipe.num_steps == 3 * (1000 // 128)
    assert recipe.learner.max_tokens_per_microbatch == 2 * 10240  # of the two ranks of context parallelism
    assert recipe.learner.parallel.expert_tensor == 4  # Megatron's default is the tensor-parallel size
    assert [source.path for source in recipe.data.train] == ["/home/u/a.parquet", "/home/u/b.parquet"]
    term, optimizer = recipe.objective.policy_term, recipe.learner.optimizer
    assert (term.clip_low, term.clip_high, term.dual_clip) == (0.2, 0.28, 3.0)
    assert (optimizer.lr, optimizer.beta2, optimizer.weight_decay) == (2e-6, 0.999, 0.01)
    assert recipe.validation.temperature == 0
    assert recipe.name == "run-4n8g"
    assert set(guesses(translation)) == {"reward.name"}
    assert translated(tmp_path, N="16")[0].rollout.num_samples == 16


def test_epochs_without_rows_are_a_guess(tmp_path):
    assert "num_steps" in guesses(translated(tmp_path, train_rows=None)[1])
    recipe, translation = translated(tmp_path, "trainer.total_training_steps=70", train_rows=None)
    assert recipe.num_steps == 70
    assert "num_steps" not in guesses(translation)


def test_keys_of_engine_and_dispatcher(tmp_path):
    own = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    extra = [f"{own}.moe_token_dispatcher_type=flex", f"{own}.moe_enable_deepep=True"]
    engine = "actor_rollout_ref.rollout.max_num_batched_tokens=10240"
    recipe, translation = translated(tmp_path, *extra, engine, "data.truncation=left", f"{own}.moe_shared=1")
    assert (recipe.learner.token_dispatcher, recipe.rollout.max_num_batched_tokens) == ("flex", 10240)
    (lost,) = (note for key, note in losses(translation).items() if key.endswith("moe_shared"))
    assert "learner.megatron" in lost
    assert translated(tmp_path)[0].rollout.max_num_batched_tokens is None


def test_the_warmup_counts_updates(tmp_path):
    recipe, _ = translated(tmp_path, "actor_rollout_ref.actor.optim.lr_warmup_steps=10")
    assert recipe.schedule.warmup_steps == 10 * recipe.batch.minibatches


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("gspo", {"name": "gspo", "clip_low": 0.2, "clip_high": 0.28}),
        ("geo_mean", {"name": "gmpo", "log_clip_low": 0.2, "log_clip_high": 0.28}),
        ("cispo", {"name": "cispo", "clip_low": 0.2, "clip_high": 0.28}),
        ("dppo_kl", {"name": "dppo", "divergence": "kl", "delta": 0.28, "delta_low": 0.2, "cap": 3.0}),
        ("sapo", {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}),
    ],
)
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_policy_losses(tmp_path, mode, expected):
    recipe, _ = translated(tmp_path, f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}")
    assert recipe.objective.policy_term.model_dump() == expected
    averages_sequences = mode in ("gspo", "geo_mean")
    assert recipe.objective.aggregation == ("seq-mean-token-mean" if averages_sequences else "token-mean")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["rollout_is=token", "rollout_is_threshold=3"], [{"mode": "tis", "level": "token", "cap": 3.0}]),
        (
            ["rollout_is=sequence", "rollout_is_threshold=0.5_5"],
            [{"mode": "mis", "level": "sequence", "cap": 5.0, "lower": 0.5}],
        ),
        (
            ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.5_4"],  # of k1 = -log ratio: the ratio's are 1/4 and 2
            [{"mode": "reject", "statistic": "seq_mean_k1", "lower": 0.25, "upper": 2.0, "renormalize": True}],
        ),
        (
            ["rollout_rs=token_k1,seq_max_k3", "rollout_rs_threshold=2,0.1"],
            [
                {"mode": "mask", "level": "token", "lower": 0.5, "upper": 2.0, "renormalize": True},
                {"mode": "reject", "statistic": "max_k3", "upper": 0.1, "renormalize": True},
            ],
        ),
    ],
)
def test_corrections(tmp_path, extra, expected):
    _, translation = translated(tmp_path, *(f"algorithm.rollout_correction.{item}" for item in extra))
    assert translation.recipe["objective"]["correction"] == expected


def test_bypass_has_no_second_weight(tmp_path):
    base = "algorithm.rollout_correction."
    recipe, translation = translated(tmp_path, f"{base}bypass_mode=true", f"{base}rollout_is=token")
    assert (recipe.objective.anchor, recipe.objective.correction) == ("bypass", [])
    assert f"{base}rollout_is" in losses(translation)
    recipe, _ = translated(tmp_path, f"{base}bypass_mode=true", f"{base}loss_type=reinforce", f"{base}rollout_is=token")
    assert recipe.objective.policy_term.name == "reinforce"
    assert [item.mode for item in recipe.objective.correction] == ["tis"]


def test_what_has_no_counterpart_is_said(tmp_path):
    actor = "actor_rollout_ref.actor."
    _, translation = translated(
        tmp_path, f"{actor}use_kl_loss=True", f"{actor}ppo_epochs=2", "trainer.val_before_train=False",
        f"{actor}clip_ratio=0.1", "data.strange_key=7", "data.train_batch_size=${BATCH}",
    )  # fmt: skip
    lost = losses(translation)
    assert "0.001 times the KL" in lost[f"{actor}use_kl_loss"]
    assert {f"{actor}ppo_epochs", f"{actor}clip_ratio", "data.strange_key"} <= set(lost)
    assert any("${BATCH}" in note and "1024 was taken" in note and "--variable BATCH" in note
               for note in translation.notes)  # fmt: skip


def test_a_resolved_configuration(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "actor_rollout_ref: {model: {path: Qwen/Qwen3-8B}, rollout: {n: 4, name: sglang, prompt_length: 9}}\n"
        "algorithm: {adv_estimator: rloo}\n"
        "data: {train_batch_size: 256, max_response_length: '${other}'}\n"
    )
    translation = verl.translate(tmp_path / "c.yaml", {}, None)
    translation.check()
    assert translation.recipe["objective"]["advantage"] == "rloo"
    assert (
        translation.recipe["rollout"] | {"num_samples": 4, "max_response_length": 512} == translation.recipe["rollout"]
    )
    assert guesses(translation)["rollout.engine"] == "vllm"


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "run.sh").write_text("python train.py --lr 1\n")
    with pytest.raises(InputError, match="no command with overrides of verl"):
        verl.translate(tmp_path / "run.sh", {}, None)


def test_the_command_writes_a_recipe_that_is_checked_and_planned(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(SCRIPT.replace("EXTRA", ""))
    out = str(tmp_path / "recipe.yaml")
    assert main(["recipe", "from-verl", str(tmp_path / "run.sh"), "--output", out]) == 0
    assert "Guessed:\n  num_steps: 500" in capsys.readouterr().out
    assert main(["check", "--offline", out]) == 0
    assert main(["plan", out, "--gpu", "h100-80"]) == 0


def test_a_start_from_a_checkpoint_the_routers_type_and_keys_that_were_only_read(tmp_path):
    router = "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32"
    recipe, translation = translated(tmp_path, "trainer.resume_mode=resume_path", router, "data.prompt_key=prompt")
    assert recipe.precision.fp32_router
    assert "trainer.resume_mode" in losses(translation)
    told = translation.report()
    assert all(key in told for key in translation.values), [key for key in translation.values if key not in told]
