"""What a script or configuration of verl sets, verl's defaults of what the rules read, and the keys without a rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import read_script, unresolved_names
from megatron_rl.instruments.translate.translation import flattened

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MEGATRON, OPTIM = f"{ACTOR}.megatron", f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
ROOTS = (
    "actor_rollout_ref",
    "algorithm",
    "trainer",
    "data",
    "reward",
    "reward_model",
    "critic",
    "custom_reward_function",
)

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    f"{CORRECTION}.rollout_is": None,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{CORRECTION}.bypass_mode": False,
    f"{CORRECTION}.loss_type": "ppo_clip",
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "data.truncation": "error",
    "data.filter_overlong_prompts": False,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{OPTIM}.lr": 1e-6,
    f"{OPTIM}.betas": [0.9, 0.999],
    f"{OPTIM}.weight_decay": 0.01,
    f"{OPTIM}.clip_grad": 1.0,
    f"{OPTIM}.lr_warmup_steps": -1,
    f"{OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{OPTIM}.lr_warmup_init": 0.0,
    f"{OPTIM}.lr_decay_style": "constant",
    f"{OPTIM}.min_lr": 0.0,
    f"{MEGATRON}.tensor_model_parallel_size": 1,
    f"{MEGATRON}.pipeline_model_parallel_size": 1,
    f"{MEGATRON}.context_parallel_size": 1,
    f"{MEGATRON}.expert_model_parallel_size": 1,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.max_num_seqs": 256,
    f"{ROLLOUT}.enable_prefix_caching": True,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
    "trainer.experiment_name": "gsm8k",
    "trainer.project_name": "verl_examples",
}
"""verl's values of the keys that the rules read, where a script does not set them."""

EFFECTS = [
    (r"actor_rollout_ref\.ref\..*", ""),  # said once, with the KL term
    (r"critic\..*|trainer\.critic_warmup|algorithm\.(gamma|lam)", ""),
    (r"algorithm\.(kl_ctrl\..*|kl_penalty)|.*\.kl_loss_(coef|type)", ""),
    (r"ray_kwargs\..*|model_engine|.*\.(strategy|model_engine)|trainer\.device|.*\.(use|vanilla)_mbridge", ""),
    (r".*\.(use_remove_padding|use_torch_compile|calculate_log_probs|free_cache_engine|load_format)", ""),
    (r".*\.rollout\.(mode|log_prob_.*|prompt_length|response_length|skip_tokenizer_init|disable_log_stats)", ""),
    (r"data\.(return_raw_.*|filter_overlong_prompts_workers|val_batch_size|dataloader_.*|trust_remote_code)", ""),
    (r"trainer\.(balance_batch|resume_mode|esi_.*|log_val_generations)", ""),
    (r".*\.ppo_micro_batch_size.*|.*\.overlong_buffer_cfg\.log|.*\.max_resp_len|reward\.num_workers", ""),
    (r".*\.sequence_parallel|.*\.use_distributed_optimizer|.*\.(use_)?dist_checkpointing(_path)?", ""),
    (r".*\.recompute_(method|num_layers|modules)", "layers are recomputed one by one"),
    (
        r".*\.virtual_pipeline_model_parallel_size",
        "the pipeline is not interleaved: numbers are the same, its bubble is larger",
    ),
    (
        r".*override_transformer_config\..*",
        "this project sets Megatron's fields, and learner.megatron those that it does not; speed may differ, and the "
        "model where the field changes it",
    ),
    (
        r".*\.rollout\.(max_model_len|enable_chunked_prefill)",
        "the engine has its own value; speed and memory may differ",
    ),
    (
        r".*\.rollout\.(expert_parallel_size|moe_tensor_parallel_size|data_parallel_size)",
        "experts of an engine are cut like its other matrices (rollout.tensor_parallel)",
    ),
    (r".*\.rollout\.(engine_kwargs|checkpoint_engine)\..*", "the engine is used without it"),
    (
        r".*\.rollout\.multi_turn\..*|.*\.rollout\.agent\..*",
        "several turns need a function of your own (rollout.function)",
    ),
    (r".*\.fsdp_config\..*", "there is no FSDP; learner.parallel says how the model is cut"),
    (r".*\.entropy_(checkpointing|from_logits_with_chunking)", "memory alone; learner.fused_head has that effect"),
    (r"trainer\.(rollout_data_dir|validation_data_dir)", "samples.jsonl in the run directory holds sampled texts"),
    (
        r"reward_model\..*|reward\.reward_model\..*|reward\..*sandbox.*",
        "a reward is a function, not a model",
    ),
]
"""Keys that no rule reads: a pattern, and what changes without them; "" where nothing does."""


def read_overrides(path: Path, variables: dict[str, str]) -> tuple[dict[str, Any], list[str], bool]:
    """Values that a launch script gives verl, or those of a resolved configuration; notes; whether it is the latter."""
    if path.suffix in (".yaml", ".yml"):
        values, _ = parse(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not set(values) & set(ROOTS):
            raise InputError(f"{path}: none of verl's sections stands in it; expected {', '.join(ROOTS[:4])}")
        return {key: _marked(value) for key, value in flattened(values).items()}, [], True
    script = read_script(path, variables)
    commands = [c for c in script.commands if any("verl" in w or "main_ppo" in w or "main_dapo" in w for w in c)]
    words = max(commands or script.commands or [[]], key=lambda c: sum(_is_override(word) for word in c))
    values, notes = {}, list(script.notes)
    for word in filter(_is_override, words):
        key, _, value = word.lstrip("+").partition("=")
        values[key] = _value(value)
        if values[key] == "":
            notes.append(f"{key}: empty where the script was followed; verl's default was taken")
            del values[key]
    if not values:
        raise InputError(f"{path}: no command with overrides of verl in it (such as data.train_batch_size=1024)")
    main = next((word for word in words if word.startswith("verl.") or word.endswith(".py")), "")
    if "async" in main:
        notes.append(f"{main}: it generates ahead of the learner; here rollout.engine vllm_server and max_staleness do")
    return values, notes, False


def _is_override(word: str) -> bool:
    return re.match(rf"\+*({'|'.join(ROOTS)}|ray_kwargs|model_engine|async_training)[\w.]*=", word) is not None


def _value(text: str) -> Any:
    if unresolved_names(text):
        return text
    try:
        return parse(f"value: {text}")[0]["value"]
    except (yaml.YAMLError, InputError, ValueError):
        return text


def _marked(value: Any) -> Any:
    """A value with an interpolation that is not resolved counts as not known."""
    return f"\ue000{value}\ue001" if isinstance(value, str) and "${" in value else value
