"""Rules between a recipe, its model and the ranks, and the precision contract between learner and rollout engine.

Every function of a rule returns messages that name keys, values found and values allowed; an empty list where nothing
is wrong. `check`, `plan`, the engines and the tools all use them. `recipe` has the rules that need no model.

The precision contract: pi and mu are one policy computed twice. A difference in rounding (dtype, kernel) is mismatch,
which is measured and corrected for. A difference in the function (head or router in fp32 on one side, temperature,
truncation of the vocabulary) makes mu another policy. It is refused unless `precision.allow_asymmetric` allows it.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config import Recipe
from megatron_rl.config.base import FP32_STORED
from megatron_rl.config.learner import ParallelConfig, RoutingConfig
from megatron_rl.config.monitor import AlarmRule
from megatron_rl.config.rollout import CPU_EXPERT_MULTIPLE, CPU_HEAD_DIMS, ON_CUDA, RolloutConfig
from megatron_rl.config.sections import RecipeSections
from megatron_rl.config.teacher_rules import teacher_memory_problems
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture


def refuse_recipe(recipe: RecipeSections, problems: list[str]) -> None:
    """Raise `InputError` with all of ``problems``, if there are any."""
    if problems:
        raise InputError("\n".join([f"recipe {recipe.name}:", *(f"  {problem}" for problem in problems)]))


def model_problems(
    recipe: RecipeSections,
    architecture: Architecture,
    world_size: int | None,
    device: Literal["cpu", "cuda"] | None = None,
) -> list[str]:
    """Why the recipe cannot run with the model on ``world_size`` ranks.

    ``world_size`` and ``device``: None where not known; then only what holds for every value is checked.
    """
    problems = architecture.problems() + layout_problems(recipe.learner.parallel, architecture, world_size)
    problems += rollout_problems(recipe.rollout, architecture, recipe.data.prompt.max_length, world_size, device)
    problems += teacher_memory_problems(recipe) if device == "cuda" else []
    problems += routing_problems(recipe.routing, architecture) + precision_problems(recipe, architecture)
    if recipe.objective.router_shift is not None and (not architecture.is_moe or architecture.sigmoid_router):
        has = "a sigmoid router, whose scores are no probabilities" if architecture.is_moe else "no router"
        problems.append(
            f"objective.router_shift: {recipe.objective.router_shift:g}, but the model ({architecture.model_type}) has "
            f"{has}; use null"
        )
    problems += set_problems(recipe, architecture)
    if recipe.exact.dose is not None and recipe.exact.dose.kind == "router" and not architecture.is_moe:
        problems.append(
            f"exact.noise.kind: router, but the model ({architecture.model_type}) has none; use another kind"
        )
    layers, most = recipe.exact.dose and recipe.exact.dose.layers, architecture.num_layers - 1
    if layers and max(layers) > most:
        problems.append(f"exact.noise.layers: {max(layers)} is not a layer of the model; 0 … {most} are allowed")
    if recipe.rollout.engine == "exact" and (beyond := beyond_exact(architecture, recipe.learner.parallel.tensor)):
        problems.append(f"rollout.engine: exact, but {beyond}, which the exact engine does not compute; use vllm")
    if recipe.learner.lora is not None:
        problems += lora_problems(architecture, recipe.learner.parallel)
    if architecture.is_unscaled_in_fp16 and recipe.rollout.dtype == "fp16":
        problems.append(
            f"rollout.dtype: fp16; vLLM leaves out the factor {architecture.routed_scale:g} by which the experts of "
            f"{architecture.model_type} are multiplied there; use bf16"
        )
    problems += latent_attention_problems(recipe, architecture) + sink_problems(recipe, architecture)
    return problems + delta_net_problems(recipe, architecture)


def beyond_exact(architecture: Architecture, tensor: int) -> str | None:
    """Return what the model has that the exact engine does not compute on ``tensor`` tensor-parallel ranks, as a
    clause; None where it computes all."""
    a = architecture
    if a.wide_qk_norm and tensor > 1:
        return (
            f"{a.model_type} has norms over all heads, of which learner.parallel.tensor: {tensor} gives a rank a part"
        )
    if a.has_sinks:
        return f"the model ({a.model_type}) has attention sinks and windows"
    if a.linear is not None:
        return f"the model ({a.model_type}) has gated delta nets, and a gate on attention's output"
    if a.sigmoid_router:
        return f"the model ({a.model_type}) has a sigmoid router"
    if a.rotary_fraction != 1:
        return f"the model ({a.model_type}) has rotary embeddings of a part of each head"
    return f"the model ({a.model_type}) has latent attention" if a.latent is not None else None


def smallest_world(parallel: ParallelConfig, rollout: RolloutConfig) -> int:
    """The number of ranks that every number of ranks of this layout is a multiple of."""
    engine = rollout.tensor_parallel if rollout.engine != "vllm_server" else 1
    experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
    return math.lcm(parallel.tensor * parallel.pipeline * parallel.context, experts, engine)


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the layers of each pipeline stage. Where they do not divide, the first and the last stage, which have the
    tables, have fewer."""
    most = -(-layers // stages)
    missing = most * stages - layers
    return [most - (missing + 1) // 2 * (i == 0) - missing // 2 * (i == stages - 1) for i in range(stages)]


def set_problems(recipe: RecipeSections, architecture: Architecture) -> list[str]:
    """Why the model does not have so many tokens at each place; empty where it has."""
    sets = {"rollout.sampled_head": recipe.rollout.sampled_head}
    sets |= {} if recipe.teacher is None else {"teacher.top_k": recipe.teacher.top_k}
    return [
        f"{key}: {number}, but the model has {architecture.vocab_size} tokens; use fewer"
        for key, number in sets.items()
        if number > architecture.vocab_size
    ]


def layout_problems(parallel: ParallelConfig, architecture: Architecture, world_size: int | None) -> list[str]:
    """Why this layout cannot hold the model; empty where it can. ``world_size`` None: not known yet."""
    a, problems = architecture, []

    def must_divide(size: int, what: str, number: int, key: str) -> None:
        if number % size:
            fits = [n for n in (1, 2, 4, 8, 16, 32, 64) if number % n == 0]
            problems.append(f"learner.parallel.{key}: {size} does not divide {what} ({number}); try one of {fits}")

    must_divide(parallel.tensor, "the number of attention heads", a.num_heads, "tensor")
    must_divide(parallel.tensor, "the number of key/value heads", a.num_kv_heads, "tensor")
    if a.linear is not None:  # context-parallel ranks share its heads out, not its tokens
        size, what = parallel.tensor * parallel.context, "the key heads of delta nets (linear_num_key_heads)"
        must_divide(size, what, a.linear.key_heads, "tensor · context" if parallel.context > 1 else "tensor")
    if min(layers := stage_layers(a.num_layers, parallel.pipeline)) < 1:
        most = max(n for n in range(1, parallel.pipeline) if min(stage_layers(a.num_layers, n)) > 0)
        problems.append(
            f"learner.parallel.pipeline: {parallel.pipeline} stages of up to {max(layers)} of {a.num_layers} layers "
            f"leave the first or the last without one; {most} is the largest that leaves none"
        )
    if a.is_moe:
        must_divide(parallel.expert, "the number of experts", a.num_experts, "expert")
        must_divide(parallel.expert_tensor, "the width of an expert", a.moe_ffn_hidden_size, "expert_tensor")
    elif parallel.expert > 1 or parallel.expert_tensor > 1:
        problems.append(f"learner.parallel.expert: {parallel.expert}, but {a.model_type} has no experts; use 1")
    if parallel.context > 1 and (a.latent is not None or a.has_sinks):
        kind = "latent attention" if a.latent is not None else "attention sinks"
        problems.append(
            f"learner.parallel.context: {parallel.context}, but the model ({a.model_type}) has {kind}; use 1"
        )
    if a.is_moe and a.linear_bias and parallel.expert_tensor > 1:
        problems.append(
            f"learner.parallel.expert_tensor: {parallel.expert_tensor}, but the experts of {a.model_type} have biases, "
            "which are not cut; use 1, and spread experts by learner.parallel.expert"
        )
    if world_size is not None:
        for size, key in (
            (parallel.tensor * parallel.pipeline * parallel.context, "tensor · pipeline · context"),
            (parallel.expert * parallel.expert_tensor * parallel.pipeline, "expert · expert_tensor · pipeline"),
        ):
            if world_size % size:
                problems.append(f"learner.parallel: {key} = {size} does not divide the number of ranks ({world_size})")
    return problems


def rollout_problems(
    rollout: RolloutConfig,
    architecture: Architecture,
    max_prompt_length: int,
    world_size: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
) -> list[str]:
    """Why the `rollout` section cannot serve the model; empty where it can. None: not known yet, and not checked."""
    problems = []
    total, limit = max_prompt_length + rollout.max_response_length, architecture.max_position_embeddings
    if total > limit:
        problems.append(
            f"rollout.max_response_length: prompts of up to {max_prompt_length} tokens (data.prompt.max_length) "
            f"plus responses of up to {rollout.max_response_length} make {total}, but the model's "
            f"max_position_embeddings is {limit}; lower one of the two"
        )
    size, heads, keys = rollout.tensor_parallel, architecture.num_heads, architecture.num_kv_heads
    if heads % size:
        problems.append(f"rollout.tensor_parallel: {size} does not divide the {heads} attention heads")
    elif architecture.latent is None and keys % size and size % keys:  # vLLM copies heads to several GPUs
        problems.append(
            f"rollout.tensor_parallel: {size} neither divides the {keys} key/value heads nor is a multiple of them"
        )
    if architecture.linear is not None and architecture.linear.key_heads % size:
        problems.append(
            f"rollout.tensor_parallel: {size} does not divide the {architecture.linear.key_heads} key heads of delta "
            "nets (linear_num_key_heads)"
        )
    in_ranks = rollout.engine != "vllm_server"
    if in_ranks and world_size is not None and world_size % rollout.tensor_parallel:
        problems.append(f"rollout.tensor_parallel: {rollout.tensor_parallel} does not divide the {world_size} ranks")
    too_high = [token for token in rollout.stop_token_ids or [] if token >= architecture.vocab_size]
    if too_high:
        problems.append(
            f"rollout.stop_token_ids: {too_high} are outside the vocabulary (0 … {architecture.vocab_size - 1})"
        )
    at_once = rollout.max_num_batched_tokens
    if at_once is not None and rollout.engine != "exact":
        if at_once < rollout.max_num_seqs:
            problems.append(
                f"rollout.max_num_batched_tokens: {at_once} is below rollout.max_num_seqs ({rollout.max_num_seqs}): a "
                "step computes a token of each running response; raise the one, or lower the other"
            )
        if device == "cpu" and at_once < total:
            problems.append(
                f"rollout.max_num_batched_tokens: {at_once} is below the {total} tokens of the longest sequence, and "
                "vLLM on a CPU computes a prompt in one step; raise it, or remove it"
            )
    if device is None:
        return problems
    return problems + (cpu_problems if device == "cpu" else cuda_problems)(rollout, architecture)


def cuda_problems(rollout: RolloutConfig, architecture: Architecture) -> list[str]:
    """Rounding that vLLM on CUDA cannot do again at every weight update."""
    wanted, problems = rollout.quantization, []
    if wanted.weights in ("int8", "int4"):
        problems.append(
            f"rollout.quantization.weights: {wanted.weights} on CUDA, where vLLM rounds linear layers and experts "
            "to fp8 alone while it loads; use fp8, or runtime.device cpu"
        )
    elif wanted.weights is not None:
        if wanted.of_weights not in ON_CUDA:
            problems.append(
                f"rollout.quantization.block: {wanted.block}; vLLM on CUDA has [128, 128], [1, null] and [null, null]"
            )
        if rollout.dtype in FP32_STORED:
            problems.append(
                f"rollout.dtype: {rollout.dtype} with rollout.quantization.weights; vLLM's fp8 kernels on CUDA "
                "give bf16 or fp16"
            )
        width = architecture.moe_ffn_hidden_size // rollout.tensor_parallel
        padded = architecture.is_moe and (width % 128 or architecture.hidden_size % 128)
        if wanted.of_weights == (128, 128) and padded:
            problems.append(
                f"rollout.tensor_parallel: {rollout.tensor_parallel} leaves experts of {architecture.hidden_size} × "
                f"{width}, which rollout.quantization.block [128, 128] does not divide: vLLM would pad them and hold "
                "those of all layers in full until an update ends; use another tensor_parallel, or block [1, null]"
            )
    at_once, block = rollout.max_num_batched_tokens, architecture.linear and state_block(rollout, architecture)
    if at_once and block and at_once < block and not rollout.enforce_eager:
        problems.append(
            f"rollout.max_num_batched_tokens: {at_once} is below a delta net's block of {block} tokens: vLLM may take "
            f"the first token of a prompt for a step of decoding; use {block}, or remove it"
        )
    return problems


def state_block(rollout: RolloutConfig, a: Architecture) -> int:
    """The tokens of a block of vLLM's cache on CUDA: as many as take the bytes of a delta net's state."""
    size, (keys, _, values, *_) = 4 if rollout.dtype in FP32_STORED else 2, a.linear.sections
    state = 4 * values * a.linear.key_width + (a.linear.kernel - 1) * (2 * keys + values) * size
    token = 2 * max(1, a.num_kv_heads // rollout.tensor_parallel) * a.head_dim * size
    return 16 * math.ceil(state / rollout.tensor_parallel / token / 16)


def cpu_problems(rollout: RolloutConfig, architecture: Architecture) -> list[str]:
    """What vLLM lacks on a CPU: shapes that its kernels do not have, and an fp8 cache without AVX-512."""
    problems = []
    if rollout.quantization.kv_cache is not None and not _has_fp8_cache():
        problems.append(
            f"rollout.quantization.kv_cache: {rollout.quantization.kv_cache}; vLLM on an x86 CPU has it only with "
            "AVX-512 or AMX, and this processor has neither; leave kv_cache out, or use another machine"
        )
    if rollout.quantization.kv_cache is not None and architecture.head_dim % 32:
        problems.append(
            f"rollout.quantization.kv_cache: fp8 with a head_dim of {architecture.head_dim}; vLLM on a CPU has it for "
            "multiples of 32"
        )
    if architecture.head_dim not in CPU_HEAD_DIMS:
        problems.append(
            f"model.path: head_dim is {architecture.head_dim}; vLLM on a CPU has attention for {CPU_HEAD_DIMS}"
        )
    if architecture.latent is not None and architecture.latent.rank + architecture.latent.rotary_width != 576:
        problems.append(
            f"model.path: kv_lora_rank {architecture.latent.rank} and qk_rope_head_dim "
            f"{architecture.latent.rotary_width}; vLLM on a CPU has latent attention for 576 together"
        )
    if (linear := architecture.linear) is not None and rollout.dtype == "bf16":
        widths = (linear.key_width, linear.value_width)
        if widths not in ((64, 64), (128, 128)):
            problems.append(
                f"rollout.dtype: bf16 with delta nets of linear_key_head_dim {widths[0]} and linear_value_head_dim "
                f"{widths[1]}; vLLM on a CPU has them in bf16 for 64 and 64, or 128 and 128; use fp32 or fp16"
            )
    if (architecture.moe_ffn_hidden_size // rollout.tensor_parallel) % CPU_EXPERT_MULTIPLE:
        problems.append(
            f"model.path: experts are {architecture.moe_ffn_hidden_size} wide over rollout.tensor_parallel "
            f"{rollout.tensor_parallel}; vLLM on a CPU can update expert weights only in multiples of "
            f"{CPU_EXPERT_MULTIPLE} (it pads others after loading)"
        )
    return problems


def _has_fp8_cache() -> bool:
    """As vLLM's attention for CPUs decides it. True where no torch is installed to ask: nothing will run there."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        import torch  # seconds to import
    except ModuleNotFoundError:
        return True
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def routing_problems(routing: RoutingConfig, architecture: Architecture) -> list[str]:
    """Why the `routing` section cannot be used with the model; empty where it can."""
    if routing.is_on and not architecture.is_moe:
        key = f"routing.replay: {routing.replay}" if routing.replay != "off" else "routing.telemetry: true"
        return [f"{key}, but the model ({architecture.model_type}) has no experts; remove it for a dense model"]
    if routing.bias_update_rate and not architecture.sigmoid_router:
        return [
            f"routing.bias_update_rate: {routing.bias_update_rate:g}, but the routers of {architecture.model_type} "
            "have no biases by which they choose; use 0"
        ]
    return []


def lora_problems(architecture: Architecture, parallel: ParallelConfig) -> list[str]:
    """Why adapters cannot be used; empty where they can."""
    if architecture.is_moe and parallel.expert_tensor > 1:
        return [
            f"learner.lora: with learner.parallel.expert_tensor {parallel.expert_tensor}; adapters of one expert are "
            "not cut, use expert_tensor: 1 and spread experts by learner.parallel.expert"
        ]
    return []


def latent_attention_problems(recipe: RecipeSections, architecture: Architecture) -> list[str]:
    """What is not built for latent attention; empty where the recipe asks for none of it."""
    if architecture.latent is None:
        return []
    has = f"the model ({architecture.model_type}) has latent attention"
    problems = []
    if recipe.rollout.quantization.kv_cache is not None:
        problems.append(f"rollout.quantization.kv_cache: {recipe.rollout.quantization.kv_cache}, but {has}; use null")
    if recipe.rollout.quantization.weights is not None:
        problems.append(
            f"rollout.quantization.weights: {recipe.rollout.quantization.weights}, but {has}, whose matrices vLLM "
            "multiplies with each other after they are loaded; use null"
        )
    return problems


def sink_problems(recipe: RecipeSections, architecture: Architecture) -> list[str]:
    """What is not built for attention sinks and experts with biases; empty where the recipe asks for none of it."""
    if not architecture.has_sinks:
        return []
    has = f"the model ({architecture.model_type}) has attention sinks"
    rollout, problems = recipe.rollout, []
    if rollout.dtype != "bf16":
        problems.append(f"rollout.dtype: {rollout.dtype}, but {has}, which vLLM's attention takes in bf16; use bf16")
    for key in ("weights", "kv_cache"):
        if (value := getattr(rollout.quantization, key)) is not None:
            problems.append(f"rollout.quantization.{key}: {value}, but {has}; use null")
    return problems


def delta_net_problems(recipe: RecipeSections, architecture: Architecture) -> list[str]:
    """What is not built for gated delta nets; empty where the recipe asks for none of it."""
    if architecture.linear is None:
        return []
    quantization = recipe.rollout.quantization
    return [
        f"rollout.quantization.{key}: {value}, but the model ({architecture.model_type}) has gated delta nets; use null"
        for key, value in (("weights", quantization.weights), ("kv_cache", quantization.kv_cache))
        if value is not None
    ]


def precision_problems(recipe: RecipeSections, architecture: Architecture) -> list[str]:
    """Differences that make mu another policy than pi, in the recipe's keys; empty where there are none."""
    rollout, precision = recipe.rollout, recipe.precision
    asked_by = {"precision": precision.fp32_router or precision.rollout_router}
    asked_by["scoring"] = recipe.scoring is not None and recipe.scoring.fp32_router
    problems = [
        f"{key}.fp32_router: true, but the model ({architecture.model_type}) has no router; use false"
        for key, is_on in asked_by.items()
        if is_on and not architecture.is_moe
    ]
    asked = precision.fp32_router and precision.rollout_router
    if architecture.router_in_fp32 and not asked and {recipe.learner.dtype, rollout.dtype} != {"fp32"}:
        problems.append(
            f"precision.fp32_router: false, but vLLM computes the router of {architecture.model_type} in fp32 whatever "
            "rollout.dtype is; use true, for the rollout too"
        )
    if precision.allow_asymmetric or rollout.kept_sets:
        return problems
    if rollout.top_p < 1.0:
        problems.append(
            f"rollout.top_p: {rollout.top_p} cuts the tail off mu but not off pi, a mismatch that no correction "
            "removes; use 1.0 for training, rollout.kept_sets: true for a pi over what mu keeps, or "
            "precision.allow_asymmetric: true for an ablation"
        )
    if rollout.top_k > 0:
        problems.append(
            f"rollout.top_k: {rollout.top_k} cuts mu but not pi; use 0 (off) for training, rollout.kept_sets: true, or "
            "precision.allow_asymmetric: true for an ablation"
        )
    return problems


# Most that two engines with the same weights may differ by in a run's first step: the mean of |po − mu|, by the coarser
# of their types. Rounding moves a log-prob by a multiple of the type's unit (2^-24, 2^-11, 2^-8), more where a router's
# choice flips; docs/precision.md ("The first step") has what was measured. The bounds leave a factor of 50 to 100 for
# depth. Engines with different functions differ by tenths.
FIRST_STEP_BOUNDS = {"fp32": 1e-3, "tf32": 0.02, "fp16": 0.02, "bf16": 0.1, "fp8": 0.2, "int8": 0.2, "int4": 0.4}

_BY_DEVICE = "by device"  # `confirm_contract` fills it in when the engines run


@dataclass(frozen=True)
class ContractRow:
    """One aspect, on both sides. ``verdict``: same | rounding | policy (another function)."""

    aspect: str
    learner: str
    rollout: str
    verdict: str

    def __str__(self) -> str:
        return f"learner {self.learner} · rollout {self.rollout} · {self.verdict}"


def contract(recipe: Recipe, architecture: Architecture) -> list[ContractRow]:
    """The contract as the recipe states it; no engine needed."""
    precision, rollout = recipe.precision, recipe.rollout
    learner_dtype, rollout_dtype = recipe.learner.dtype, rollout.dtype

    def fp32_where(asked_learner: bool, asked_rollout: bool, aspect: str) -> ContractRow:
        left, right = "fp32" if asked_learner else learner_dtype, "fp32" if asked_rollout else rollout_dtype
        if asked_learner != asked_rollout and left != right:
            return ContractRow(aspect, left, right, "policy")
        return ContractRow(aspect, left, right, "same" if left == right else "rounding")

    def cut(aspect: str, off: str, value: str) -> ContractRow:
        is_same = value == off or rollout.kept_sets
        return ContractRow(aspect, value if rollout.kept_sets else off, value, "same" if is_same else "policy")

    rows = [
        ContractRow("dtype", learner_dtype, rollout_dtype, "same" if learner_dtype == rollout_dtype else "rounding"),
        fp32_where(precision.fp32_head, precision.rollout_head, "head"),
    ]
    if architecture.is_moe:
        rows.append(fp32_where(precision.fp32_router, precision.rollout_router, "router"))
    if rollout.quantization.weights is not None:
        words, same = rollout.quantization.words, recipe.learner.quantization is not None
        rows.append(ContractRow("weights", words if same else learner_dtype, words, "same" if same else "rounding"))
    if rollout.quantization.kv_cache is not None:
        rows.append(ContractRow("kv cache", learner_dtype, rollout.quantization.kv_cache, "rounding"))
    rows += [
        ContractRow("attention", _BY_DEVICE, _BY_DEVICE, "rounding"),
        ContractRow("rope", "Megatron, unfused", _BY_DEVICE, "rounding"),
        ContractRow("activation", "Megatron, unfused", _BY_DEVICE, "rounding"),
        # The learner divides its logits by the rollout section's temperature: there is no second key to disagree.
        ContractRow("temperature", f"{rollout.temperature:g}", f"{rollout.temperature:g}", "same"),
        ContractRow("log-probs", "after temperature", "after temperature", "same"),
        cut("top-p", "1", f"{rollout.top_p:g}"),
        cut("top-k", "off", str(rollout.top_k or "off")),
    ]
    return rows


def confirm_contract(stated: list[ContractRow], learner: dict[str, str], rollout: dict[str, str]) -> list[ContractRow]:
    """The contract as the started engines keep it.

    Args:
        stated: from `contract`.
        learner, rollout: aspect → what the engine does, from `Learner.describe_precision` and the generator.

    Raises:
        InputError: an engine does something else than the recipe states where that changes the policy or the dtype.
    """
    rows, broken = [], []
    for row in stated:
        described = {"learner": learner.get(row.aspect, row.learner), "rollout": rollout.get(row.aspect, row.rollout)}
        for side, value in described.items():
            promised = getattr(row, side)
            if value != promised and row.aspect not in ("attention", "rope", "activation"):
                broken.append(f"{row.aspect}: the {side} engine uses {value}, the recipe says {promised}")
        rows.append(ContractRow(row.aspect, described["learner"], described["rollout"], row.verdict))
    if broken:
        raise InputError("precision contract: " + "; ".join(broken))
    return rows


def first_step_alarms(recipe: Recipe, architecture: Architecture) -> list[AlarmRule]:
    """Rules that end a run whose first step has more mismatch than rounding in the contract's types explains.

    Empty where the recipe asks for another mismatch: a dose (`exact.noise`), or a row of the contract that says policy.
    Also where mu is compared with pi after earlier updates of the batch, because there is no pass for po. In fp32 on
    both sides mismatch/rho_std is bounded too. A rule of the same name in `monitor.alarms` takes the place of one of
    these.
    """
    if recipe.exact.dose is not None or any(row.verdict == "policy" for row in contract(recipe, architecture)):
        return []
    if recipe.batch.minibatches > 1 and not recipe.makes_old_logprobs:
        return []
    weights = None if recipe.learner.quantization is not None else recipe.rollout.quantization.weights
    rounded = [weights, recipe.rollout.quantization.kv_cache]
    types = {recipe.learner.dtype, recipe.rollout.dtype, *(name for name in rounded if name is not None)}
    coarsest = max(types, key=list(FIRST_STEP_BOUNDS).index)
    metrics = {"first-step-difference": "training/rollout_probs_diff_mean"}
    if coarsest == "fp32":
        metrics["first-step-mismatch"] = "mismatch/rho_std"
    bound = FIRST_STEP_BOUNDS[coarsest]
    return [AlarmRule(name=name, metric=metric, above=bound, then=["warn", "stop"]) for name, metric in metrics.items()]
