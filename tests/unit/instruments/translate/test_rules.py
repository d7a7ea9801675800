"""Scripts and configurations of other projects as recipes: what each sets, loses and guesses, in one table."""

from __future__ import annotations

import re

import pytest
import yaml

from megatron_rl.__main__ import main
from megatron_rl.config import foreign_keys, load_recipe
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.rules import run_name, translate

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
OWN, CORR = f"{ACTOR}megatron.override_transformer_config.", "algorithm.rollout_correction."
MCORE, GEN = "policy.megatron_cfg.", "policy.generation."
BASES = {
    "verl": f"""
data.train_files=['/u/a.parquet','/u/b.parquet'] data.val_files=/u/v.parquet data.train_batch_size=128
data.max_prompt_length=1024 data.max_response_length=4096 data.filter_overlong_prompts=True
actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base algorithm.adv_estimator=grpo trainer.nnodes=4 trainer.test_freq=5
{ACTOR}optim.lr=2e-6 {ACTOR}ppo_mini_batch_size=32 {ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=10240
{ACTOR}clip_ratio_high=0.28 {ACTOR}megatron.tensor_model_parallel_size=4 {ACTOR}megatron.context_parallel_size=2
{ACTOR}megatron.expert_model_parallel_size=2 +{OWN}recompute_granularity=full
{ROLLOUT}n=8 {ROLLOUT}name=vllm {ROLLOUT}tensor_model_parallel_size=4 trainer.total_epochs=3""",
    "slime": """
--actor-num-nodes 2 --colocate --hf-checkpoint /root/Qwen3-30B-A3B --prompt-data /root/t.jsonl --input-key prompt
--label-key label --apply-chat-template --rollout-shuffle --rm-type deepscaler --num-rollout 300
--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64 --rollout-max-response-len 8192
--eval-interval 20 --eval-prompt-data aime /root/aime.jsonl --save /root/runs/ --tensor-model-parallel-size 4
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 20480
--lr 1e-6 --lr-decay-style constant --recompute-granularity full --rollout-num-gpus-per-engine 4""",
    "nemo-rl": f"""
grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=16 grpo.val_period=10 grpo.normalize_rewards=true
grpo.use_leave_one_out_baseline=true grpo.max_num_steps=1000000 policy.model_name=Qwen/Qwen3-8B
policy.train_global_batch_size=128 policy.train_micro_batch_size=2 policy.max_total_sequence_length=4096
policy.dtensor_cfg.enabled=false {MCORE}enabled=true {MCORE}tensor_model_parallel_size=2 {MCORE}optimizer.lr=5e-6
{MCORE}scheduler.lr_warmup_iters=13 {MCORE}scheduler.lr_warmup_init=5e-7 policy.optimizer.kwargs.lr=3e-6
policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=8192 {GEN}temperature=0.8
{GEN}max_new_tokens=4096 data.max_input_seq_length=4096 data.train.dataset_name=OpenMathInstruct-2
data.validation.data_path=/v.jsonl data.validation.input_key=question data.default.env_name=math
checkpointing.keep_top_k=3 policy.router_replay.enabled=false""",
}
FSDP = f"{MCORE}enabled=false policy.dtensor_cfg.enabled=true"


def written(folder, project, words=""):
    """The source of ``project`` with its base and ``words``."""
    if project == "nemo-rl":
        values: dict = {}
        for word in f"{BASES[project]} {words}".split():
            key, _, value = word.partition("=")
            *path, last = key.split(".")
            at = values
            for part in path:
                at = at.setdefault(part, {})
            at[last] = parse(f"value: {value}")[0]["value"]
        (folder / "run.yaml").write_text(yaml.safe_dump(values))
        return folder / "run.yaml"
    begins = {"verl": "python3 -m verl.trainer.main_ppo", "slime": "ray job submit -- python3 train.py"}[project]
    (folder / "run.sh").write_text(f"{begins} " + " ".join(f"{BASES[project]} {words}".split()))
    return folder / "run.sh"


def translated(folder, project, words=""):
    translation = translate(project, written(folder, project, words), {"HOME": "/home/u"})
    translation.check()
    (folder / "recipe.yaml").write_text(translation.text())
    return load_recipe(folder / "recipe.yaml"), translation


SETS = {"engine": "learner"}
MOPD = "on_policy_distillation.enabled=true on_policy_distillation.teacher_model_by_agent_name.math"

CASES = [
    ("slime", "--use-opd --opd-type sglang --opd-kl-coef 0.5",
     {"teacher": {"engine": "learner", "path": "TEACHER", "weight": 0.5}, "guessed": ["teacher.path"]}),
    ("slime", "--use-opd --opd-type megatron --opd-teacher-load /t",
     {"teacher": {"engine": "learner", "path": "/t", "weight": 1.0}, "guessed": ["teacher.path"]}),
    ("slime", "--use-opd --opd-type sglang --rollout-top-p 0.9", {"teacher": None, "lost": ["--use-opd"]}),
    ("slime", "--opd-kl-coef 0.5", {"teacher": None}),
    ("slime", "--use-opd --opd-type sglang --opd-log-prob-top-k 16",
     {"teacher": {**SETS, "path": "TEACHER", "weight": 1.0, "top_k": 16, "tokens": "student"},
      "rollout.sampled_head": 16}),
    ("slime", "--use-opd --opd-type sglang --opd-log-prob-top-k 16 --opd-top-k-strategy only-teacher",
     {"teacher": {**SETS, "path": "TEACHER", "weight": 1.0, "top_k": 16}, "rollout.sampled_head": None}),
    ("slime", "--use-opd --opd-type sglang --use-opsm", {"teacher": None, "lost": ["--use-opd"]}),
    ("slime", "--use-opd --opd-type sglang --opd-log-prob-top-k 16 --use-opsm", {"teacher.top_k": 16}),
    *(("slime", f"--use-opd --opd-type sglang --opd-log-prob-top-k 16 {words}",
       {"teacher": None, "lost": ["--opd-log-prob-top-k"]})
      for words in ("--opd-top-k-strategy union", "--opd-reward-weight-mode none")),
    ("nemo-rl", f"grpo.adv_estimator.name=opd {MOPD}=/t",
     {"teacher": {"engine": "learner", "path": "/t", "weight": 1.0}, "objective.advantage": "none"}),
    ("nemo-rl", "grpo.adv_estimator.name=opd", {"teacher": None, "lost": ["grpo.adv_estimator.name"]}),
    *(("verl", "distillation.enabled=True distillation.teacher_model.model_path=Qwen/Qwen3-32B "
       + " ".join(f"distillation.distillation_loss.{word}" for word in words.split()), expected)
      for words, expected in (
          ("loss_mode=k1 use_policy_gradient=True",
           {"teacher": {"engine": "learner", "path": "Qwen/Qwen3-32B", "weight": 1.0}}),
          ("loss_mode=forward_kl_topk topk=64 distillation_loss_coef=0.5",
           {"teacher": {**SETS, "path": "Qwen/Qwen3-32B", "weight": 0.5, "top_k": 64, "forward": 1.0,
                        "normalized": False}, "objective.advantage": "grpo"}),
          ("loss_mode=forward_kl_topk use_task_rewards=False distillation_loss_coef=0.5",
           {"teacher.top_k": 32, "teacher.weight": 1.0, "objective.advantage": "none"}),
          ("loss_mode=forward_kl_topk use_policy_gradient=True", {"teacher": None, "lost": ["distillation.enabled"]}),
          ("loss_mode=k3", {"teacher": None, "lost": ["distillation.enabled"]}))),
    ("verl", "", {
        "name": "run-4n8g", "batch.prompts": 128, "batch.minibatches": 4, "rollout.num_samples": 8, "num_epochs": 3,
        "learner.max_tokens_per_microbatch": 2 * 10240,  # of the two ranks of context parallelism
        "learner.parallel.expert_tensor": 4,  # Megatron's default is the tensor-parallel size
        "data.train": [{"path": "/u/a.parquet"}, {"path": "/u/b.parquet"}],
        "objective.policy_term": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
        "learner.optimizer.lr": 2e-6, "learner.optimizer.beta2": 0.999, "validation.temperature": 0.0}),
    ("verl", "trainer.total_training_steps=70", {"num_steps": 70, "num_epochs": None}),
    ("verl", f"{ACTOR}optim.lr_warmup_steps=10", {"schedule.warmup_steps": 40}),  # its scheduler moves once a step
    ("verl", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=70", {"schedule.warmup_steps": 28}),
    ("verl", f"+{OWN}moe_token_dispatcher_type=flex +{OWN}moe_enable_deepep=True data.truncation=left",
     {"learner.token_dispatcher": "flex", "data.prompt.overlong": "drop"}),
    ("verl", f"+{OWN}moe_router_dtype=fp32 trainer.val_before_train=False",
     {"precision.fp32_router": True, "validation.at_start": False}),
    *(("verl", f"{ACTOR}policy_loss.loss_mode={mode}", {"objective.policy_term": term, "objective.aggregation": how})
      for mode, how, term in (
          ("gspo", "seq-mean-token-mean", {"name": "gspo", "clip_low": 0.2, "clip_high": 0.28}),
          ("geo_mean", "seq-mean-token-mean", {"name": "gmpo", "log_clip_low": 0.2, "log_clip_high": 0.28}),
          ("cispo", "token-mean", {"name": "cispo", "clip_low": 0.2, "clip_high": 0.28}),
          ("dppo_kl", "token-mean", {"name": "dppo", "divergence": "kl", "delta": 0.28, "delta_low": 0.2, "cap": 3.0}),
          ("sapo", "token-mean", {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}))),
    *(("verl", " ".join(CORR + word for word in words.split()), {"objective.correction": items})
      for words, items in (
          ("rollout_is=token rollout_is_threshold=3", [{"mode": "tis", "level": "token", "cap": 3.0}]),
          ("rollout_is=sequence rollout_is_threshold=0.5_5",
           [{"mode": "mis", "level": "sequence", "cap": 5.0, "lower": 0.5}]),
          ("rollout_rs=seq_mean_k1 rollout_rs_threshold=0.5_4",  # of k1 = -log ratio: the ratio's are 1/4 and 2
           [{"mode": "reject", "statistic": "seq_mean_k1", "lower": 0.25, "upper": 2.0, "renormalize": True}]),
          ("rollout_rs=token_k1,seq_max_k3 rollout_rs_threshold=2,0.1",
           [{"mode": "mask", "level": "token", "lower": 0.5, "upper": 2.0, "renormalize": True},
            {"mode": "reject", "statistic": "max_k3", "upper": 0.1, "renormalize": True}]),
          ("bypass_mode=true loss_type=reinforce rollout_is=token",
           [{"mode": "tis", "level": "token", "cap": 2.0}]))),
    ("verl", f"{CORR}bypass_mode=true {CORR}rollout_is=token",
     {"objective.anchor": "bypass", "objective.correction": None, "lost": [f"{CORR}rollout_is"]}),
    ("verl", "algorithm.norm_adv_by_std_in_grpo=False", {"objective.advantage": "dr_grpo"}),
    ("verl", "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc data.gen_batch_size=256",
     {"batch.filter_metric": "raw_reward", "batch.generation_prompts": 256, "num_steps": 500,
      "guessed": ["batch.max_generations", "num_steps"]}),
    ("verl", f"{ACTOR}use_kl_loss=True {ACTOR}ppo_epochs=2 {ACTOR}clip_ratio=0.1 trainer.resume_mode=resume_path",
     {"objective.kl_loss": {"coef": 0.001, "type": "k3"}, "reference": {},
      "lost": [f"{ACTOR}ppo_epochs", f"{ACTOR}clip_ratio", "trainer.resume_mode"]}),
    *(("verl", f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_type={theirs}", {"objective.kl_loss": ours, "lost": lost})
      for theirs, ours, lost in (
          ("kl", {"coef": 0.001, "type": "k1"}, []), ("mse", {"coef": 0.001, "type": "k2"}, []),
          ("low_var_kl+", {"coef": 0.001, "type": "k3+"}, []), ("k2+", {"coef": 0.001, "type": "k2"}, []),
          ("abs", None, [f"{ACTOR}kl_loss_type"]))),
    ("verl", "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.type=adaptive",
     {"objective.kl_in_reward": {"coef": 0.01, "type": "k1"}, "objective.kl_loss": None, "reference": {},
      "lost": ["algorithm.kl_ctrl.type"]}),
    ("verl", f"{ACTOR}use_kl_loss=True {ROLLOUT}top_p=0.9", {"objective.kl_loss": None, "reference": None}),
    ("slime", "--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k3 --use-unbiased-kl --kl-coef 0.1",
     {"objective.kl_loss": {"coef": 0.01, "type": "k3", "cap": None, "unbiased": True}, "lost": []}),
    ("slime", "--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --ref-load /m",
     {"objective.kl_loss": {"coef": 0.01, "type": "k3"}, "reference": {}}),
    ("nemo-rl", "loss_fn.use_kl_in_reward=true", {"objective.kl_loss": None, "lost": ["loss_fn.use_kl_in_reward"]}),
    ("nemo-rl", "loss_fn.kl_output_clamp_value=5 loss_fn.use_on_policy_kl_approximation=true",
     {"objective.kl_loss": {"coef": 0.01, "type": "k3", "cap": 5.0},
      "lost": ["loss_fn.use_on_policy_kl_approximation"]}),
    ("verl", f"{ROLLOUT}name=sglang {ROLLOUT}tensor_model_parallel_size=8",
     {"rollout.engine": "vllm", "rollout.tensor_parallel": 4,
      "guessed": ["rollout.engine", "rollout.tensor_parallel"]}),
    ("slime", "", {
        "name": "run-2n8g", "batch.prompts": 32, "batch.minibatches": 4, "num_steps": 300,
        "data.train": [{"path": "/root/t.jsonl", "answer_key": "label"}], "data.prompt.chat_template": "auto",
        "data.validation": [{"path": "/root/aime.jsonl", "name": "aime", "answer_key": "label"}],
        "reward.name": "math", "rollout.engine": "vllm", "learner.offload.optimizer": True, "run_root": "/root/runs/",
        "objective.aggregation": "seq-mean-token-mean", "validation.temperature": 1.0, "rollout.top_k": 0,
        "learner.max_tokens_per_microbatch": 20480, "learner.parallel.expert": 8, "schedule.style": "constant",
        "guessed": ["data.prompt.max_length", "data.prompt.overlong", "rollout.engine"]}),
    ("slime", "--hf-checkpoint /root/Qwen3-30B-A3B-FP8",
     {"model.path": "/root/Qwen3-30B-A3B", "rollout.quantization.weights": "fp8"}),
    ("slime", "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --eps-clip-c 3",
     {"objective.policy_term": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "lost": ["--eps-clip-c"]}),
    ("slime", "--use-tis --tis-clip 3 --use-opsm", {"objective.correction": [
        {"mode": "tis", "level": "token", "cap": 3.0}, {"mode": "opsm", "delta": 1e-4, "pi_old": "learner"}]}),
    ("slime", "--use-rollout-logprobs", {"objective.anchor": "bypass"}),
    ("slime", "--use-tis --custom-tis-function-path a.icepop_function --tis-clip-low 0.5 --tis-clip 2",
     {"objective.correction": [{"mode": "icepop", "lower": 0.5, "upper": 2.0}]}),
    ("slime", "--use-routing-replay --use-rollout-routing-replay", {"routing.replay": "r3"}),
    ("slime", "--eval-top-k 1 --skip-eval-before-train --use-wandb --wandb-project p --wandb-group g",
     {"validation.temperature": 0.0, "validation.at_start": False, "name": "g-2n8g",
      "monitor.sinks.wandb": {"project": "p", "group": "g"}}),
    ("slime", "--lr-decay-style cosine --lr-warmup-fraction 0.1 --lr-decay-iters 100 --min-lr 1e-7",
     {"schedule": {"warmup_steps": 10, "style": "cosine", "min_lr": 1e-7, "decay_steps": 100}}),
    ("slime", "--moe-token-dispatcher-type allgather --pipeline-model-parallel-size 2",
     {"learner.token_dispatcher": None, "lost": ["--moe-token-dispatcher-type"]}),
    ("slime", "--load /root/sft", {"lost": ["--load"]}),
    ("slime", "--load /root/runs/ --custom-rm-path a.b.score --kl-loss-coef 0.01 --use-kl-loss",
     {"objective.kl_loss": {"coef": 0.01, "type": "k1"}, "guessed": ["reward.name"]}),
    ("slime", "--dynamic-sampling-filter-path a.check_reward_nonzero_std --over-sampling-batch-size 64",
     {"batch.filter_groups": True, "batch.generation_prompts": 64, "guessed": ["batch.max_generations"]}),
    ("nemo-rl", "", {
        "batch.prompts": 32, "batch.minibatches": 4, "rollout.num_samples": 16, "num_epochs": 1,
        "learner.optimizer.lr": 5e-6, "schedule.warmup_steps": 13 * 4, "schedule.warmup_from": 5e-7,
        "learner.max_tokens_per_microbatch": 8192, "rollout.temperature": 0.8, "validation.temperature": 0.8,
        "data.prompt.max_length": 1024, "rollout.max_response_length": 3072, "learner.offload.optimizer": True,
        "data.validation": [{"path": "/v.jsonl", "prompt_key": "question"}],
        "data.train": [{"path": "OpenMathInstruct-2.jsonl"}], "objective.advantage": "grpo",
        "objective.kl_loss": {"coef": 0.01, "type": "k3", "cap": 10.0},
        "lost": ["grpo.use_leave_one_out_baseline"]}),
    ("nemo-rl", f'{FSDP} policy.scheduler=[{{"name":"a.LinearLR","kwargs":{{"start_factor":0.1,"total_iters":50}}}}]',
     {"learner.optimizer.lr": 3e-6, "schedule.warmup_steps": 200, "schedule.warmup_from": pytest.approx(3e-7),
      "learner.parallel.tensor": 4, "guessed": ["learner.parallel.tensor"]}),
    ("nemo-rl", "grpo.val_period=0 grpo.val_at_start=true", {"validation.every": 0, "validation.at_start": True}),
    ("nemo-rl", "loss_fn.score_centering=true loss_fn.disable_ppo_ratio=true",
     {"objective.score_centering": True, "rollout.sampled_head": 128, "guessed": ["rollout.sampled_head"]}),
    ("nemo-rl", f"loss_fn.score_centering=true loss_fn.disable_ppo_ratio=true {GEN}top_k=50 {GEN}top_p=0.9",
     {"objective.score_centering": True, "rollout.sampled_head": 50}),
    ("nemo-rl", "loss_fn.score_centering=true",
     {"objective.score_centering": None, "lost": ["loss_fn.score_centering"]}),
    ("nemo-rl", f"{GEN}top_k=50 {GEN}top_p=0.9", {"rollout.top_k": 50, "rollout.kept_sets": True}),
    ("nemo-rl", 'data.validation.repeat=16 policy.tokenizer.chat_template_kwargs={"enable_thinking":false}',
     {"validation.num_samples": 16, "data.prompt.chat_template_args": {"enable_thinking": False}}),
    ("nemo-rl", f"policy.model_name=Qwen/Qwen3-30B-A3B {MCORE}expert_model_parallel_size=4 "
     f"{MCORE}moe_router_dtype=fp32",
     {"learner.parallel.expert": 4, "precision.fp32_router": True}),
    ("nemo-rl", "grpo.normalize_rewards=false", {"objective.advantage": "rloo"}),
    ("nemo-rl", "grpo.normalize_rewards=false grpo.use_leave_one_out_baseline=false",
     {"objective.advantage": "dr_grpo"}),
    ("nemo-rl", "grpo.adv_estimator.name=reinforce_plus_plus", {"objective.advantage": "reinforce_pp"}),
    *(("nemo-rl", " ".join(f"loss_fn.{word}" for word in words.split()), {f"objective.{key}": value})
      for words, key, value in (
          ("sequence_level_importance_ratios=true", "policy_term",
           {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}),
          ("use_cispo=true ratio_clip_min=1.0 ratio_clip_max=5.0", "policy_term",
           {"name": "cispo", "clip_low": None, "clip_high": 5.0}),
          ("ratio_clip_c=10", "policy_term",
           {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 10.0}),
          ("disable_ppo_ratio=true", "policy_term", {"name": "reinforce"}),
          ("use_importance_sampling_correction=true", "correction", [{"mode": "is", "level": "token"}]),
          ("use_importance_sampling_correction=true truncated_importance_sampling_type=icepop "
           "truncated_importance_sampling_ratio=5 truncated_importance_sampling_ratio_min=0.5", "correction",
           [{"mode": "icepop", "lower": 0.5, "upper": 5.0}]),
          ("use_importance_sampling_correction=true truncated_importance_sampling_type=seq-mask-tis "
           "truncated_importance_sampling_ratio=1.002 truncated_importance_sampling_ratio_min=0.999", "correction",
           [{"mode": "is", "level": "token"},
            {"mode": "reject", "statistic": "geometric", "upper": 1.002, "lower": 0.999}]))),
    ("nemo-rl", f"{GEN}colocated.enabled=false {GEN}colocated.resources.num_nodes=1 cluster.num_nodes=3 "
     f"{GEN}colocated.resources.gpus_per_node=8 {GEN}vllm_cfg.tensor_parallel_size=4 grpo.async_grpo.enabled=true "
     "grpo.async_grpo.max_trajectory_age_steps=2 grpo.async_grpo.in_flight_weight_updates=true "
     "policy.router_replay.enabled=true",
     {"name": "run-2n8g",  # the learner's nodes
      "rollout.engine": "vllm_server", "rollout.max_staleness": 2, "rollout.servers.count": 2,
      "rollout.in_flight.mode": "keep", "routing.replay": "r3", "learner.offload": None}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
@pytest.mark.parametrize(("project", "words", "expected"), CASES, ids=[f"{p}: {w[:60]}" for p, w, _ in CASES])
def test_a_source_becomes_a_recipe(tmp_path, project, words, expected):
    _, translation = translated(tmp_path, project, words)
    lost, guessed = expected.get("lost", []), expected.get("guessed", [])
    found = {key: translation.ours(key) for key in expected if key not in ("lost", "guessed")}
    assert found == {key: value for key, value in expected.items() if key not in ("lost", "guessed")}
    report = translation.report()
    without = re.search(r"Without counterpart:\n(.*?)(\n\w|$)", report, re.DOTALL)
    assert [key for key in lost if f"{key}: " not in without[1]] == []
    assert [key for key in guessed if key not in translation.guesses] == []
    assert [key for key in translation.values if key not in report] == []


@pytest.mark.parametrize(
    ("loss", "forward", "lost"),
    [
        ("{}", 0.5, False),
        ("{kl_type: reverse}", 0.0, False),
        ("{kl_type: mixed, mixed_kl_weight: 0.2, zero_outside_topk: true}", 0.2, True),
    ],
)
def test_a_distillation_of_nemo_rl_is_a_run_with_its_teacher_alone(tmp_path, loss, forward, lost):
    file = tmp_path / "run.yaml"
    file.write_text(
        "distillation: {num_prompts_per_step: 8, num_generations_per_prompt: 1, topk_logits_k: 64, max_num_steps: 9}\n"
        f"loss_fn: {loss}\n"
        "policy: {model_name: m, train_global_batch_size: 8, generation: {max_new_tokens: 64}}\n"
        "teacher: {model_name: /t, precision: bfloat16}\n"
    )
    translation = translate("nemo-rl", file, {})
    translation.check()
    wanted = {"engine": "learner", "path": "/t", "weight": 1.0, "top_k": 64, "forward": forward}
    assert translation.ours("teacher") == wanted
    objective = {"advantage": "none", "kl_loss": None, "aggregation": "token-mean"}
    assert {key: translation.ours(f"objective.{key}") for key in objective} == objective
    assert translation.ours("batch.prompts") == 8
    assert ("loss_fn.zero_outside_topk" in translation.losses) == lost


def test_what_is_not_known_is_said(tmp_path):
    _, translation = translated(tmp_path, "verl", "data.strange=7 trainer.experiment_name=$(date) trainer.nnodes=$N")
    report = translation.report()
    assert "No rule here knows:\n  data.strange: 7" in report
    assert "default 1 was taken; --variable N=VALUE says it" in " ".join(report.split())
    assert translation.ours("name") == "run-1n8g"
    _, translation = translated(tmp_path, "slime", '--strange 7 "${UNSET[@]}" --rollout-seed $SEED')
    report = " ".join(translation.report().split())
    assert "${UNSET[@]}: the script does not set this array" in report
    assert "No rule here knows: --strange: 7" in report
    assert "default 42 was taken" in report


@pytest.mark.parametrize(("project", "name"), [("verl", "verl"), ("slime", "slime"), ("nemo-rl", "NeMo-RL")])
def test_the_command_writes_a_recipe_that_is_checked_and_planned(tmp_path, capsys, project, name):
    out = str(tmp_path / "recipe.yaml")
    file = written(tmp_path, project)
    assert main(["recipe", f"from-{project}", str(file), "--output", out, "--variable", "A=1"]) == 0
    assert f"{name} (rules read from {', '.join(foreign_keys.READ_FROM[name])})" in capsys.readouterr().out
    assert main(["check", "--offline", out]) == 0
    assert main(["plan", out, "--gpu", "h100-80"]) == 0
    assert main(["recipe", f"from-{project}", str(file)]) == 0
    assert "\nname: run-" in capsys.readouterr().out
    assert main(["recipe", f"from-{project}", str(file), "--variable", "A"]) == 2
    assert main(["recipe", f"from-{project}", str(tmp_path / "none.sh")]) == 2


@pytest.mark.parametrize(
    ("text", "name"), [("My run: v2", "My-run-v2-4n8g"), ("..", "run-4n8g"), ("x" * 200, "x" * 160 + "-4n8g")]
)
def test_a_name_ends_with_the_size_of_the_job(text, name):
    assert run_name(text, 4, 8) == name


def test_a_translation_that_is_no_recipe_is_refused_with_its_report(tmp_path):
    with pytest.raises(InputError, match="is not a valid recipe") as caught:
        translated(tmp_path, "verl", "data.train_batch_size=0")
    assert "Translated:" in str(caught.value)
