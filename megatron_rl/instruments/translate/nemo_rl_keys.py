"""What a configuration of NeMo-RL says, NeMo-RL's values where it does not, and the keys without a rule.

Its YAML files inherit from others (`defaults`) and refer to their own values (`${policy.model_name}`).

Read as NeMo-RL reads its configurations: a file's parents first, each from the folder of the file that names it, then
the file over them; `_override_: true` in a section drops what its parents have there. References are filled in last.
Known are keys, relative keys (`${.temperature}`), and the functions add, mul, div and max. What depends on the machine,
such as `${oc.env:NAME}`, is taken from ``variables``, and stays in the text as `shell.unresolved_names` finds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import MAX_EXPANDED
from megatron_rl.instruments.translate.translation import flattened

DEEPEST = 16  # files that inherit from each other, and references that lead to references
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}


def load_inherited(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    """The values of ``path`` over those of its parents, its own alone, and the files read; references as written.

    Raises InputError where a file is missing, is no mapping, or inherits from itself.
    """
    return _load(path, ())


def _load(path: Path, children: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    if path.resolve() in children or len(children) >= DEEPEST:
        raise InputError(f"{path}: defaults: it inherits from itself, by way of {children[-1]}")
    try:
        values, _ = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        by = f"; {children[-1]} names it under `defaults`: give the file in its own folder" if children else ""
        raise InputError(f"{path}: cannot be read as YAML: {error}{by}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of sections, found {type(values).__name__}")
    parents = values.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    files: list[Path] = []
    for parent in [parents] if isinstance(parents, str) else parents:
        inherited, _, read = _load(path.parent / str(parent), (*children, path.resolve()))
        merged, files = _merged(merged, inherited), [*files, *read]
    return _merged(merged, values), values, [*files, path]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = {} if value.get("_override_") is True else result.get(key)
            rest = {name: inner for name, inner in value.items() if name != "_override_"}
            result[key] = _merged(below if isinstance(below, Mapping) else {}, rest)
        else:
            result[key] = value
    return result


def resolved(values: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return ``values`` with their references filled in."""
    return _Resolver(values, variables).section(values, ())


class _Resolver:
    def __init__(self, values: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.values, self.variables = values, variables
        self.expanded = 0

    def section(self, value: Any, place: tuple[str, ...], depth: int = 0) -> Any:
        """Return ``value``, found at the keys ``place``, with its references filled in."""
        self.expanded += 1 + (len(value) if isinstance(value, str) else 0)
        if self.expanded > MAX_EXPANDED:
            raise InputError(f"its references stand for more than {MAX_EXPANDED >> 20} million characters")
        if isinstance(value, Mapping):
            return {key: self.section(inner, (*place, str(key)), depth) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.section(inner, place, depth) for inner in value]
        return self._text(value, place, depth) if isinstance(value, str) else value

    def _text(self, text: str, place: tuple[str, ...], depth: int) -> Any:
        parts, at = [], 0
        while (start := text.find("${", at)) >= 0:
            end = _closing(text, start)
            if end < 0:
                break
            value = self._reference(text[start + 2 : end], place, depth)
            if start == 0 and end == len(text) - 1:
                return value
            parts += [text[at:start], str(value)]
            at = end + 1
        self.expanded += sum(map(len, parts))
        return "".join([*parts, text[at:]])

    def _reference(self, inside: str, place: tuple[str, ...], depth: int) -> Any:
        unknown = f"\ue000${{{inside}}}\ue001"
        if depth >= DEEPEST:
            return unknown
        inside = str(self._text(inside, place, depth + 1)) if "${" in inside else inside
        name, is_call, rest = inside.partition(":")
        if is_call:
            return self._call(name.strip(), [part.strip() for part in rest.split(",")], unknown)
        dots = len(name) - len(name.lstrip("."))
        path = name.lstrip(".").split(".")
        keys = [*place[: len(place) - dots], *path] if dots else path
        value: Any = self.values
        for key in keys:
            if not isinstance(value, Mapping) or key not in value:
                return unknown
            value = value[key]
        return self.section(value, tuple(keys), depth + 1)

    def _call(self, name: str, arguments: list[str], unknown: str) -> Any:
        if name == "oc.env":
            default = arguments[1] if len(arguments) > 1 else unknown
            return self.variables.get(arguments[0], default)
        try:
            result = _FUNCTIONS[name](*(float(argument) for argument in arguments))
        except (KeyError, ValueError, TypeError, ZeroDivisionError):
            return unknown
        return int(result) if math.isfinite(result) and result == int(result) else result


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"\$\{|\}").finditer(text, start):
        depth += 1 if match[0] == "${" else -1
        if depth == 0:
            return match.start()
    return -1


CORE, FSDP = "policy.megatron_cfg", "policy.dtensor_cfg"
GENERATION, ENGINE = "policy.generation", "policy.generation.vllm_cfg"

DEFAULTS: dict[str, Any] = {
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.max_num_epochs": 1,
    "grpo.seed": 42,
    "grpo.val_period": 10,
    "grpo.val_num_generations_per_prompt": 1,
    "grpo.adv_estimator.name": "grpo",
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.adv_estimator.minus_baseline": True,
    "grpo.dynamic_sampling_max_gen_batches": 10,
    "grpo.batch_multiplier": 1,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.token_level_loss": True,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "policy.max_grad_norm": 1.0,
    "policy.train_micro_batch_size": 1,
    "data.shuffle": True,
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 8,
    f"{GENERATION}.backend": "vllm",
    f"{GENERATION}.temperature": 1.0,
    f"{GENERATION}.top_p": 1.0,
    f"{GENERATION}.colocated.enabled": True,
    f"{ENGINE}.tensor_parallel_size": 1,
    f"{ENGINE}.gpu_memory_utilization": 0.6,
    f"{CORE}.tensor_model_parallel_size": 1,
    f"{CORE}.pipeline_model_parallel_size": 1,
    f"{CORE}.context_parallel_size": 1,
    f"{CORE}.expert_model_parallel_size": 1,
    f"{CORE}.recompute_granularity": "full",
    "checkpointing.enabled": True,
    "checkpointing.save_period": 10,
    "checkpointing.checkpoint_dir": "results/grpo",
}
"""NeMo-RL's values of the keys that the rules read, where no file says them."""

EFFECTS = [
    (r"policy\.megatron_cfg\.(optimizer|scheduler)\..*|policy\.(optimizer|scheduler).*", ""),  # of the other backend
    (r"policy\.tokenizer\..*|policy\.generation_batch_size|policy\.logprob_.*|policy\.precision", ""),
    (r"policy\.(make_sequence_length_divisible_by|offload_optimizer_for_logprob)", ""),
    (r"policy\.hf_config_overrides\..*", "the checkpoint's config.json is taken as it is"),
    (r"policy\.(dynamic_batching|sequence_packing)\..*|policy\.draft\..*|policy\.hf_overrides.*", ""),
    (r"grpo\.(max_rollout_turns|max_val_samples|val_batch_size|val_at_end|val_start_at|debug_.*|skip_.*)", ""),
    (r"grpo\.(reward_scaling|reward_shaping|async_grpo|adv_estimator)\..*|reward_penalties\..*", ""),  # while off
    (r"grpo\.(batch_multiplier|dynamic_sampling_max_gen_batches|overlong_filtering|stop_at_.*)", ""),
    (r"loss_fn\.(kl_.*|reference_policy_kl_type|use_on_policy_kl_approximation|use_kl_in_reward)", ""),  # with the KL
    (r"loss_fn\.(truncated_importance_sampling_.*|force_on_policy_ratio)", ""),
    (r"checkpointing\.(metric_name|higher_is_better|checkpoint_must_save_by|model_save_format|save_.*)", ""),
    (r"logger\.num_val_samples_to_print", "samples.jsonl in the run directory holds sampled texts"),
    (r"logger\.num_val_samples_to_print", "samples.jsonl in the run directory holds sampled texts"),
    (r"logger\..*|env\.\w+\.num_workers|data\.num_workers|data\.use_multiple_dataloader|data_plane\..*", ""),
    (r"cluster\..*|on_policy_distillation|fault_tolerance\..*", ""),
    (r"data\.(default|train|validation)\.(processor|env_name|seed|split_validation_size)", ""),
    (r"env\..*", "rewards are those of reward.name"),
    (
        r"grpo\.(seq_logprob_error_threshold|.*_advantage)",
        "such tokens and sequences are learned from as others; objective.correction has masks",
    ),
    (r"policy\.generation\.(mcore_generation_config|refit_.*|real_quant_.*|port_range_.*|sglang_.*|trtllm_.*).*", ""),
    (r"policy\.generation\.(stop_strings|stop_token_ids)", "a response ends with the model's own tokens"),
    (r"policy\.generation\.colocated\..*", ""),
    (
        r"policy\.generation\.vllm_cfg\.(expert|pipeline)_parallel_size",
        "an engine's experts are cut like its other matrices (rollout.tensor_parallel)",
    ),
    (r"policy\.generation\.vllm_cfg\.(max_model_len|async_engine|precision|use_tqdm|.*metrics_logger.*|.*port.*)", ""),
    (r"policy\.generation\.(vllm_cfg|vllm_kwargs)\..*", "the engine is used without it"),
    (r"policy\.megatron_cfg\.(sequence_parallel|pipeline_dtype|checkpoint\..*|force_.*|empty_.*|use_gloo_.*)", ""),
    (
        r"policy\.megatron_cfg\.(apply_rope_fusion|.*_fusion|cuda_graph_.*|distributed_data_parallel_.*|attention_.*)",
        "",
    ),
    (
        r"policy\.megatron_cfg\.(moe_(grouped|permute|enable|token|shared|per|router_load|router_bias).*|train_iters|env_vars.*)",
        "",
    ),
    (r"policy\.megatron_cfg\.moe_router_dtype", ""),  # of a dense model
    (r"policy\.megatron_cfg\.freeze_moe_router", "the router learns, too"),
    (r"policy\.megatron_cfg\.(mtp_.*|peft\..*|fp8_cfg\..*|recompute_modules|recompute_granularity)", ""),
    (r"policy\.megatron_cfg\.(fused_linear_.*|offload_modules|use_fused_weighted_.*|optimizer_.*|defer_.*)", ""),
    (r"policy\.megatron_cfg\.num_layers_in_.*", "stages of the pipeline have the same number of layers"),
    (r"policy\.megatron_cfg\.model_overrides\..*", "this project sets Megatron's fields"),
    (r"policy\.dtensor_cfg\.(_v2|lora_cfg\..*)", ""),
    (r"policy\.dtensor_cfg\..*", "there is no FSDP; learner.parallel says how the model is cut"),
    (r"policy\.megatron_cfg\..*_parallel_size", ""),  # of the backend that is off
]
"""Keys that no rule reads: a pattern, and what changes without them; "" where nothing does."""


def read_configuration(path: Path, variables: dict[str, str]) -> tuple[dict[str, Any], list[str], set[str]]:
    """Values of NeMo-RL's configuration at ``path`` by dotted keys, notes of the reading, and the keys of ``path``."""
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"{path}: NeMo-RL's configurations are .yaml files; its scripts name one with --config")
    nested, own, files = load_inherited(path)
    if "grpo" not in nested:
        sections = ", ".join(nested) or "nothing"
        raise InputError(f"{path}: no section grpo, and so no reinforcement learning by GRPO; found: {sections}")
    values = flattened(resolved(nested, variables))
    inherited = ", ".join(file.name for file in files[:-1])
    return values, [f"read with what it inherits from: {inherited}"] if inherited else [], set(flattened(own))
