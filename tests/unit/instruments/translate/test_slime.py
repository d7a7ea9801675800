"""slime's launch scripts as recipes: values whose meaning differs, what has no counterpart, and what is guessed."""

from __future__ import annotations

import re

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import foreign_keys
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate import slime
from tests.support.tiny import REPOSITORY
from tests.support.translations import guesses, losses, written

SCRIPT = """#!/bin/bash
NVLINKS=$(nvidia-smi topo -m | wc -l)
if [ "$NVLINKS" -gt 0 ]; then HAS=1; else HAS=0; fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/small.sh"
CKPT=(
   --hf-checkpoint ${MODEL:-/root/Qwen3-30B-A3B}
   # --hf-checkpoint /root/Other
   --save /root/runs/ --save-interval 20
)
ROLLOUT=(
   --prompt-data /root/train.jsonl --input-key question --label-key answer --apply-chat-template --rollout-shuffle
   --rm-type math --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64
   --rollout-max-response-len 4096 --rollout-temperature 1
   --eval-prompt-data aime /root/aime.jsonl gsm /root/gsm.jsonl --eval-interval 10 --eval-top-k 1
)
LOSS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28)
OPTIMIZER=(--optimizer adam --lr 2e-6 --lr-decay-style constant --lr-warmup-iters 5 --adam-beta2 0.98)
PERF=(
   --tensor-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 4
   --recompute-granularity full --use-dynamic-batch-size --max-tokens-per-gpu 4096
)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"env_vars": {}}' \\
   -- python3 MAIN \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7 \\
   ${MODEL_ARGS[@]} ${CKPT[@]} ${ROLLOUT[@]} ${LOSS[@]} ${OPTIMIZER[@]} ${PERF[@]} EXTRA
"""
MODEL = "MODEL_ARGS=(--num-layers 48 --num-experts 128 --swiglu --rotary-base 1000000)\n"


def translated(tmp_path, *extra, main_file="train.py", train_rows=None, **variables):
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "small.sh").write_text(MODEL)
    words = ["--colocate", *extra] if main_file == "train.py" else extra
    (tmp_path / "run.sh").write_text(SCRIPT.replace("MAIN", main_file).replace("EXTRA", " ".join(words)))
    translation = slime.translate(tmp_path / "run.sh", variables, train_rows)
    return written(translation, tmp_path), translation


def test_sizes_and_defaults_are_those_of_slime(tmp_path):
    recipe, translation = translated(tmp_path)
    assert (recipe.batch.prompts, recipe.batch.minibatches, recipe.rollout.num_samples) == (32, 4, 8)
    assert recipe.num_steps == 300
    assert recipe.learner.max_tokens_per_microbatch == 2 * 4096  # of the two ranks of context parallelism
    assert recipe.learner.parallel.expert_tensor == 4  # Megatron's default is the tensor-parallel size
    assert recipe.objective.aggregation == "seq-mean-token-mean"  # without --calculate-per-token-loss
    assert (recipe.objective.policy_term.clip_high, recipe.objective.policy_term.dual_clip) == (0.28, None)
    assert (recipe.learner.optimizer.lr, recipe.learner.optimizer.weight_decay) == (2e-6, 0.01)
    assert recipe.schedule.warmup_steps == 5  # both count updates
    source = recipe.data.train[0]
    assert (source.path, source.prompt_key, source.answer_key) == ("/root/train.jsonl", "question", "answer")
    assert [source.name for source in recipe.data.validation] == ["aime", "gsm"]
    assert recipe.validation.temperature == 0  # of the likeliest token
    assert recipe.learner.offload.weights  # colocated
    assert recipe.name == "run-2n8g"
    assert guesses(translation)["rollout.engine"] == "vllm"
    assert "--kl-loss-coef" not in losses(translation)  # it is 0
    assert any("NVLINKS" in note for note in translation.notes)
    assert "--num-layers" in translation.idle  # of the model's file, which was followed


@pytest.mark.parametrize(
    ("extra", "name", "expected"),
    [
        ("--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4", "policy_term",
         {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4", "policy_term",
         {"name": "cispo", "clip_low": None, "clip_high": 4.0}),
        ("--eps-clip-c 3", "policy_term", {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
        ("--disable-grpo-std-normalization", "advantage", "dr_grpo"),
        ("--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages", "advantage", "reinforce_pp"),
        ("--calculate-per-token-loss", "aggregation", "token-mean"),
        ("--use-tis", "correction", [{"mode": "tis", "level": "token", "cap": 2.0}]),
        ("--use-tis --tis-clip 5 --tis-clip-low 0.5", "correction",
         [{"mode": "tis", "level": "token", "cap": 5.0, "lower": 0.5}]),
        ("--use-tis --tis-clip 5 --tis-clip-low 0.5 --custom-tis-function-path slime.loss.icepop_function",
         "correction", [{"mode": "icepop", "lower": 0.5, "upper": 5.0}]),
        ("--use-opsm --opsm-delta 2e-4", "correction", [{"mode": "opsm", "delta": 2e-4, "pi_old": "learner"}]),
        ("--use-rollout-logprobs", "anchor", "bypass"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_objectives(tmp_path, extra, name, expected):
    assert translated(tmp_path, extra)[1].recipe["objective"][name] == expected


def test_servers_and_generation_ahead(tmp_path):
    recipe, _ = translated(tmp_path, "--rollout-num-gpus 8", main_file="train_async.py")
    assert (recipe.rollout.engine, recipe.rollout.max_staleness, recipe.rollout.servers.count) == ("vllm_server", 1, 2)
    assert not recipe.learner.offload.weights


def test_router_replay_and_rounded_rollouts(tmp_path):
    recipe, _ = translated(tmp_path, "--use-routing-replay", "--use-rollout-routing-replay", MODEL="/root/Qwen3-8B-FP8")
    assert recipe.routing.replay == "r3"
    assert (str(recipe.model.path), recipe.rollout.quantization.weights) == ("/root/Qwen3-8B", "fp8")
    assert translated(tmp_path, "--use-routing-replay")[0].routing.replay == "r2"


def test_no_validation_at_start_and_the_dispatcher(tmp_path):
    extra = ["--skip-eval-before-train", "--moe-token-dispatcher-type", "flex"]
    recipe, translation = translated(tmp_path, *extra)
    assert (recipe.validation.at_start, recipe.learner.token_dispatcher) == (False, "flex")
    assert any("DeepEP, which has to be installed" in note for note in translation.notes)
    _, translation = translated(tmp_path, *extra, "--moe-enable-deepep")
    assert not any("DeepEP" in note for note in translation.notes)
    fits = [
        "--tensor-model-parallel-size",
        "4",
        "--expert-model-parallel-size",
        "2",
        "--expert-tensor-parallel-size",
        "1",
    ]
    recipe, translation = translated(tmp_path, "--moe-token-dispatcher-type", "allgather", *fits)
    assert (recipe.learner.token_dispatcher, recipe.learner.parallel.tensor) == ("allgather", 4)
    for extra in (["allgather", "--pipeline-model-parallel-size", "2"], ["allgather", "--context-parallel-size", "3"]):
        recipe, translation = translated(tmp_path, "--moe-token-dispatcher-type", *extra)
        assert recipe.learner.token_dispatcher == "alltoall"
        assert "not with this layout" in losses(translation)["--moe-token-dispatcher-type"]
    _, translation = translated(tmp_path, "--moe-token-dispatcher-type", "other")
    assert "alltoall, allgather or flex" in losses(translation)["--moe-token-dispatcher-type"]


def test_epochs_need_rows(tmp_path):
    (tmp_path / "run.sh").write_text(
        "python train.py --hf-checkpoint Qwen3-8B --num-epoch 2 --rollout-batch-size 10 --prompt-data d.jsonl"
    )
    assert "num_steps" in guesses(slime.translate(tmp_path / "run.sh", {}))
    assert slime.translate(tmp_path / "run.sh", {}, 105).recipe["num_steps"] == 20


def test_what_is_not_understood_is_said_key_by_key(tmp_path):
    _, translation = translated(
        tmp_path, "--kl-loss-coef 0.01", "--custom-rm-path a.b.score", "--strange-flag 7", "--eval-max-response-len 99",
        "${UNSET[@]}", "--rollout-seed $SEED",
    )  # fmt: skip
    lost = losses(translation)
    assert "0.01 times the KL" in lost["--kl-loss-coef"]
    assert lost["--strange-flag"] == "no rule here knows this key"
    assert {"--custom-rm-path", "--eval-max-response-len"} <= set(lost)
    assert any("${UNSET[@]}" in note and "arguments are not known" in note for note in translation.notes)
    assert any("${SEED}" in note and "42 was taken" in note for note in translation.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python other.py --lr 1\n", "no command that starts slime"),
        ("python train.py --learning-rate 1\n", "has no arguments of slime"),
        ("python train.py --hf-checkpoint m --loss-type sft_loss\n", "--loss-type sft_loss"),
    ],
)
def test_a_script_of_something_else_is_refused(tmp_path, text, said):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        slime.translate(tmp_path / "run.sh", {})


def test_the_command_writes_a_recipe_that_is_checked_and_planned(tmp_path, capsys):
    translated(tmp_path)
    out = str(tmp_path / "recipe.yaml")
    assert main(["recipe", "from-slime", str(tmp_path / "run.sh"), "--output", out]) == 0
    assert f"slime (rules read from {', '.join(foreign_keys.READ_FROM['slime'])})" in capsys.readouterr().out
    assert main(["check", "--offline", out]) == 0
    assert main(["plan", out, "--gpu", "h100-80"]) == 0


def test_the_table_of_keys_names_what_the_rules_read():
    rules = "".join(path.read_text() for path in (REPOSITORY / "megatron_rl/instruments/translate").glob("slime*.py"))
    column = foreign_keys.COLUMNS.index("slime")
    named = {key for row in foreign_keys.ROWS for key in re.findall(r"`(--[\w-]+)", row[column])}
    assert len(named) > 30
    assert {key for key in named if key not in rules and "-" not in key[-1]} == set()


@pytest.mark.parametrize(
    ("load", "is_lost"), [("/root/sft", True), ("/root/runs/", False), ("${MODEL:-/root/Qwen3-30B-A3B}", False)]
)
def test_a_start_from_other_weights_is_said(tmp_path, load, is_lost):
    recipe, translation = translated(tmp_path, f"--load {load} --moe-router-dtype fp32")
    assert ("--load" in losses(translation)) == is_lost
    assert recipe.precision.fp32_router
