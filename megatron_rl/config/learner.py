"""The `learner` section: layout, precision and optimizer of the Megatron side."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.config.base import Dtype, NullIsZero, Section
from megatron_rl.config.precision import LossScaleConfig


class ParallelConfig(Section):
    """Sizes of the process groups. Data-parallel size is what remains: ranks / (tensor · pipeline · context)."""

    tensor: PositiveInt = 1
    """Tensor-parallel size. Above 1, sequence parallelism is on: Megatron's MoE layers need it."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size (1F1B schedule)."""
    context: PositiveInt = 1
    """Context-parallel size: every sequence is cut over this many ranks, for responses whose activations one rank
    cannot hold. Experts may be dealt over these ranks as well."""
    expert: PositiveInt = 1
    """Expert-parallel size: experts are dealt over this many of the ranks of one pipeline stage."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size inside one expert."""
    timeout_minutes: PositiveFloat | None = None
    """A rank that waits longer than this for another has lost it and ends the job, which would else hang until its time
    limit. Must be longer than anything one rank does alone: generating its share, writing a checkpoint. null: 30, or
    what `rollout.deadline_s` lets an engine take where that is longer."""


LOGIT_CHUNK_ROWS = 256
"""Rows of logits that are in fp32 at a time: 256 · 152k · 4 B = 156 MB at Qwen3's vocabulary, still large enough to
fill a GPU. Here because the planner counts with it and imports no engine."""


class OptimizerConfig(Section):
    """Adam(W), sharded over data-parallel ranks by Megatron's DistributedOptimizer."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate; the `schedule` section says how it moves."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (AdamW)."""
    clip_grad: Annotated[NonNegativeFloat, NullIsZero()] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 or null turns clipping off."""


class LoraConfig(Section):
    """Low-rank adapters on the linear layers of the blocks, one for each expert; everything else is frozen. They are
    merged into the weights in every forward pass, and so the rollout engine gets merged weights."""

    rank: PositiveInt = 32
    """Inner dimension of an adapter."""
    alpha: float = Field(64.0, gt=0)
    """The update B·A is multiplied by alpha / rank."""


class OffloadConfig(Section):
    """What of the learner leaves the GPU while a colocated engine generates, for a larger key/value cache or longer
    responses. Results are the same bit for bit; `megatron-rl plan` says what each part gains, and its price."""

    gradients: bool = False
    """The gradient buffer is freed. Every update starts by zeroing it, so nothing is copied."""
    optimizer: bool = False
    """Adam's moments and the fp32 master weights lie in page-locked host memory."""
    weights: bool = False
    """The weights lie in page-locked host memory, from when the engine has been sent them."""
    during_passes: bool = False
    """Adam's moments and master weights stay in host memory during forward and backward passes, too, and are on the GPU
    for the update alone: room for activations, for two copies in each update. Needs `optimizer`."""

    @property
    def is_on(self) -> bool:
        return self.gradients or self.optimizer or self.weights


class LearnerConfig(Section):
    dtype: Dtype = "bf16"
    """Type of weights and activations. Master weights, gradients' reduction and log-probs are fp32 in every case."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout over ranks."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Most tokens (prompts and responses) that one forward pass packs together; a longer sequence goes alone. With
    learner.parallel.context above 1 each of its ranks has its share of them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none; attention and experts; or whole layers."""
    fused_head: bool = False
    """Compute log-probs from hidden states in pieces, so that the logits never exist as a whole: for large vocabularies
    (151,936 columns) and many tokens per microbatch. A third more work in the output layer."""
    compile: bool = False
    """Compile the elementwise work between matrix products with torch.compile, for long runs on CPUs: half a minute at
    the start, an update a tenth faster. Needs a C++ compiler. On GPUs TransformerEngine has its own kernels for it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam's numbers."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the GPU while the engine generates."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights. null: train all weights."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling, where dtype is fp16."""
    max_consecutive_overflows: PositiveInt = 20
    """Updates in a row skipped for infinite or NaN gradients (in any dtype) that end the run with exit status 3."""
