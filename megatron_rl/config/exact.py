"""The `exact` section: generation by the learner's own forward pass (`rollout.engine: exact`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from megatron_rl.config.base import Section
from megatron_rl.config.quantization import QuantizationConfig, WeightType

NoiseKind = Literal["logits", "frozen", "router", "hidden", "weights", "stale"]
SIZE_OF: dict[NoiseKind, str] = {
    "logits": "std",
    "frozen": "std",
    "router": "std",
    "hidden": "std",
    "weights": "bits",
    "stale": "updates",
}
"""The key that says how large a dose of each kind is."""


class NoiseConfig(Section):
    """A dose of mismatch: what makes the sampler's mu differ from the learner's po."""

    kind: NoiseKind = "logits"
    """`logits`: independent Gaussian noise on the sampling logits, of (rollout.seed, step, prompt id, sample number,
    position). `frozen`: Gaussian noise on them that is a fixed function of rollout.seed and the last `context` tokens,
    the same in every step. `router`: on the routers' logits, `hidden`: on what every layer puts out, in units of the
    root mean square of the token's own; both independent, as `logits`. `weights`: linear layers and experts are rounded
    to `bits`. `stale`: weights of `updates` optimizer steps ago."""
    std: NonNegativeFloat = 0.0
    """Standard deviation, for the kinds `logits`, `frozen`, `router` and `hidden`."""
    context: PositiveInt | None = None
    """How many of the last tokens noise of the kind `frozen` is a function of. null: one."""
    bits: WeightType | None = None
    """Type that the sampler's weights are rounded to, for the kind `weights`; embeddings, head, routers and norms are
    left."""
    block: Annotated[list[PositiveInt | None], Field(min_length=2, max_length=2)] | None = None
    """As `rollout.quantization.block`, for the kind `weights`, on this rank's part of each matrix."""
    updates: NonNegativeInt = 0
    """Age of the sampler's weights in optimizer steps, for the kind `stale`; in a run's first steps the oldest
    there are."""
    in_validation: bool = False
    """Validation samples with the dose, too. false: it measures the policy, not the dose."""

    @property
    def quantization(self) -> QuantizationConfig:
        """Of the kind `weights`."""
        return QuantizationConfig(weights=self.bits, block=self.block)

    @model_validator(mode="after")
    def _has_its_own_size(self) -> NoiseConfig:
        wanted = SIZE_OF[self.kind]
        if not getattr(self, wanted):
            raise ValueError(f"kind {self.kind} needs {wanted}, the size of the dose")
        own = {wanted} | {"weights": {"block"}, "frozen": {"context"}}.get(self.kind, set())
        other = [name for name in ("std", "bits", "updates", "block", "context") if name not in own]
        for name in other:
            if getattr(self, name):
                owner = {"block": "weights", "context": "frozen"}.get(name)
                owner = owner or next(kind for kind, size in SIZE_OF.items() if size == name)
                raise ValueError(
                    f"{name}: {getattr(self, name)} has no effect with kind {self.kind}; remove it, or use kind {owner}"
                )
        return self


class ExactConfig(Section):
    noise: NoiseConfig | None = None
    """Dose of mismatch on the sampler. mu is what was sampled from and po what the learner computes, so that they
    differ by the dose and by nothing else; the gate compares what is computed without it. null: none. Our instrument,
    not a paper's; docs/exact.md."""
    noise_std: NonNegativeFloat = 0.0
    """Short for `noise: {kind: logits, std: …}`."""
    gate: Literal["all"] | PositiveInt = "all"
    """Sequences that each pass is compared on by the bit check: `all`, or this many, drawn anew in every step from the
    recipe's seed."""
    kv_cache: bool = True
    """Keep keys and values of earlier tokens; the probabilities are the same either way."""

    @property
    def dose(self) -> NoiseConfig | None:
        """``noise``, or what ``noise_std`` stands for."""
        return NoiseConfig(std=self.noise_std) if self.noise_std else self.noise

    @model_validator(mode="after")
    def _one_dose(self) -> ExactConfig:
        if self.noise_std and self.noise is not None:
            raise ValueError(f"noise_std: {self.noise_std:g} beside noise, of which it is the short form; remove one")
        return self
