"""Keys of verl, slime and NeMo-RL beside ours: docs/coming-from.json, and hints for a recipe with them.

Names were read from the sources of `READ_FROM`. In a cell `…` is text, and what stands in backticks is a key; keys of
verl that begin with `actor.` or `rollout.` stand below `actor_rollout_ref`.
"""

from __future__ import annotations

import re
from functools import cache

READ_FROM = {
    "verl": ("0.10.0.dev", "1dda039b9c63", "2026-08-22"),
    "slime": ("0.3.1", "624b824a898a", "2026-08-21"),
    "NeMo-RL": ("0.6.0", "7ea279abfbeb", "2026-08-22"),
}
"""Version, commit and its date."""

COLUMNS = ("here", "verl", "slime", "NeMo-RL")
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("`model.path`", "`actor_rollout_ref.model.path`", "`--hf-checkpoint`", "`policy.model_name`"),
    ("`data.train`", "`data.train_files`", "`--prompt-data`", "`data.train`"),
    ("`data.validation`", "`data.val_files`", "`--eval-prompt-data`", "`data.validation`"),
    ("`batch.prompts`", "`data.train_batch_size`", "`--rollout-batch-size`", "`grpo.num_prompts_per_step`"),
    (
        "`rollout.num_samples`",
        "`actor_rollout_ref.rollout.n`",
        "`--n-samples-per-prompt`",
        "`grpo.num_generations_per_prompt`",
    ),
    (
        "`batch.minibatches`",
        "batch size / `actor.ppo_mini_batch_size`",
        "`--num-steps-per-rollout`",
        "batch size / `policy.train_global_batch_size`",
    ),
    (
        "`learner.max_tokens_per_microbatch`",
        "`actor.ppo_max_token_len_per_gpu`",
        "`--max-tokens-per-gpu`",
        "`policy.sequence_packing.train_mb_tokens`",
    ),
    (
        "`data.prompt.max_length`",
        "`data.max_prompt_length`",
        "`--rollout-max-prompt-len`",
        "`data.max_input_seq_length`",
    ),
    ("`data.prompt.truncation`", "`data.truncation`", "–", "–"),
    (
        "`rollout.max_response_length`",
        "`data.max_response_length`",
        "`--rollout-max-response-len`",
        "`policy.generation.max_new_tokens`",
    ),
    ("`rollout.temperature`", "`rollout.temperature`", "`--rollout-temperature`", "`policy.generation.temperature`"),
    (
        "`objective.advantage`",
        "`algorithm.adv_estimator`",
        "`--advantage-estimator`",
        "`grpo.use_leave_one_out_baseline`, `grpo.normalize_rewards`",
    ),
    (
        "`objective.policy_term.clip_low`, `objective.policy_term.clip_high`",
        "`actor.clip_ratio_low`, `actor.clip_ratio_high`",
        "`--eps-clip`, `--eps-clip-high`",
        "`loss_fn.ratio_clip_min`, `loss_fn.ratio_clip_max`",
    ),
    ("`objective.policy_term.dual_clip`", "`actor.clip_ratio_c`", "`--eps-clip-c`", "`loss_fn.ratio_clip_c`"),
    (
        "`objective.policy_term.name`",
        "`actor.policy_loss.loss_mode`",
        "`--advantage-estimator gspo`",
        "`loss_fn.sequence_level_importance_ratios`",
    ),
    ("`objective.aggregation`", "`actor.loss_agg_mode`", "`--calculate-per-token-loss`", "`loss_fn.token_level_loss`"),
    (
        "`objective.correction`",
        "`algorithm.rollout_correction.rollout_is`, `…rollout_rs`",
        "`--use-tis`, `--tis-clip`",
        "`loss_fn.use_importance_sampling_correction`, `loss_fn.truncated_importance_sampling_type`",
    ),
    ("`objective.anchor`", "`algorithm.rollout_correction.bypass_mode`", "`--use-rollout-logprobs`", "–"),
    ("`objective.entropy_bonus`", "`actor.entropy_coeff`", "`--entropy-coef`", "–"),
    (
        "`batch.filter_groups`, `batch.max_generations`",
        "`algorithm.filter_groups`",
        "`--dynamic-sampling-filter-path`",
        "`grpo.use_dynamic_sampling`",
    ),
    (
        "`batch.oversample`",
        "`rollout.over_sample_rate`, `data.gen_batch_size` (here `batch.generation_prompts`)",
        "`--over-sampling-batch-size`, `--partial-rollout`",
        "–",
    ),
    ("`data.curriculum`", "`trainer.v1.sampler.custom_sampler` (a class of your own)", "–", "–"),
    ("`data.shuffle`", "`data.shuffle`", "`--rollout-shuffle`", "`data.shuffle`"),
    ("`reward.overlong`", "`reward.reward_kwargs.overlong_buffer_cfg`", "your own reward", "`reward_shaping`"),
    ("`reward.name`", "`reward.custom_reward_function.path`", "`--custom-rm-path`", "an environment"),
    (
        "`routing.replay`",
        "`actor.router_replay.mode`",
        "`--use-routing-replay`, `--use-rollout-routing-replay`",
        "`policy.router_replay.enabled`",
    ),
    ("`learner.optimizer.lr`", "`actor.optim.lr`", "`--lr`", "`policy.optimizer.kwargs.lr`"),
    (
        "`schedule.warmup_steps`, `schedule.warmup_from`, `schedule.decay_steps`",
        "`actor.optim.lr_warmup_steps`, `…lr_warmup_init`, `…lr_decay_steps`",
        "`--lr-warmup-iters`, `--lr-warmup-init`, `--lr-decay-iters`",
        "`policy.scheduler`",
    ),
    (
        "`schedule.weight_decay_end`, `schedule.weight_decay_style`",
        "`actor.optim.weight_decay_incr_style`",
        "`--end-weight-decay`, `--weight-decay-incr-style`",
        "–",
    ),
    (
        "`learner.optimizer.beta1`, `learner.optimizer.clip_grad`",
        "`actor.optim.betas`, `actor.optim.clip_grad`",
        "`--adam-beta1`, `--clip-grad`",
        "`policy.optimizer.kwargs.betas`, `policy.max_grad_norm`",
    ),
    (
        "`learner.parallel.tensor`, `learner.parallel.pipeline`, `learner.parallel.expert`",
        "`actor.megatron.*_model_parallel_size`",
        "`--*-model-parallel-size`",
        "`policy.megatron_cfg.*_model_parallel_size`",
    ),
    (
        "`learner.parallel.context`, `learner.parallel.expert_tensor`",
        "`actor.megatron.context_parallel_size`, `actor.megatron.expert_tensor_parallel_size`",
        "`--context-parallel-size`, `--expert-tensor-parallel-size`",
        "`policy.megatron_cfg.context_parallel_size`, `policy.megatron_cfg.expert_tensor_parallel_size`",
    ),
    (
        "`learner.token_dispatcher`",
        "`actor.megatron.override_transformer_config.moe_token_dispatcher_type`",
        "`--moe-token-dispatcher-type`",
        "`policy.megatron_cfg.moe_token_dispatcher_type`",
    ),
    (
        "`precision.fp32_router`",
        "`actor.megatron.override_transformer_config.moe_router_dtype`",
        "`--moe-router-dtype`",
        "`policy.megatron_cfg.moe_router_dtype`",
    ),
    (
        "`learner.megatron`",
        "`actor.megatron.override_transformer_config`",
        "any argument of Megatron",
        "`policy.megatron_cfg.model_overrides`",
    ),
    (
        "`rollout.max_num_seqs`, `rollout.max_num_batched_tokens`",
        "`rollout.max_num_seqs`, `rollout.max_num_batched_tokens`",
        "–",
        "`policy.generation.vllm_kwargs.max_num_seqs`, `policy.generation.vllm_kwargs.max_num_batched_tokens`",
    ),
    (
        "`rollout.tensor_parallel`",
        "`rollout.tensor_model_parallel_size`",
        "`--rollout-num-gpus-per-engine`",
        "`policy.generation.vllm_cfg.tensor_parallel_size`",
    ),
    (
        "`rollout.gpu_memory_utilization`",
        "`rollout.gpu_memory_utilization`",
        "`--sglang-mem-fraction-static`",
        "`policy.generation.vllm_cfg.gpu_memory_utilization`",
    ),
    (
        "`rollout.quantization`",
        "`rollout.quantization`",
        "a checkpoint in fp8 as `--hf-checkpoint`",
        "`policy.generation.vllm_cfg.precision`",
    ),
    (
        "`learner.offload.gradients`, `learner.offload.optimizer`, `learner.offload.weights`",
        "`actor.megatron.grad_offload`, `…optimizer_offload`, `…param_offload`",
        "`--offload-train`",
        "always where colocated",
    ),
    (
        "`rollout.max_staleness`",
        "`verl.experimental.fully_async_policy`",
        "`train_async.py`",
        "`grpo.async_grpo.max_trajectory_age_steps`",
    ),
    ("`monitor.sinks.wandb`", "`trainer.logger`", "`--use-wandb`", "`logger.wandb_enabled`"),
    (
        "`monitor.sinks.wandb.entity`, `monitor.sinks.wandb.tags`, `monitor.sinks.swanlab.workspace`",
        "–",
        "`--wandb-team`",
        "`logger.wandb`",
    ),
    ("`monitor.tensorboard`", "`trainer.logger`", "`--use-tensorboard`", "`logger.tensorboard_enabled`"),
    (
        "`monitor.samples.max_chars`, `monitor.samples.max_mib`",
        "`trainer.log_val_generations`",
        "–",
        "`logger.num_val_samples_to_print`",
    ),
    ("`run_root`", "`trainer.default_local_dir`", "`--save`", "`checkpointing.checkpoint_dir`"),
    ("`num_steps`", "`trainer.total_training_steps`", "`--num-rollout`", "`grpo.max_num_steps`"),
    ("`num_epochs`", "`trainer.total_epochs`", "`--num-epoch`", "`grpo.max_num_epochs`"),
    ("`validation.at_start`", "`trainer.val_before_train`", "`--skip-eval-before-train`", "`grpo.val_at_start`"),
    (
        "`validation.num_samples`, `validation.temperature`",
        "`rollout.val_kwargs.n`, `rollout.val_kwargs.temperature`",
        "`--n-samples-per-eval-prompt`, `--eval-temperature`",
        "`grpo.val_num_generations_per_prompt`",
    ),
    (
        "`checkpoint.every`, `validation.every`",
        "`trainer.save_freq`, `trainer.test_freq`",
        "`--save-interval`, `--eval-interval`",
        "`checkpointing.save_period`, `grpo.val_period`",
    ),
)

FOREIGN_SECTIONS = {
    "actor_rollout_ref": "verl",
    "algorithm": "verl",
    "trainer": "verl",
    "reward_model": "verl",
    "critic": "verl",
    "policy": "NeMo-RL",
    "grpo": "NeMo-RL",
    "loss_fn": "NeMo-RL",
    "cluster": "NeMo-RL",
}
"""Sections at the top of their configurations that no recipe has, and whose they are."""


ON_THE_PAGE = (
    "model.path",
    "data.train",
    "data.validation",
    "batch.prompts",
    "rollout.num_samples",
    "batch.minibatches",
    "learner.max_tokens_per_microbatch",
    "data.prompt.max_length",
    "rollout.max_response_length",
    "rollout.temperature",
    "objective.advantage",
    "objective.policy_term.clip_low",
    "objective.policy_term.name",
    "objective.aggregation",
    "objective.correction",
    "batch.filter_groups",
    "reward.name",
    "routing.replay",
    "learner.optimizer.lr",
    "learner.parallel.tensor",
    "rollout.tensor_parallel",
    "rollout.max_staleness",
    "run_root",
    "num_steps",
    "checkpoint.every",
)
"""The first key of the rows that docs/coming-from.md has; docs/coming-from.json has all."""


def markdown() -> str:
    """Return the table of docs/coming-from.md."""
    rows = [row for row in ROWS if row[0].split("`")[1] in ON_THE_PAGE]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def keys_of(cell: str) -> list[str]:
    """Keys that a cell names, in full; a flag of slime without its dashes, as slime's arguments are called."""
    words = [word for code in re.findall(r"`([^`]+)`", cell) for word in [code.split()[0]] if "*" not in word]
    words = [word.lstrip("-").replace("-", "_") if word.startswith("--") else word for word in words]
    return [f"actor_rollout_ref.{key}" if re.match(r"(actor|rollout)\.", key) else key for key in words]


@cache
def _ours_by_theirs() -> dict[str, list[tuple[str, str]]]:
    by_theirs: dict[str, list[tuple[str, str]]] = {}
    for ours, *theirs in ROWS:
        for project, cell in zip(COLUMNS[1:], theirs, strict=True):
            keys, own = keys_of(cell), re.findall(r"`([\w.]+)`", ours)
            for i, key in enumerate(keys):
                meant = own[i : i + 1] if len(keys) == len(own) else own
                by_theirs.setdefault(key, []).append((project, " and ".join(meant)))
    return by_theirs


def hint(key: str) -> str:
    """What of ours a key of another project means; "" where the table does not know it."""
    if (project := FOREIGN_SECTIONS.get(key)) is not None:
        how = f"; `megatron-rl recipe from-{project.lower()} FILE` translates its configurations"
        return f"it is a section of {project}{how}"
    for name in (key, f"actor_rollout_ref.{key}"):
        if counterparts := _ours_by_theirs().get(name):
            project, ours = counterparts[0]
            return f"it is a key of {project}; here it is {ours}"
    return ""
