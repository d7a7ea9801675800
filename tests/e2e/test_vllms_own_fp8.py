"""vLLM's own quantization while loading, as CUDA engines use it, in a real engine on a CPU: its layers, loading,
layerwise reload and our weight updates; only the kernels that multiply fp8 are replaced, by plain ones."""

from types import SimpleNamespace

import torch
from vllm.model_executor.layers.quantization.online import fp8
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.rollout import QuantizationConfig, RolloutConfig
from megatron_rl.rollout import vllm_engine, worker_extension
from megatron_rl.rollout.engine_arguments import engine_arguments, quantization_arguments
from megatron_rl.types import Prompt
from tests.support.plain_rounding import rounded_checkpoint
from tests.support.tiny import MODEL

BLOCK, HIDDEN, WIDTH = (128, 128), 128, 64


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[n, m] e4m3 and [⌈n/128⌉, ⌈m/128⌉] fp32 → [n, m] bf16."""
    every = scales.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return (codes.float() * every).bfloat16()


class PlainLinear:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, decoded(layer.weight, layer.weight_scale_inv), bias)


class PlainExperts:
    """In the place of a kernel and of its class."""

    is_monolithic, can_overlap_shared_experts = True, False
    fused_experts = SimpleNamespace(consumes_expert_mask=False)

    def __init__(self, layer: torch.nn.Module | None = None) -> None:
        self.layer = layer

    def output_is_reduced(self) -> bool:
        return False

    def apply_monolithic(self, x, gate_up, down, router_logits, **_) -> torch.Tensor:
        weights, chosen = router_logits.float().softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for expert in range(len(gate_up)):
            first = decoded(gate_up[expert], self.layer.w13_weight_scale_inv[expert])
            second = decoded(down[expert], self.layer.w2_weight_scale_inv[expert])
            gate, up = (x @ first[:, :HIDDEN].T).chunk(2, -1)
            share = (weights * (chosen == expert)).sum(-1, keepdim=True).to(x.dtype)
            result += share * ((torch.nn.functional.silu(gate) * up) @ second[:HIDDEN].T)
        return result


def set_up(method, layer, gate_up, down, gate_up_scale, down_scale, *_) -> None:
    parts = {"w13_weight": gate_up, "w2_weight": down}
    parts |= {"w13_weight_scale_inv": gate_up_scale, "w2_weight_scale_inv": down_scale}
    for name, tensor in parts.items():
        fp8.replace_parameter(layer, name, tensor)
    method.moe_kernel = PlainExperts(layer)


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the codes and scales of the last layer stand for, by the names of the checkpoint; its router as it is."""
    block = model.model.layers[3]
    tensors = {}
    qkv = decoded(block.self_attn.qkv_proj.weight, block.self_attn.qkv_proj.weight_scale_inv)
    for part, tensor in zip("qkv", qkv.split([128, 64, 64]), strict=True):
        tensors[f"self_attn.{part}_proj"] = tensor
    tensors["self_attn.o_proj"] = decoded(block.self_attn.o_proj.weight, block.self_attn.o_proj.weight_scale_inv)
    experts = block.mlp.experts.routed_experts
    for number in range(8):
        gate_up = decoded(experts.w13_weight[number], experts.w13_weight_scale_inv[number])
        down = decoded(experts.w2_weight[number], experts.w2_weight_scale_inv[number])
        tensors[f"mlp.experts.{number}.gate_proj"] = gate_up[:WIDTH]
        tensors[f"mlp.experts.{number}.up_proj"] = gate_up[128 : 128 + WIDTH]
        tensors[f"mlp.experts.{number}.down_proj"] = down[:, :WIDTH]
    tensors["router"] = block.mlp.gate(torch.eye(HIDDEN, dtype=torch.bfloat16))[0].T
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_codes_and_scales_are_ours_after_load_and_after_an_update(monkeypatch):
    """Bit for bit what numpy rounds; experts in stacks, padded by vLLM to whole blocks; the router is left alone."""
    monkeypatch.setattr(fp8, "per_block_cast_to_fp8", per_block_cast_to_fp8._torchdynamo_orig_callable)  # uncompiled
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: PlainLinear())
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (None, PlainExperts))
    monkeypatch.setattr(fp8._Fp8OnlineMoEBase, "_setup_kernel", set_up)
    on_cuda = quantization_arguments(QuantizationConfig(weights="fp8"), "cuda")
    monkeypatch.setattr(vllm_engine, "engine_arguments", lambda *a, **k: engine_arguments(*a, **k) | on_cuda)
    stacks, load = [], worker_extension._load
    monkeypatch.setattr(worker_extension, "_load", lambda *arguments: stacks.append(arguments[1]) or load(*arguments))

    config = RolloutConfig(dtype="bf16", max_response_length=8, kv_cache_gib=0.0625)
    generator = vllm_engine.VllmGenerator(config, MODEL, max_prompt_length=16)  # verify_refit is one update, and passes
    try:
        given = {name: tensor.bfloat16() for name, tensor in HFFolder(MODEL).items()}
        moved = {name: (1.25 * tensor.float() + 0.01).bfloat16() for name, tensor in given.items()}
        assert generator.describe_precision()["weights"] == "fp8 [128, 128]"
        for version, weights in ((0, given), (1, moved)):
            if version:
                stacks.clear()
                generator.refit(iter(weights.items()), version)
                assert sorted(stacks) == ["down"] * 4 + ["gate"] * 4 + ["up"] * 4
            right, tensors = rounded_checkpoint(weights, "fp8", BLOCK), generator._llm.apply_model(held)[0]
            assert torch.equal(tensors.pop("router"), weights["model.layers.3.mlp.gate.weight"])
            for name, tensor in tensors.items():
                assert torch.equal(tensor, right[f"model.layers.3.{name}.weight"]), (version, name)
                assert not torch.equal(tensor, weights[f"model.layers.3.{name}.weight"])
            (group,) = generator.rollout(
                [Prompt(id="a", tokens=[5, 6, 7], answer="")], 2, policy_version=version, step=0
            )
            assert all(len(rollout.tokens) for rollout in group.rollouts)
    finally:
        generator.close()
