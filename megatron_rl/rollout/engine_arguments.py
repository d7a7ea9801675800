"""From the `rollout` section of a recipe to vLLM's own arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megatron_rl.config.rollout import ON_CUDA, QuantizationConfig, RolloutConfig
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.model.families import FAMILIES
from megatron_rl.rollout import route_store

VLLM_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
CPU_KV_CACHE_GIB = 0.25
# Half of vLLM's own block on a CPU: tokens of short responses lie closer together in memory.
CPU_BLOCK_TOKENS = 64
GIB = 1 << 30
Device = Literal["cpu", "cuda"]


def runs_eagerly(config: RolloutConfig, device: Device) -> bool:
    return device == "cpu" if config.enforce_eager is None else config.enforce_eager


def engine_arguments(
    config: RolloutConfig,
    model_path: Path,
    device: Device,
    max_prompt_length: int,
    *,
    record_routes: bool,
    sleeps: bool = True,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`. Imports vLLM (the worker extension registers itself on import).

    ``sleeps``: whether an engine on a GPU can give its memory back. Such an engine is the only one of its process.
    """
    from megatron_rl.rollout.worker_extension import STREAM_BACKEND

    architecture = read_architecture(model_path)
    family = FAMILIES[architecture.model_type]
    family.register()

    keeps_cache = record_routes and route_store.has_store()
    kv_cache_gib = config.kv_cache_gib or (CPU_KV_CACHE_GIB if device == "cpu" else None)
    in_a_world = dist.is_initialized() and dist.get_world_size() > 1
    arguments = {
        "model": str(model_path),
        "dtype": VLLM_DTYPE[config.dtype],
        "max_model_len": max_prompt_length + config.max_response_length,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "external_launcher" if in_a_world else None,
        "kv_cache_memory_bytes": int(kv_cache_gib * GIB) if kv_cache_gib else None,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": runs_eagerly(config, device),
        "enable_prefix_caching": True,
        "enable_return_routed_experts": record_routes,
        "logprobs_mode": "processed_logprobs",  # log mu of what was sampled from, also under temperature, top-p, top-k
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # the recipe says how to sample, not a file beside the weights
        "seed": config.seed,
        "weight_transfer_config": {"backend": STREAM_BACKEND},
        "worker_extension_cls": "megatron_rl.rollout.worker_extension.WorkerExtension",
        "hf_overrides": {"architectures": [family.hf_class]},  # the part that reads text, of a model that reads more
    }
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    if config.kept_sets or config.sampled_head:
        arguments["max_logprobs"] = config.candidates or config.sampled_head
    if device == "cpu":  # vLLM's CPU sampler cannot resume a seeded request whose prompt was cut into chunks
        arguments["enable_chunked_prefill"] = False
        arguments["block_size"] = CPU_BLOCK_TOKENS
        # Only whole blocks are shared: with shorter prompts the cache is book-keeping alone, a twentieth of a step.
        arguments["enable_prefix_caching"] = max_prompt_length >= CPU_BLOCK_TOKENS or keeps_cache
        if architecture.latent is not None:  # on a processor with AMX vLLM takes another, which has no fp32 and no fp16
            arguments["attention_backend"] = "CPU_MLA"
        if runs_eagerly(config, device):
            from megatron_rl.rollout.cpu_engine import PRIORITY

            arguments["kernel_config"] = {"ir_op_priority": PRIORITY}
    else:
        arguments["enable_sleep_mode"] = sleeps
        is_plain = architecture.latent is None and not architecture.has_sinks
        arguments |= kernels_on_cuda(config, has_plain_attention=is_plain) | sums_on_cuda(config)
    arguments |= quantization_arguments(config.quantization, device)
    return arguments if architecture.linear is None else arguments | delta_net_arguments(architecture, config, device)


def delta_net_arguments(architecture: Architecture, config: RolloutConfig, device: Device) -> dict[str, Any]:
    """How gated delta nets run. Makes vLLM know what it lacks for them in this process.

    Left to itself, vLLM has the states of Qwen3-Next in the engine's dtype, and on Hopper FlashInfer's kernel for
    prompts, which is compiled with nvcc. On a CPU it cannot begin with cached blocks: mamba mode `align` needs chunked
    prefill, without which no seeded request is cut there.
    """
    from megatron_rl.rollout import delta_net

    if FAMILIES[architecture.model_type].wrapper is not None:
        delta_net.register_text_model(on_cpu=device == "cpu")
    if runs_eagerly(config, device) or device == "cpu":
        delta_net.tell_prompts_apart()
    if device == "cpu":
        delta_net.install()
    own = {"enable_prefix_caching": False} if device == "cpu" else {"gdn_prefill_backend": "triton"}
    return {"mamba_ssm_cache_dtype": "float32", **own}


def kernels_on_cuda(config: RolloutConfig, has_plain_attention: bool = True) -> dict[str, Any]:
    """Which of vLLM's kernels compute experts and attention: those that it takes by itself on A100 and H100.

    On Blackwell it would take FlashInfer's. Those of experts want bf16 and refuse to start in fp16 and fp32; those of
    attention are compiled with a CUDA toolkit, or fetched from NVIDIA's server, when they are first needed. Experts
    and caches that are quantized are left to vLLM, and so is attention in fp32, which FlashAttention does not have, and
    latent attention and attention with sinks, which have backends of their own (``has_plain_attention`` false).
    """
    arguments = {}
    if config.quantization.weights is None:
        arguments["moe_backend"] = "triton"
    if config.quantization.kv_cache is None and config.dtype in ("bf16", "fp16") and has_plain_attention:
        arguments["attention_backend"] = "FLASH_ATTN"
    return arguments


def sums_on_cuda(config: RolloutConfig) -> dict[str, Any]:
    """How the ranks of an engine add up their parts: as `rollout.all_reduce` says, with `process_state.choose_kernels`.

    Left to itself, vLLM 0.30 fuses a sum with the norm after it where it finds FlashInfer and nvcc (config/vllm.py:
    enable_allreduce_rms_fusion), and measures FlashInfer's kernels to choose among them.
    """
    return {
        "disable_custom_all_reduce": config.all_reduce == "nccl",
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
        "kernel_config": {"enable_flashinfer_autotune": False},
    }


def quantization_arguments(wanted: QuantizationConfig, device: Device) -> dict[str, Any]:
    """What makes vLLM round: its own quantization while loading on CUDA, ours on a CPU. Empty where nothing is."""
    arguments: dict[str, Any] = {}
    if wanted.kv_cache is not None:
        arguments["kv_cache_dtype"] = wanted.kv_cache
    if wanted.weights is not None:
        from megatron_rl.rollout.precision import KEPT_LAYERS, ROUNDED, ROUNDING_KEY

        if device == "cpu":
            arguments |= {"quantization": ROUNDED, "additional_config": {ROUNDING_KEY: wanted.model_dump(mode="json")}}
        else:
            arguments["quantization"] = ON_CUDA[wanted.of_weights]
            arguments["quantization_config"] = {"ignore": list(KEPT_LAYERS)}
    return arguments
