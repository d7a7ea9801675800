"""Seconds of an engine's decoding step and prefill: overhead, and the larger of memory traffic and computation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.plan import hardware as hw
from megatron_rl.plan.generation import EngineMemory, weight_bytes, weight_size
from megatron_rl.plan.parameters import active_parameters, query_width
from megatron_rl.plan.workload import Workload


@dataclass(frozen=True)
class Decoding:
    """Seconds of one engine."""

    architecture: Architecture
    overhead: float  # of a step
    weights: float  # bytes of them, on all GPUs together
    expert_weight: float  # bytes of one weight of an expert
    read_byte: float  # of the weights
    read_token: float  # for a token of context
    compute: float  # for a sequence

    @classmethod
    def of(cls, work: Workload, engine: EngineMemory) -> Decoding:
        a, rollout, tp = work.architecture, work.recipe.rollout, work.recipe.rollout.tensor_parallel
        overhead = hw.EAGER_OVERHEAD_S if rollout.enforce_eager else hw.STEP_OVERHEAD_S
        overhead += 2 * a.num_layers * hw.ALLREDUCE_S * (tp > 1)
        bandwidth = work.gpu.bandwidth * hw.DECODE_BANDWIDTH
        return cls(
            architecture=a,
            overhead=overhead,
            weights=weight_bytes(a, rollout),
            expert_weight=weight_size(rollout),
            read_byte=1 / tp / bandwidth,
            read_token=engine.token_bytes / bandwidth,
            compute=2 * active_parameters(a) / tp / (work.gpu.flops(rollout.dtype) * hw.DECODE_FLOPS),
        )

    def read(self, sequences: float) -> float:
        """Of the weights in a step: of an MoE the experts that ``sequences`` tokens go to, if they go evenly."""
        a = self.architecture
        moe = sum(a.moe_layers) * 3 * a.hidden_size * a.moe_ffn_hidden_size * a.num_experts
        idle = (1 - a.experts_per_token / a.num_experts) ** sequences if a.is_moe else 0.0
        return (self.weights - moe * self.expert_weight * idle) * self.read_byte

    def step(self, sequences: float, context: float) -> float:
        """One step of ``sequences`` with ``context`` tokens together."""
        return self.overhead + max(self.read(sequences) + self.read_token * context, self.compute * sequences)


def prefill_costs(work: Workload) -> tuple[float, float]:
    """Seconds of one engine for each token of a prompt, and for each square of its length (causal attention)."""
    a, rollout = work.architecture, work.recipe.rollout
    rate = rollout.tensor_parallel * work.gpu.flops(rollout.dtype) * hw.PREFILL_MFU[a.is_moe]
    return 2 * active_parameters(a) / rate, 2 * a.num_layers * query_width(a) / rate
