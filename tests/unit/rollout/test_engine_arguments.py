"""What the engines on GPUs are started with exists in vLLM under that name."""

import dataclasses

import pytest
import torch

from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.engine_arguments import VLLM_DTYPE, engine_arguments
from megatron_rl.rollout.servers.rendezvous import server_arguments
from tests.support.families import save_family
from tests.support.tiny import MODEL


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("place", ["beside the learner", "server"])
def test_arguments_on_cuda_are_vllms(place, tensor_parallel):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers import cli_args

    config = RolloutConfig(tensor_parallel=tensor_parallel)
    if place == "server":
        arguments = server_arguments(config, MODEL, "cuda", 16, record_routes=True, precision=PrecisionConfig())
        assert "enable_sleep_mode" not in arguments
    else:
        arguments = engine_arguments(config, MODEL, "cuda", 16, record_routes=True)
        assert arguments["enable_sleep_mode"] is True
        awake = engine_arguments(config, MODEL, "cuda", 16, record_routes=True, sleeps=False)
        assert awake == arguments | {"enable_sleep_mode": False}
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if place == "server":  # the launcher's own, beside the engine's
        known |= {f.name for c in vars(cli_args).values() if dataclasses.is_dataclass(c) for f in dataclasses.fields(c)}
    assert set(arguments) - known == set()
    engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    made = AsyncEngineArgs(**{name: value for name, value in arguments.items() if name in engine})
    assert made.enable_return_routed_experts is True
    assert made.enforce_eager is False
    assert made.kv_cache_memory_bytes is None, "the cache is what gpu_memory_utilization leaves"
    assert "block_size" not in arguments, "that of a CPU"


def test_tokens_of_a_step_are_vllms_choice_or_the_recipes():
    assert "max_num_batched_tokens" not in engine_arguments(RolloutConfig(), MODEL, "cuda", 16, record_routes=False)
    for device in ("cpu", "cuda"):
        own = engine_arguments(RolloutConfig(max_num_batched_tokens=4096), MODEL, device, 16, record_routes=False)
        assert own["max_num_batched_tokens"] == 4096


@pytest.mark.parametrize(
    ("block", "name"), [(None, "fp8_per_block"), ([1, None], "fp8_per_channel"), ([None, None], "fp8_per_tensor")]
)
@pytest.mark.parametrize("place", ["beside the learner", "server"])
def test_rounding_is_vllms_own_on_cuda(place, block, name):
    """Its names of quantization while loading, with routers left out; ours on a CPU; nothing where nothing is asked."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    from megatron_rl.rollout import precision

    def arguments(device: str, **fields) -> dict:
        config = RolloutConfig.model_validate(fields)
        if place == "server":
            return server_arguments(config, MODEL, device, 16, record_routes=True, precision=PrecisionConfig())
        return engine_arguments(config, MODEL, device, 16, record_routes=True)

    keys = {"quantization", "quantization_config", "additional_config", "kv_cache_dtype"}
    assert not keys & arguments("cuda").keys()
    assert not keys & arguments("cpu").keys()
    wanted = {"weights": "fp8", "block": block, "kv_cache": "fp8"}
    given = {key: value for key, value in arguments("cuda", quantization=wanted).items() if key in keys}
    ignored = {"ignore": ["*.mlp.gate", "*.mlp.shared_expert_gate"]}
    assert given == {"quantization": name, "quantization_config": ignored, "kv_cache_dtype": "fp8"}
    chosen = {"moe_backend", "attention_backend"} & arguments("cuda", quantization=wanted).keys()
    assert not chosen, "kernels of quantized experts and caches are vLLM's choice"
    assert name in ONLINE_QUANT_SHORTHAND_NAMES
    given = {key: value for key, value in arguments("cpu", quantization=wanted).items() if key in keys}
    ours = {precision.ROUNDING_KEY: wanted}
    assert given == {"quantization": precision.ROUNDED, "additional_config": ours, "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("place", ["beside the learner", "server"])
def test_latent_attention_has_one_kernel_on_every_cpu(place, dtype, tmp_path, monkeypatch):
    """Where vLLM finds AMX it takes a kernel for bf16 alone, in every type, unless it is told another."""
    from vllm.config import AttentionConfig
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import CpuArchEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setattr(CpuPlatform, "get_cpu_architecture", lambda *_: CpuArchEnum.X86)
    model, config = save_family(tmp_path, "deepseek_v3"), RolloutConfig(dtype=dtype)
    if place == "server":
        arguments = server_arguments(config, model, "cpu", 16, record_routes=True, precision=PrecisionConfig())
    else:
        arguments = engine_arguments(config, model, "cpu", 16, record_routes=True)
    asked = AttentionConfig(backend=arguments["attention_backend"]).backend
    of_layer = AttentionSelectorConfig(576, VLLM_DTYPE[dtype], "auto", 16, use_mla=True)
    chosen = {}
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        chosen[has_amx] = [CpuPlatform.get_attn_backend_cls(backend, of_layer) for backend in (asked, None)]
    assert [path.rpartition(".")[2] for path in chosen[False]] == ["CPUMLABackend", "CPUMLABackend"]
    assert [path.rpartition(".")[2] for path in chosen[True]] == ["CPUMLABackend", "AMXMLABackend"]
    assert "attention_backend" not in engine_arguments(config, MODEL, "cpu", 16, record_routes=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_delta_nets_have_states_in_fp32_and_no_kernel_that_nvcc_compiles(device, tmp_path, monkeypatch):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.attention.backends import gdn_attn

    from megatron_rl.rollout import delta_net

    model, calls = save_family(tmp_path, "qwen3_next"), []
    monkeypatch.setattr(delta_net, "install", lambda: calls.append("kernels"))
    monkeypatch.setattr(gdn_attn, "split_decodes_and_prefills", None)
    for eagerly in (True, False):
        config = RolloutConfig(enforce_eager=eagerly)
        arguments = engine_arguments(config, model, device, 256, record_routes=False)
        tells = gdn_attn.split_decodes_and_prefills is not None
        assert tells == (eagerly or device == "cpu"), "CUDA graphs are made for vLLM's own way"
        gdn_attn.split_decodes_and_prefills = None
    own = {"cpu": {"enable_prefix_caching": False}, "cuda": {"gdn_prefill_backend": "triton"}}[device]
    assert arguments.items() >= ({"mamba_ssm_cache_dtype": "float32"} | own).items()
    assert {"mamba_ssm_cache_dtype", "gdn_prefill_backend"} <= {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    assert calls == (["kernels"] * 2 if device == "cpu" else [])
    others = engine_arguments(config, MODEL, device, 256, record_routes=False)
    assert not {"mamba_ssm_cache_dtype", "gdn_prefill_backend"} & others.keys()
