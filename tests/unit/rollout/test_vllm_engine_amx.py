"""Weight updates of an engine on a processor with AMX, on any processor: vLLM is told that it has AMX, chooses kernels,
and packs for them. Nothing here computes with what is packed for AMX alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, X86CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.platforms import CpuArchEnum, current_platform

from megatron_rl.rollout import worker_extension

INPUTS = 64


@pytest.fixture(autouse=True)
def _has_amx(monkeypatch):
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        pytest.skip("vLLM's build for processors without AVX-512 cannot pack for AMX")
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", lambda *_: CpuArchEnum.X86)
    for name, answer in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(
            f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}", lambda answer=answer: answer
        )
    for flag in ("_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, flag, lambda: True)


class Model(torch.nn.Module):
    """Layers of vLLM's as an engine holds them: loaded in ``dtype``, and packed."""

    def __init__(self, dtype: torch.dtype, outputs: tuple[int, ...]) -> None:
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            self.layers = torch.nn.ModuleList(
                ReplicatedLinear(INPUTS, n, params_dtype=dtype, prefix=f"layers.{i}", disable_tp=True)
                for i, n in enumerate(outputs)
            )
        record_metadata_for_reloading(self)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)


def sent(model: Model, seed: int) -> dict[str, torch.Tensor]:
    """Weights in fp32, as a checkpoint may hold them."""
    random = torch.Generator().manual_seed(seed)
    sizes = {f"layers.{i}": layer.output_size for i, layer in enumerate(model.layers)}
    return {
        f"{name}.{part}": torch.randn(*shape, generator=random)
        for name, n in sizes.items()
        for part, shape in (("weight", (n, INPUTS)), ("bias", (n,)))
    }


def update(model: Model, weights: dict[str, torch.Tensor]) -> None:
    transfer = object.__new__(worker_extension.StreamWeightTransfer)
    transfer.model, transfer.model_config, transfer.device = model, None, torch.device("cpu")
    transfer.start_weight_update()
    transfer.receive_weights(worker_extension.StreamUpdate(weights.items()))
    transfer.finish_weight_update()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_biases_are_rounded_to_the_engines_type_in_every_update(dtype):
    outputs = (48, 8, 1)  # vLLM packs fewer than 16 in another way
    model = Model(dtype, outputs)
    model.load_weights(sent(model, 0).items())
    for layer in model.layers:
        layer.quant_method.process_weights_after_loading(layer)
    assert all(check_cpu_sgl_kernel(n, INPUTS, dtype) for n in outputs) == (dtype is not torch.float32)
    assert {layer.bias.dtype for layer in model.layers} == {torch.float32}, "else narrow_biases can go"
    for seed in (0, 1, 0):
        update(model, weights := sent(model, seed))
        for i, layer in enumerate(model.layers):
            assert layer.bias.dtype is torch.float32, "the kernel wants it so"
            assert torch.equal(layer.bias, weights[f"layers.{i}.bias"].to(dtype).float())


@pytest.mark.parametrize(
    ("dtype", "chosen"), [(torch.bfloat16, X86CPUUnquantizedExperts), (torch.float32, CPUUnquantizedExperts)], ids=str
)
def test_experts_are_packed_for_the_kernel_that_vllm_chose(dtype, chosen):
    """Packing moves numbers and keeps shapes, so that an update finds the storage that it had."""
    config = FusedMoEConfig(
        num_experts=2,
        num_local_experts=2,
        num_logical_experts=2,
        experts_per_token=1,
        hidden_dim=INPUTS,
        intermediate_size=32,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Default,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
    )
    _, kernel = select_unquantized_moe_backend(config)
    assert kernel is chosen
    layer, plain = torch.nn.Module(), {}
    for name, shape in (("w13_weight", (2, 64, INPUTS)), ("w2_weight", (2, INPUTS, 32))):
        plain[name] = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        layer.register_parameter(name, torch.nn.Parameter(plain[name].clone(), requires_grad=False))
    experts = kernel(config, FUSED_MOE_UNQUANTIZED_CONFIG)
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    worker_extension.pack_cpu_experts(torch.nn.ModuleList([layer]))
    for name, tensor in layer.named_parameters():
        assert (tensor.shape, tensor.dtype) == (plain[name].shape, dtype)
        assert not torch.equal(tensor, plain[name])
        assert torch.equal(tensor.flatten().sort().values, plain[name].flatten().sort().values)
