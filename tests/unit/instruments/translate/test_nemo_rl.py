"""NeMo-RL's configurations as recipes: inheritance, references, values whose meaning differs, and what is guessed."""

from __future__ import annotations

import re

import pytest
import yaml

from megatron_rl.__main__ import main
from megatron_rl.config import foreign_keys
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate import nemo_rl
from megatron_rl.instruments.translate.nemo_rl_keys import load_inherited, resolved
from tests.support.tiny import REPOSITORY
from tests.support.translations import guesses, losses, written

BASE = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_num_epochs: 1
  max_num_steps: 1000000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_at_start: false
  seed: 42
  adv_estimator: {name: grpo, normalize_rewards: "${grpo.normalize_rewards}"}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.2, token_level_loss: true}
checkpointing: {enabled: true, checkpoint_dir: results/base, keep_top_k: 3, save_period: 10}
policy:
  model_name: Qwen/Qwen3-8B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 128
  train_micro_batch_size: 2
  max_total_sequence_length: 4096
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: false}
  megatron_cfg:
    enabled: false
    activation_checkpointing: false
    recompute_granularity: full
    tensor_model_parallel_size: 2
    expert_model_parallel_size: 4
    expert_tensor_parallel_size: 1
    context_parallel_size: 1
    optimizer: {optimizer: adam, lr: 5.0e-6, weight_decay: 0.1, adam_beta2: 0.98, clip_grad: "${policy.max_grad_norm}"}
    scheduler: {lr_decay_style: constant, lr_warmup_iters: 13, lr_warmup_init: 5.0e-7}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 3.0e-6, betas: [0.9, 0.99], weight_decay: 0.05}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 0.8
    val_temperature: ${.temperature}
    top_p: 1.0
    top_k: null
    vllm_cfg: {tensor_parallel_size: 4, gpu_memory_utilization: 0.6}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  train: {dataset_name: OpenMathInstruct-2}
  validation: {data_path: /data/val.jsonl, input_key: question, output_key: answer}
  default: {prompt_file: examples/prompts/cot.txt, env_name: math}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def write(tmp_path, changes, name="child.yaml"):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "low").mkdir(exist_ok=True)
    file = tmp_path / "low" / name
    file.write_text(yaml.safe_dump({"defaults": "../base.yaml", **changes}))
    return file


def translated(tmp_path, changes=None, train_rows=None):
    translation = nemo_rl.translate(write(tmp_path, changes or {}), {}, train_rows)
    return written(translation, tmp_path), translation


MEGATRON = {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}


def test_sizes_and_values_of_the_files_that_it_inherits_from(tmp_path):
    recipe, translation = translated(tmp_path, {"policy": MEGATRON, "grpo": {"max_num_steps": 70}})
    assert (recipe.batch.prompts, recipe.batch.minibatches, recipe.rollout.num_samples) == (32, 4, 16)
    assert recipe.num_steps == 70
    assert recipe.learner.parallel.tensor == 2
    assert (recipe.learner.optimizer.lr, recipe.learner.optimizer.beta2) == (5e-6, 0.98)
    assert recipe.schedule.warmup_steps == 13 * 4  # its scheduler moves once a step
    assert recipe.learner.max_tokens_per_microbatch == 2 * 4096
    assert (recipe.rollout.temperature, recipe.validation.temperature) == (0.8, 0.8)
    assert guesses(translation)["data.prompt.max_length"] + recipe.rollout.max_response_length == 4096
    assert recipe.learner.offload.optimizer  # colocated
    source = recipe.data.validation[0]
    assert (source.path, source.prompt_key, source.answer_key) == ("/data/val.jsonl", "question", "answer")
    assert recipe.checkpoint.keep_best.n == 3
    lost = losses(translation)
    assert "0.01 times the KL" in lost["loss_fn.reference_policy_kl_penalty"]
    assert {"data.default.prompt_file", "grpo.use_leave_one_out_baseline"} <= set(lost)
    assert recipe.validation.at_start is False
    assert translation.notes[0] == "read with what it inherits from: base.yaml"


def test_validation_at_start_alone_and_keys_of_engine_and_dispatcher(tmp_path):
    own = {"enabled": True, "moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    policy = {
        **MEGATRON,
        "model_name": "Qwen/Qwen3-30B-A3B",
        "megatron_cfg": own,
        "generation": {"vllm_kwargs": {"max_num_batched_tokens": 4096}},
    }
    recipe, _ = translated(tmp_path, {"policy": policy, "grpo": {"val_period": 0, "val_at_start": True}})
    assert (recipe.validation.every, recipe.validation.at_start) == (0, True)
    assert recipe.learner.token_dispatcher == "flex"
    assert recipe.rollout.max_num_batched_tokens == 4096


def test_the_learner_has_the_kept_sets(tmp_path):
    recipe, _ = translated(tmp_path, {"policy": {"generation": {"top_k": 50, "top_p": 0.9}}})
    assert (recipe.rollout.top_k, recipe.rollout.top_p, recipe.rollout.kept_sets) == (50, 0.9, True)
    assert not translated(tmp_path)[0].rollout.kept_sets


def test_epochs_need_rows(tmp_path):
    assert "num_steps" in guesses(translated(tmp_path)[1])
    assert translated(tmp_path, train_rows=1000)[0].num_steps == 1000 // 32


def test_the_other_backend_has_its_own_optimizer(tmp_path):
    recipe, translation = translated(tmp_path)
    assert (recipe.learner.optimizer.lr, recipe.learner.optimizer.beta2) == (3e-6, 0.99)
    assert (recipe.schedule.warmup_steps, recipe.schedule.warmup_from) == (50 * 4, 0.1 * 3e-6)
    assert guesses(translation)["learner.parallel.tensor"] == 4
    assert not any("megatron_cfg" in key for key in losses(translation))


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"sequence_level_importance_ratios": True, "token_level_loss": False}, "policy_term",
         {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}),
        ({"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0}, "policy_term",
         {"name": "cispo", "clip_low": None, "clip_high": 5.0}),
        ({"ratio_clip_c": 10}, "policy_term",
         {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 10.0}),
        ({"disable_ppo_ratio": True}, "policy_term", {"name": "reinforce"}),
        ({"use_importance_sampling_correction": True}, "correction", [{"mode": "is", "level": "token"}]),
        ({"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop",
          "truncated_importance_sampling_ratio": 5.0, "truncated_importance_sampling_ratio_min": 0.5}, "correction",
         [{"mode": "icepop", "lower": 0.5, "upper": 5.0}]),
        ({"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "seq-mask-tis",
          "truncated_importance_sampling_ratio": 1.002, "truncated_importance_sampling_ratio_min": 0.999}, "correction",
         [{"mode": "is", "level": "token"},
          {"mode": "reject", "statistic": "geometric", "upper": 1.002, "lower": 0.999}]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_losses(tmp_path, changes, name, expected):
    assert translated(tmp_path, {"loss_fn": changes})[1].recipe["objective"][name] == expected


def test_advantages(tmp_path):
    flags = {"normalize_rewards": False}
    assert translated(tmp_path, {"grpo": flags})[0].objective.advantage == "rloo"
    flags = {"normalize_rewards": False, "use_leave_one_out_baseline": False}
    assert translated(tmp_path, {"grpo": flags})[0].objective.advantage == "dr_grpo"
    own = {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": True}}
    assert translated(tmp_path, {"grpo": own})[0].objective.advantage == "reinforce_pp"


def test_servers_and_generation_ahead(tmp_path):
    colocated = {"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": 8}}
    recipe, _ = translated(
        tmp_path,
        {
            "policy": {"generation": {"colocated": colocated}, "router_replay": {"enabled": True}, **MEGATRON},
            "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}},
            "cluster": {"num_nodes": 3},
        },
    )
    rollout = recipe.rollout
    assert (rollout.engine, rollout.max_staleness, rollout.servers.count) == ("vllm_server", 2, 2)
    assert rollout.in_flight.mode == "keep"
    assert recipe.routing.replay == "r3"
    assert recipe.name == "child-2n8g"  # the learner's nodes
    assert not recipe.learner.offload.weights


def test_references_and_what_the_machine_decides(tmp_path):
    (tmp_path / "a.yaml").write_text("x: {one: 2, two: '${.one}', text: 'a-${x.one}', three: '${mul:${x.two},3}'}\n")
    (tmp_path / "b.yaml").write_text(
        "defaults: [a.yaml]\ny: ['${x.three}', '${oc.env:TOKEN}', '${oc.env:N,4}', '${none}', '${z}']\nz: '${z}'\n"
    )
    nested, own, files = load_inherited(tmp_path / "b.yaml")
    assert (list(own), [file.name for file in files]) == (["y", "z"], ["a.yaml", "b.yaml"])
    values = resolved(nested, {"TOKEN": "t"})
    assert values["x"] == {"one": 2, "two": 2, "text": "a-2", "three": 6}
    assert values["y"][:3] == [6, "t", "4"]
    assert "\ue000${none}\ue001" in values["y"][3]
    assert "\ue000" in values["y"][4]  # it refers to itself
    (tmp_path / "c.yaml").write_text("defaults: a.yaml\nx: {_override_: true, four: 4}\n")
    assert load_inherited(tmp_path / "c.yaml")[0] == {"x": {"four": 4}}


def test_unknown_keys_are_listed_wherever_they_stand(tmp_path):
    file = write(tmp_path, {"policy": {"strange": 7, "model_name": "${oc.env:MODEL}"}})
    (tmp_path / "base.yaml").write_text(BASE.replace("  seed: 42", "  seed: 42\n  odd: 3"))
    translation = nemo_rl.translate(file, {})
    lost = losses(translation)
    assert lost["policy.strange"] == lost["grpo.odd"] == "no rule here knows this key"
    assert any("policy.model_name: ${oc.env:MODEL} is known only where" in note for note in translation.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: gone.yaml\ngrpo: {}\n", "gone.yaml: cannot be read as YAML"),
        ("defaults: run.yaml\ngrpo: {}\n", "it inherits from itself"),
        ("sft: {a: 1}\n", "no section grpo"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        nemo_rl.translate(tmp_path / "run.yaml", {})


def test_the_command_writes_a_recipe_that_is_checked_and_planned(tmp_path, capsys):
    out = str(tmp_path / "recipe.yaml")
    file = write(tmp_path, {"policy": MEGATRON})
    assert main(["recipe", "from-nemo-rl", str(file), "--output", out]) == 0
    assert f"NeMo-RL (rules read from {', '.join(foreign_keys.READ_FROM['NeMo-RL'])})" in capsys.readouterr().out
    assert main(["check", "--offline", out]) == 0
    assert main(["plan", out, "--gpu", "h100-80"]) == 0


def test_the_table_of_keys_names_what_the_rules_read():
    folder = REPOSITORY / "megatron_rl/instruments/translate"
    rules = "".join(path.read_text() for path in folder.glob("nemo_rl*.py"))
    column = foreign_keys.COLUMNS.index("NeMo-RL")
    named = {key for row in foreign_keys.ROWS for key in foreign_keys.keys_of(row[column]) if "." in key}
    assert len(named) > 25
    assert {key for key in named if key.rpartition(".")[2].removesuffix("_enabled") not in rules} == set()


def test_repeats_of_held_out_rows_template_arguments_and_the_routers_type(tmp_path):
    policy = MEGATRON | {"tokenizer": {"chat_template_kwargs": {"enable_thinking": False}}}
    policy |= {"model_name": "Qwen/Qwen3-30B-A3B", "megatron_cfg": {"enabled": True, "moe_router_dtype": "fp32"}}
    data = {"validation": {"data_path": "aime.jsonl", "repeat": 16}}
    recipe, translation = translated(tmp_path, {"policy": policy, "data": data})
    assert recipe.validation.num_samples == 16
    assert recipe.precision.fp32_router
    assert recipe.data.prompt.chat_template_args == {"enable_thinking": False}
    assert "chat_template_kwargs.enable_thinking: false → data.prompt.chat_template_args" in translation.report()
