"""The `objective` section: advantage, policy term, correction of the training-inference mismatch, aggregation.

Symbols of the papers: mu = probability under the rollout engine, po = under the learner at rollout weights,
pi = under the learner now; rho = po/mu, r = pi/po, w = pi/mu; A = advantage.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Strict, field_validator, model_validator

from megatron_rl.config.base import Section, Short, ShortList
from megatron_rl.config.corrections import WEIGHTING_MODES, Correction
from megatron_rl.config.policy_terms import PolicyTerm, PpoClip
from megatron_rl.errors import OwnWarning

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

PPO_LIKE_CLIP = 0.01
"""Bounds of a length-normalized sequence ratio live near 1e-4; from here up they look like PPO's per-token ones."""


class ObjectiveWarning(OwnWarning):
    """A legal objective that is probably not what was meant."""


class Distortion(Section):
    """Weight distortion of arXiv 2602.01103, Eqs 17-18: an instrument that provokes instability on purpose."""

    delta: NonNegativeFloat
    """phi: weight of tokens with po < low_prob; the paper uses 3, 2, 1.2 and 0."""
    low_prob: float = Field(0.1, gt=0, lt=1)
    """pi_low: below this probability a token's term is multiplied by delta."""


class Variance(Section):
    """Variance injection of arXiv 2602.01103, Eq 21: unbiased noise on every token's term, the control experiment."""

    sigma: PositiveFloat = 0.2
    """Standard deviation of the factor, whose mean is 1."""


class ObjectiveConfig(Section):
    """What is minimised. Spelling and equations: docs/add-an-objective.md and the functions' docstrings."""

    advantage: AdvantageName = "grpo"
    """How rewards become advantages: grpo (standardized in the group), dr_grpo (centred), rloo (leave one out),
    reinforce_pp (centred, then whitened over the batch), reinforce (the reward itself)."""
    policy_term: Annotated[PolicyTerm, Short("name")] = PpoClip()
    """The surrogate of one token or sequence; a bare name stands for its defaults."""
    anchor: Literal["recompute", "bypass"] = "recompute"
    """What r is measured from. recompute: po, the learner's own probability at rollout weights. bypass: mu, the
    engine's, so that r becomes w = pi/mu and no pass for old log-probs is made; with several updates per batch rho is
    then not known either, and corrections and mismatch metrics see w in its place."""
    correction: Annotated[list[Correction], ShortList("mode")] = []
    """Weights and masks against the training-inference mismatch; they multiply the policy term, and each other."""
    aggregation: Aggregation = "token-mean"
    """How token terms become one number over the global mini-batch."""
    max_response_length: PositiveInt | None = None
    """L, the constant that seq-mean-token-sum-norm divides by; filled from the rollout section where absent."""
    distortion: Distortion | None = None
    """Instrument: biased token weights. null: off."""
    variance: Variance | None = None
    """Instrument: unbiased noise on token weights. null: off."""
    prob_bands: Annotated[tuple[float, ...], Strict(False)] = (0.01, 0.1, 0.5, 0.9)
    """Edges in (0, 1) of the bands of po for mismatch/rho_mean/<band> and mismatch/rho_count/<band>."""
    mismatch_detail: bool = False
    """Also record what the papers' figures of the mismatch need: its spread and quantiles in each band of po, signed
    extremes of po - mu, histograms of po and mu, and the mismatch by position and by response length."""

    @field_validator("prob_bands")
    @classmethod
    def _bands_ascend(cls, edges: tuple[float, ...]) -> tuple[float, ...]:
        if list(edges) != sorted(set(edges)) or any(not 0 < edge < 1 for edge in edges):
            raise ValueError(f"edges must ascend strictly inside (0, 1), found {list(edges)}")
        return edges

    @model_validator(mode="after")
    def _combination_makes_sense(self) -> ObjectiveConfig:
        name = self.policy_term.name
        if self.aggregation == "seq-mean-token-sum-norm" and self.max_response_length is None:
            raise ValueError(
                "aggregation seq-mean-token-sum-norm divides by max_response_length, which is absent; set it to the "
                "longest response that rollouts may have (never the padded width of a batch)"
            )
        for item in self.correction:
            if item.mode in WEIGHTING_MODES and self.policy_term.carries_w:
                raise ValueError(
                    f"correction mode {item.mode} on policy term {name}, which already carries w = pi/mu: the mismatch "
                    f"would be corrected twice; leave it out (masks alone, reject, veto and opsm, are allowed)"
                )
            bypasses = self.anchor == "bypass" and not self.policy_term.is_anchored_on_rollout
            if item.mode in WEIGHTING_MODES and bypasses:
                raise ValueError(
                    f"correction mode {item.mode} with anchor bypass: the ratio of {name} is pi/mu already and the "
                    "mismatch would be corrected twice; leave it out (masks alone, reject, veto and opsm, are allowed) "
                    "or use anchor: recompute"
                )
            if getattr(item, "renormalize", False) and (self.anchored_on_rollout or item.mode == "opsm"):
                raise ValueError(
                    f"renormalize on {item.mode} with policy term {name}, anchor {self.anchor}: what it drops depends "
                    "on the current policy, "
                    "so the global denominator would be known only after every microbatch has run; leave it false"
                )
        for message in objective_warnings(self):
            warnings.warn(message, ObjectiveWarning, stacklevel=2)
        return self

    @property
    def anchored_on_rollout(self) -> bool:
        """Whether corrections see w = pi/mu in the place of rho, and no pass at rollout weights is needed for r."""
        return self.anchor == "bypass" or self.policy_term.is_anchored_on_rollout

    @property
    def active_corrections(self) -> list[Correction]:
        """The correction list without `none`."""
        return [item for item in self.correction if item.mode != "none"]

    @property
    def renormalizes(self) -> bool:
        """Whether a dropped token leaves the denominators, which then depend on old and inference log-probs."""
        return any(getattr(item, "renormalize", False) for item in self.correction)

    def needs_old_logprobs(self, num_updates_per_batch: int) -> bool:
        """Whether a learner must run a forward pass at rollout weights before updating (about 25% of training time,
        arXiv 2510.26788 §2.1).

        With one update per rollout batch pi equals po and `old_logprobs` stays None. With more, only what is anchored
        on the rollout engine (`reinforce`, `dppo`, anchor bypass) goes without; opsm and distortion look at po
        themselves, and `renormalize` must know what is dropped before the first gradient.
        """
        if self.renormalizes:
            return True
        if num_updates_per_batch == 1:
            return False
        looks_at_po = self.distortion is not None or any(item.mode == "opsm" for item in self.correction)
        return looks_at_po or not self.anchored_on_rollout


def objective_warnings(config: ObjectiveConfig) -> list[str]:
    """Reasons to doubt a legal objective, one sentence each; raised as ObjectiveWarning on validation."""
    term, found = config.policy_term, []
    if term.name == "gspo" and max(term.clip_low, term.clip_high) >= PPO_LIKE_CLIP:
        found.append(
            f"gspo clips at 1 - {term.clip_low:g} and 1 + {term.clip_high:g}, which look like PPO's per-token bounds; "
            "its ratio is a geometric mean over the sequence and needs about 3e-4 and 4e-4, or it is never clipped"
        )
    if term.name == "ppo_clip" and max(term.clip_low, term.clip_high) < PPO_LIKE_CLIP:
        found.append(
            f"ppo_clip clips at 1 - {term.clip_low:g} and 1 + {term.clip_high:g}, which look like GSPO's bounds for a "
            "sequence ratio; per-token ratios usually need about 0.2"
        )
    if term.has_sequence_ratio and config.aggregation != "seq-mean-token-mean":
        found.append(
            f"{term.name} equals the paper's sequence objective only under aggregation seq-mean-token-mean, "
            f"found {config.aggregation}"
        )
    weighting = [item.mode for item in config.correction if item.mode in WEIGHTING_MODES]
    if len(weighting) > 1:
        found.append(
            f"the corrections {', '.join(weighting)} each multiply by an importance ratio: the product counts it twice"
        )
    for item in config.correction:
        if item.mode == "reject" and item.on_ratio_scale and not (item.lower or 0) < 1 < (item.upper or math.inf):
            found.append(
                f"reject on {item.statistic} compares on the ratio scale, where 1 means agreement, and its bounds "
                f"(lower {item.lower}, upper {item.upper}) drop sequences on which both engines agree; divergences "
                "like 0.001 belong to seq_mean_k3 and max_k3"
            )
    if any(getattr(item, "cap", math.inf) < 1 for item in config.correction):
        found.append("a correction cap below 1 shrinks tokens on which both engines agree")
    return found


def with_max_response_length(section: Mapping[str, Any] | None, max_response_length: int) -> dict[str, Any]:
    """The raw `objective` mapping of a recipe with max_response_length filled where absent or null.

    A loader calls this with rollout's limit before `ObjectiveConfig.model_validate`.
    """
    filled = dict(section or {})
    if filled.get("max_response_length") is None:
        filled["max_response_length"] = max_response_length
    return filled
