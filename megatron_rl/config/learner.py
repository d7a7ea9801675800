"""The sections `learner` (layout, optimizer, loss scaling), `precision` (what is computed in which type, on both
engines), `schedule` (rate, weight decay) and `routing` (experts).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.base import Dtype, NullIsZero, Section, Short
from megatron_rl.errors import InputError
from megatron_rl.process.fp32_products import Fp32Product


class LossScaleConfig(Section):
    """Dynamic loss scaling of an fp16 learner; without effect on bf16 and fp32, which run unscaled."""

    initial: float = Field(32768.0, ge=1)
    """Scale of the first update; it never falls below 1."""
    growth_interval: PositiveInt = 1000
    """Updates in a row without overflow after which the scale doubles."""
    hysteresis: PositiveInt = 1
    """From this many overflows on, counted since the scale last grew, each one halves the scale. 1: every overflow."""


class PrecisionConfig(Section):
    """What both engines compute in fp32 whatever their dtypes are, and which weights the rollout engine gets.

    The dtypes themselves are `learner.dtype` and `rollout.dtype`; docs/precision.md has the pairs.
    """

    fp32_head: bool = False
    """Compute the logits in fp32 from the learner's weights, on both engines."""
    fp32_router: bool = False
    """Compute the router's logits and the experts' weights in fp32, on both engines. MoE models only."""
    allow_asymmetric: bool = False
    """Permit what makes mu another policy than pi: `rollout_fp32_head` and `rollout_fp32_router` unlike the two keys
    above, `rollout.top_p` below 1 and `rollout.top_k`."""
    rollout_fp32_head: bool | None = None
    """Ablation: fp32 logits on the rollout engine alone or the learner alone. null: as `fp32_head`."""
    rollout_fp32_router: bool | None = None
    """Ablation: fp32 router on the rollout engine alone or the learner alone. null: as `fp32_router`."""
    export_from: Literal["learner", "master"] = "learner"
    """Which weights the rollout engine gets when `rollout.dtype` differs from a 16-bit `learner.dtype`. learner: those
    that pi is computed with. master: the optimizer's fp32 copy, rounded once to `rollout.dtype`; mu then has weights
    that pi does not have. With equal dtypes both are the same numbers."""

    @property
    def rollout_head(self) -> bool:
        """fp32 logits on the rollout engine."""
        return self.fp32_head if self.rollout_fp32_head is None else self.rollout_fp32_head

    @property
    def rollout_router(self) -> bool:
        """fp32 router on the rollout engine."""
        return self.fp32_router if self.rollout_fp32_router is None else self.rollout_fp32_router

    @model_validator(mode="after")
    def _asymmetry_is_asked_for(self) -> PrecisionConfig:
        for name, rollout in (("fp32_head", self.rollout_head), ("fp32_router", self.rollout_router)):
            learner = getattr(self, name)
            if rollout != learner and not self.allow_asymmetric:
                raise ValueError(
                    f"rollout_{name}: {str(rollout).lower()} on the rollout engine but {str(learner).lower()} on the "
                    f"learner ({name}) makes mu and pi different policies; remove rollout_{name}, or set "
                    "allow_asymmetric: true for an ablation"
                )
        return self


def fp32_products(
    learner_dtype: str, rollout_dtype: str, precision: PrecisionConfig
) -> tuple[set[Fp32Product], set[Fp32Product]]:
    """What the learner, and what the rollout engine, needs of products of fp32 matrices; empty: it has none.

    Within one process all such products are of one kind (`process.fp32_products`).
    """
    learner = _products(learner_dtype, precision.fp32_head or precision.fp32_router)
    return learner, rollout_fp32_products(rollout_dtype, precision)


def rollout_fp32_products(dtype: str, precision: PrecisionConfig) -> set[Fp32Product]:
    """What a rollout engine of ``dtype`` needs of products of fp32 matrices."""
    return _products(dtype, precision.rollout_head or precision.rollout_router)


def only_product(kinds: set[Fp32Product]) -> Fp32Product | None:
    """The one that ``kinds`` has, None where there is none. Recipes that need both in one process are refused."""
    return "tf32" if "tf32" in kinds else "fp32" if kinds else None


def refuse_both_products(flag: str, dtypes: Iterable[str]) -> None:
    """Raise `InputError` where the ``dtypes`` of one command, from its ``flag``, have fp32 and tf32."""
    if {"fp32", "tf32"} <= set(dtypes):
        raise InputError(
            f"{flag}: fp32 and tf32, but a process multiplies all fp32 matrices alike, in full or as TF32; use a "
            "command for each"
        )


def _products(dtype: str, has_fp32_parts: bool) -> set[Fp32Product]:
    kinds: set[Fp32Product] = {"fp32"} if has_fp32_parts or dtype == "fp32" else set()
    return kinds | {"tf32"} if dtype == "tf32" else kinds


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
    """Type of weights and activations. Master weights, gradients' reduction and log-probs are fp32 in every case.
    fp32 multiplies matrices in full; tf32 stores fp32 and multiplies as TF32."""
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
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam's numbers."""
    quantization: Literal["as_rollout"] | None = None
    """as_rollout: every pass computes with weights that are rounded as `rollout.quantization` rounds the engine's, and
    the gradient is applied to the weights as they are (arXiv 2604.07853). Costs a copy of them while a pass runs.
    null: passes compute with the weights as they are."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the GPU while the engine generates."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights. null: train all weights."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling, where dtype is fp16."""
    token_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens travel to the ranks of their experts. `alltoall`: each to those ranks alone. `allgather`: all to all
    ranks, which have to be of one replica, for many experts a token; not with pipeline stages. `flex`: by DeepEP's
    kernels, which have to be installed."""
    megatron: dict[str, Any] = {}
    """Further fields of Megatron's TransformerConfig, as {field: value}: a way out, not tested here. Fields that this
    project sets are refused. Check the run's mismatch: the rollout engine knows nothing of them."""
    max_consecutive_overflows: PositiveInt = 20
    """Updates in a row skipped for infinite or NaN gradients (in any dtype) that end the run with exit status 3."""


class DetectorConfig(Section):
    """When a rise of the mean response length counts as a surge (`tools.dev.tune_surge_detector` prints why so)."""

    smoothing_steps: PositiveInt = 7
    """The length is smoothed by the median of this many observations: outliers shorter than half of it vanish."""
    surge_ratio: float = Field(2.0, gt=1)
    """A surge is a smoothed length of at least this many times the baseline. The paper reads the surge off a plot as a
    threefold rise; with 2.0 its curves (from 1000 to 3000 tokens and more) are seen while they rise, and the period
    comes out near its 204 and 160. With 3.0 a curve that ends at 3000 may be seen late or never."""
    confirm_steps: PositiveInt = 2
    """Consecutive observations (one per rollout batch) that must pass before the surge is believed."""
    baseline_window: PositiveInt = 80
    """The baseline is the smallest smoothed length among this many latest observations."""
    min_step: NonNegativeInt = 20
    """No surge is reported before this optimizer step: the first steps of a run say little."""


class EffectiveSampleConfig(Section):
    rule: Literal["sqrt", "linear"] = "sqrt"
    """sqrt: the rate is multiplied by the root of min(1, ρ / reference), for Adam. linear: by that itself."""
    reference: float = Field(1.0, gt=0, le=1)
    """ρ_0: share of the batch from which on the rate is the schedule's. 1: any spread of the weights lowers it."""


class ScheduleConfig(Section):
    """Steps are optimizer steps counted from 0; one that is skipped for overflow does not count."""

    style: Literal["constant", "linear", "cosine", "length-decay"] = "constant"
    """What follows the warm-up: the peak rate for ever; a line or a half cosine down to `min_lr`;
    or halving every `decay_period` steps (arXiv 2602.01826, Algorithm 1)."""
    min_lr: float | None = Field(None, ge=0)
    """Floor of the decay; null: a tenth of learner.optimizer.lr."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from `warmup_from` to the peak rate, before anything else."""
    warmup_from: float = Field(0.0, ge=0)
    """Rate of step 0 where there is a warm-up."""
    decay_steps: PositiveInt | None = None
    """Step at which linear and cosine reach `min_lr`; null: the last step of the run."""
    mode: Literal["manual", "auto", "shadow"] | None = None
    """Length-decay only. manual: `decay_period` is given. auto: constant until the response length surges at step
    t_s, then decay_period = round(period_factor · t_s). shadow: constant, and the rate that manual (where
    `decay_period` is given) or auto would have set is logged as lr_sched/shadow_lr."""
    decay_period: PositiveInt | None = None
    """Steps between halvings, counted from step 0 (T_decay)."""
    decay_phase: NonNegativeInt = 0
    """Length-decay only: the halvings come this many steps earlier, at n · T_decay − decay_phase. An instrument: a
    clock of the same period that no surge has set."""
    period_factor: float = Field(1.8, gt=1)
    """T_decay over the step of the surge, in mode auto; above 1, so that the first halving comes after the surge."""
    detector: DetectorConfig = DetectorConfig()
    """When a surge is believed."""
    effective_sample: Annotated[EffectiveSampleConfig | None, Short("rule")] = None
    """Lower the rate of each update, in any style, by the effective sample size of its mini-batch, as a share ρ of its
    sequences (arXiv 2602.17616): where few sequences carry most of the importance weight, the step is shorter. A rule's
    name alone stands for its defaults. null: off."""
    staleness_bound: PositiveFloat | None = None
    """c: the rate of an update is at most c / S in any style, after `effective_sample`; S is the age of its oldest
    trained token in optimizer steps (arXiv 2607.01083, where c is R_batch / G_upd, of unknown size). Where a rate η is
    stable with data of age S, c = η · S is safe. null: off."""

    @model_validator(mode="after")
    def _keys_of_one_style(self) -> ScheduleConfig:
        if self.style != "length-decay":
            for key in ("mode", "decay_period", "decay_phase"):
                if getattr(self, key):
                    raise ValueError(
                        f"{key}: {getattr(self, key)!r} has no effect with style {self.style!r}; "
                        f"remove it or set style: length-decay"
                    )
        elif self.mode is None:
            raise ValueError("mode: missing; style length-decay needs mode manual, auto or shadow")
        elif self.mode == "manual" and self.decay_period is None:
            raise ValueError("decay_period: missing; mode manual needs it (204 in the paper's main run)")
        elif self.mode == "auto" and self.decay_period is not None:
            raise ValueError("decay_period: mode auto finds it from the response length; remove it or set mode: manual")
        if self.decay_steps is not None and self.style not in ("linear", "cosine"):
            raise ValueError(f"decay_steps: has no effect with style {self.style!r}; remove it")
        if self.decay_period is not None and self.warmup_steps >= self.decay_period:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} leaves no step at the peak rate before the first halving at step "
                f"{self.decay_period} (decay_period); shorten the warm-up"
            )
        return self

    def floor(self, lr: float) -> float:
        """The smallest rate that the decay reaches from peak rate ``lr``."""
        return 0.1 * lr if self.min_lr is None else self.min_lr


class RoutingConfig(Section):
    replay: Literal["off", "r2", "r3"] = "off"
    """off: the learner routes by itself. r2: replay in every update what the learner routed in its pass for old
    log-probs (which then runs even with one update per batch). r3: replay the rollout engine's routes in every forward
    pass of the learner, so that both engines use the same experts for the same token [R3]."""
    telemetry: bool = False
    """With replay off: have the engine record its routes nevertheless, and report how far the learner's agree with
    them (router/agree_frac and others). With replay on, agreement is measured in any case."""
    malformed: Literal["error", "fallback"] = "error"
    """A row of expert ids that cannot be (out of range, or one expert twice). error: end the run, naming sequence,
    layer and token. fallback: leave that token to the learner's router, counted in router/fallback_frac. A payload of
    the wrong length or with a wrong checksum is an error in either case."""
    bias_update_rate: float = Field(0.0, ge=0, le=1)
    """By how much each update moves the biases by which sigmoid routers choose: up for experts with fewer tokens than
    the mean, down for those with more. It changes the policy outside of the gradient. 0: they stay."""

    @property
    def is_on(self) -> bool:
        """Whether the learner's routers are replayed or watched at all."""
        return self.replay != "off" or self.telemetry

    @property
    def needs_engine_routes(self) -> bool:
        """Whether the rollout engine has to record its routes."""
        return self.replay == "r3" or (self.replay == "off" and self.telemetry)

    def describe(self) -> str:
        """One line for a person."""
        if self.replay == "off":
            return "by the learner; the engine's routes are recorded for comparison"
        source = "its own pass for old log-probs" if self.replay == "r2" else "the rollout engine"
        return f"replay {self.replay}: the learner uses the routes of {source}"
