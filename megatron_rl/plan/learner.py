"""Memory of one learner rank: what is always there, and what a training step adds at its worst moment.

static = weights + gradient buffer + Adam's moments + fp32 master weights;
peak   = static + max(head, layer, optimizer), see `LearnerMemory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.config.learner import LearnerConfig, OffloadConfig
from megatron_rl.plan.activations import BYTES, Activations
from megatron_rl.plan.parameters import StageParameters, adapter_parameters, stage_parameters

GRADIENT_BYTES = 4  # Megatron's buffer is fp32 whatever the weights are
MOMENT_BYTES = 8  # Adam's two, fp32
MASTER_BYTES = 4  # of 16-bit weights; fp32 weights are their own
UPDATE_CHUNK = 2**24  # elements that `learner.gradient_noise` reads at a time


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on one rank of one pipeline stage."""

    stage: int
    weights: float
    gradients: float
    moments: float
    masters: float
    activations: float  # kept for all microbatches in flight
    head: float  # logits and their gradients; 0 where the stage has no head
    layer: float  # recomputed activations and gradients in flight of the layer at hand
    optimizer: float  # temporaries of the update
    buffers: float  # sequence parallelism's gather buffer, and context parallelism's keys and values

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.moments + self.masters

    @property
    def states(self) -> float:
        """Adam's: what `learner.offload.optimizer` moves."""
        return self.moments + self.masters

    @property
    def passes(self) -> float:
        """What forward and backward passes add: activations with the larger of the head's and a layer's moment."""
        return self.activations + max(self.head, self.layer) + self.buffers

    @property
    def dynamic(self) -> float:
        """What a step adds: passes or the update."""
        return max(self.passes, self.optimizer)

    def at_rest(self, offload: OffloadConfig) -> float:
        """What stays on the GPU while the engine generates."""
        stays = ((self.gradients, offload.gradients), (self.states, offload.optimizer), (self.weights, offload.weights))
        return sum(size for size, leaves in stays if not leaves)


def learner_memory(
    a: Architecture,
    learner: LearnerConfig,
    world_size: int,
    tokens: int,
    num_microbatches: int = 1,
    *,
    fp32_head: bool = False,
    fused: bool = True,
    imbalance: float = 1.0,
    gradient_noise: bool = True,
) -> list[LearnerMemory]:
    """One entry per pipeline stage. ``world_size``: learner ranks. ``tokens``: of one microbatch, over all
    context-parallel ranks.

    ``fused``: TransformerEngine's layers and fused Adam, as on a GPU; False: the learner's CPU layers and torch's Adam.
    ``imbalance``: see `Activations`.
    """
    here = -(-tokens // learner.parallel.context)
    kept = Activations(
        a, learner.parallel, learner.dtype, here, fp32_head, learner.fused_head, fused=fused, imbalance=imbalance
    )
    stages = stage_parameters(a, learner.parallel)
    return [
        _stage(i, stage, kept, a, learner, world_size, min(len(stages) - i, num_microbatches), fused, gradient_noise)
        for i, stage in enumerate(stages)
    ]


def _stage(
    index: int,
    stage: StageParameters,
    kept: Activations,
    a: Architecture,
    learner: LearnerConfig,
    world_size: int,
    in_flight: int,
    fused: bool,
    gradient_noise: bool,
) -> LearnerMemory:
    b, p = BYTES[learner.dtype], learner.parallel
    dp = max(1, world_size // (p.tensor * p.pipeline))  # over context-parallel ranks, too
    expert_dp = max(1, world_size // (p.expert * p.expert_tensor * p.pipeline))
    trained, sharded, weights = stage.total, stage.dense / dp + stage.expert / expert_dp, stage.total * b
    if learner.lora is not None:
        dense, expert = adapter_parameters(a, learner.lora, p, stage)
        trained, sharded = dense + expert, dense / dp + expert / expert_dp
        weights += trained * b
    activations, layer = _activations(stage, kept, learner, in_flight)
    return LearnerMemory(
        stage=index,
        weights=weights,
        gradients=trained * GRADIENT_BYTES,
        moments=sharded * MOMENT_BYTES,
        masters=sharded * MASTER_BYTES if b == 2 else 0.0,
        activations=activations,
        head=kept.head_peak() if stage.has_head else 0.0,
        layer=layer,
        optimizer=_update(stage, expert_dp, dp, fused, learner.optimizer.weight_decay, gradient_noise),
        buffers=kept.gather_buffer() + kept.context_buffer(),
    )


def _activations(
    stage: StageParameters, kept: Activations, learner: LearnerConfig, in_flight: int
) -> tuple[float, float]:
    """(bytes kept for all microbatches in flight, bytes of the layer at hand)."""
    kinds = [True] * (stage.moe_layers > 0) + [False] * (stage.moe_layers < stage.layers)
    dense_layers = stage.layers - stage.moe_layers
    whole = stage.moe_layers * kept.layer(True) + dense_layers * kept.layer(False)
    merged = {moe: _merged_weights(kept.architecture, learner, moe) for moe in kinds}
    all_merged = stage.moe_layers * merged.get(True, 0.0) + dense_layers * merged.get(False, 0.0)
    at_hand = max(kept.layer_backward(moe) for moe in kinds)
    if learner.recompute == "full":
        each = stage.layers * kept.layer_input()
        at_hand += max(kept.layer(moe) for moe in kinds) + max(merged.values())
        if kept.parallel.expert * kept.parallel.expert_tensor > 1 or kept.fused:
            # Megatron's token dispatcher holds on to what the recomputed layer was given, and to its gradient.
            at_hand += stage.moe_layers * kept.layer_input()
    elif learner.recompute == "selective" and stage.moe_layers:
        each = whole - stage.moe_layers * kept.expert_block() + all_merged
        at_hand += kept.expert_block()
    else:
        each = whole + all_merged
    return in_flight * (each + kept.outside_layers(stage.has_embedding, stage.has_head)), at_hand


def _merged_weights(a: Architecture, learner: LearnerConfig, moe: bool) -> float:
    """One layer's merged copy of its adapted weights, which lives from its forward to its backward pass."""
    if learner.lora is None:
        return 0.0
    p, width = learner.parallel, (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    width //= p.tensor
    width += 3 * a.moe_ffn_hidden_size * (a.num_experts // p.expert) if moe else 3 * a.ffn_hidden_size // p.tensor
    return a.hidden_size * width * BYTES[learner.dtype]


def _update(stage: StageParameters, expert_dp: int, dp: int, fused: bool, weight_decay: float, watched: bool) -> float:
    """Temporaries of an update: torch's Adam makes two tensors of a weight's size, TransformerEngine's none; the
    measurement of the update's size (`monitor.gradient_noise`) makes two or three tensors of a chunk of the shard."""
    adam = 0.0 if fused else 2 * 4 * stage.largest
    chunk = min(UPDATE_CHUNK, max(stage.dense / dp, stage.expert / expert_dp))
    return max(adam, watched * (3 if weight_decay else 2) * 4 * chunk)
