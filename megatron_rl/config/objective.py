"""The `objective` section: advantage, policy term, correction of the training-inference mismatch, aggregation.

Symbols of the papers: mu = probability under the rollout engine, po = under the learner at rollout weights,
pi = under the learner now; rho = po/mu, r = pi/po, w = pi/mu; A = advantage.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Strict,
    field_validator,
    model_validator,
)

from megatron_rl.config.base import FunctionUnder, LookedUp, Section, Short, ShortList, is_function_path
from megatron_rl.config.policy_terms import (
    FunctionPath,
    FunctionTerm,
    KlInReward,
    KlLoss,
    Parameters,
    PolicyTerm,
    PpoClip,
)
from megatron_rl.errors import OwnWarning

# Corrections of the training-inference mismatch in the `objective` section. Equations: `objective/corrections.py`.
#
# Symbols: mu = probability under the rollout engine, po = under the learner at rollout weights, pi = under the learner
# now; the ratio is rho = po/mu, or w = pi/mu where the objective is anchored on the rollout engine; A = advantage.


Level = Literal["token", "sequence", "geometric"]


class NoCorrection(Section):
    mode: Literal["none"] = "none"


class _Weight(Section):
    normalize: bool = False
    """true: the weight is divided by its mean over the mini-batch: over trained tokens, or over sequences where the
    level is that of sequences."""


class _Bounded(Section):
    """Has ``lower``, and ``upper`` or ``cap`` above it."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> _Bounded:
        name = "cap" if hasattr(self, "cap") else "upper"
        lower, upper = self.lower, getattr(self, name)
        if lower is None and upper is None:
            raise ValueError("neither lower nor upper is given: nothing would be dropped; set at least one")
        if lower is not None and upper is not None and lower >= upper:
            raise ValueError(f"lower {lower:g} is not below {name} {upper:g}: nothing lies between them; swap the two?")
        return self


class Is(_Weight):
    mode: Literal["is"] = "is"
    level: Level = "token"
    """Which ratio is the weight: the token's, the product over the sequence, or its geometric mean."""


class Tis(_Weight, _Bounded):
    mode: Literal["tis"] = "tis"
    level: Level = "token"
    """Which ratio is the weight: the token's, the product over the sequence, or its geometric mean."""
    cap: PositiveFloat = 2.0
    """C: the weight is min(ratio, C). 2 in arXiv 2602.01826, 3 in arXiv 2510.26788."""
    lower: PositiveFloat | None = None
    """The weight is at least this. null: no lower bound, as the papers write it."""


class _Masking(Section):
    renormalize: bool = False
    """false: a dropped token keeps its place in the denominators. true: it leaves them."""


class Mis(_Masking, _Bounded):
    mode: Literal["mis"] = "mis"
    level: Level = "token"
    """Which ratio is the weight: the token's, the product over the sequence, or its geometric mean."""
    cap: PositiveFloat = 3.0
    """C: the weight is the ratio where it is at most C, else 0 (3 with the sequence level in arXiv 2510.26788)."""
    lower: PositiveFloat | None = None
    """Ratios below this are dropped too. null: one-sided, as the papers write it."""


class IcePop(_Masking, _Bounded):
    mode: Literal["icepop"] = "icepop"
    level: Literal["token"] = "token"
    """IcePop is defined on tokens."""
    lower: PositiveFloat = 0.5
    """Tokens whose ratio is below are dropped."""
    upper: PositiveFloat = 5.0
    """Tokens whose ratio is above are dropped."""


class Reject(_Masking, _Bounded):
    mode: Literal["reject"] = "reject"
    statistic: Literal["geometric", "seq_mean_k1", "seq_mean_k3", "max_k3"] = "seq_mean_k3"
    """What a sequence is judged by. `geometric` and `seq_mean_k1` are compared with bounds on the ratio scale (1 is
    agreement): lower <= exp(mean log rho) <= upper. `seq_mean_k3` and `max_k3` are divergences: 0 is agreement."""
    lower: NonNegativeFloat | None = None
    """Sequences with a smaller statistic are dropped. null: no bound."""
    upper: PositiveFloat | None = None
    """Sequences with a larger statistic are dropped. null: no bound."""

    @property
    def on_ratio_scale(self) -> bool:
        return self.statistic in ("geometric", "seq_mean_k1")


class Veto(_Masking):
    mode: Literal["veto"] = "veto"
    threshold: PositiveFloat = 1e-4
    """A sequence with any token ratio below this is dropped."""


class Mask(_Masking, _Bounded):
    mode: Literal["mask"] = "mask"
    level: Level = "token"
    """Which ratio decides: the token's, the product over the sequence, or its geometric mean. A bound on a sum of k1 =
    -log ratio is the same bound on the ratio: k1 <= c is ratio >= exp(-c)."""
    lower: PositiveFloat | None = None
    """Tokens, or sequences, whose ratio is below are dropped. null: no bound."""
    upper: PositiveFloat | None = None
    """Tokens, or sequences, whose ratio is above are dropped. null: no bound."""


class Opsm(_Masking):
    mode: Literal["opsm"] = "opsm"
    delta: PositiveFloat = 1e-4
    """A sequence with A < 0 is dropped where mean_t(log pi_old - log pi) exceeds this."""
    pi_old: Literal["rollout", "learner"] = "rollout"
    """rollout: mu, the probability that the rollout engine returned, as the paper defines pi_old. learner: po, which is
    pi where a batch has one update: nothing is ever dropped then."""


class M2po(Section):
    mode: Literal["m2po"] = "m2po"
    threshold: PositiveFloat = 0.04
    """τ: of the mini-batch's tokens whose update moves pi further from mu (A > 0 and rho > 1, or A < 0 and rho < 1)
    those with the largest |log rho| are dropped, until the mean of (log rho)² over the others is at most this."""


class FunctionCorrection(_Masking):
    mode: Literal["function"] = "function"
    function: Annotated[FunctionPath, LookedUp(is_function=True)]
    """Your own correction, `correction(ratios, **parameters)`: a weight, a mask or both for each token.
    docs/add-an-objective.md says what it gets. `mode: file.py:function` is the short way to write it."""
    parameters: Parameters = {}
    """Passed to the function by name. Keys that stand beside a short `mode` come here."""
    is_weight: bool = True
    """It multiplies by an importance ratio: refused where the policy term carries w already. false: a mask alone."""


Correction = Annotated[
    NoCorrection | Is | Tis | Mis | IcePop | Reject | Mask | Veto | Opsm | M2po | FunctionCorrection,
    Discriminator("mode"),
]
WEIGHTING_MODES = ("is", "tis", "mis", "icepop")
SEQUENCE_MASKS = ("reject", "veto", "opsm")


def user_functions(config: ObjectiveConfig) -> list[str]:
    """Every `file.py:function` that the objective names, in the order of its keys, each once."""
    names = [config.advantage, getattr(config.policy_term, "function", "")]
    names += [getattr(item, "function", "") for item in config.correction] + [config.aggregation]
    return list(dict.fromkeys(name for name in names if is_function_path(name)))


def is_weight(correction: Correction) -> bool:
    """Whether it multiplies by an importance ratio."""
    return correction.mode in WEIGHTING_MODES or getattr(correction, "is_weight", False)


def is_of_one_token(correction: Correction) -> bool:
    """Whether it is a function of the token's own ratio alone, which `score_centering` takes of other tokens too."""
    return correction.mode in (*WEIGHTING_MODES, "mask") and getattr(correction, "level", "token") == "token"


def label_of(section: Section, key: Literal["name", "mode"]) -> str:
    """What a person calls it: the built-in name, or file and function of a user's own."""
    return getattr(section, "function", getattr(section, key))


AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "min_variance", "reinforce", "none"]
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


Anchor = Literal["recompute", "bypass", "interpolate"]


class ObjectiveConfig(Section):
    """What is minimised. Spelling and equations: docs/add-an-objective.md and the functions' docstrings."""

    advantage: Annotated[AdvantageName | FunctionPath, LookedUp(is_function=True)] = "grpo"
    """How rewards become advantages: grpo (standardized in the group), dr_grpo (centred), rloo (leave one out),
    reinforce_pp (centred, then whitened over the batch), min_variance (minus the baseline of least variance, which
    costs a forward and backward pass of each response alone), reinforce (the reward itself), none (0: a
    `teacher` alone teaches), file.py:function (your own)."""
    policy_term: Annotated[PolicyTerm, FunctionUnder("name", tuple(FunctionTerm.model_fields)), Short("name")] = (
        PpoClip()
    )
    """The surrogate of one token or sequence; a bare name stands for its defaults. `file.py:function`: your own."""
    anchor: Anchor = "recompute"
    """What r is measured from. recompute: po, the learner's own probability at rollout weights. bypass: mu, the
    engine's, so that r becomes w = pi/mu and no pass for old log-probs is made; with several updates per batch rho is
    then not known either, and corrections and mismatch metrics see w in its place. interpolate: a policy between mu and
    pi, the nearer to pi the older the token is (arXiv 2512.06547); no pass is made; corrections see its ratio to mu."""
    router_shift: float | None = Field(None, gt=0, lt=1)
    """γ_min: r of a token is multiplied by exp of minus the mean shift of its routers' log scores since the rollout
    weights, but by no less than this (arXiv 2510.23027). Scores are those of the experts that the old routers chose.
    null: r is left as it is."""
    correction: Annotated[
        list[Correction], FunctionUnder("mode", tuple(FunctionCorrection.model_fields)), ShortList("mode")
    ] = []
    """Weights and masks against the training-inference mismatch; they multiply the policy term, and each other.
    `file.py:function` in the place of a mode: your own."""
    score_centering: bool = False
    """true: the sampler's mean score is subtracted from the score of each token (arXiv 2609.20807), summed over the
    head that `rollout.sampled_head` brings. Policy term `reinforce` or `ppo_clip`, with corrections of single tokens
    and masks of whole sequences."""
    log_ratio_penalty: NonNegativeFloat = 0.0
    """λ: λ (log r)² is added to the loss of each token, whatever the corrections do; (log w)² where the objective is
    anchored on the rollout engine (reinforce, dppo, drpo, vespo, anchor bypass). 0: none."""
    kl_loss: KlLoss | None = None
    """Add the divergence from the policy of the section `reference` to the loss. null: none."""
    kl_in_reward: KlInReward | None = None
    """Subtract it from rewards. A pass for old log-probs is made. null: none."""
    entropy_bonus: NonNegativeFloat = 0.0
    """β: β times the entropy of each token's distribution is subtracted from its loss. 0: none."""
    aggregation: Annotated[Aggregation | FunctionPath, LookedUp(is_function=True)] = "token-mean"
    """How token terms become one number over the global mini-batch. `file.py:function`: your own."""
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
        name = label_of(self.policy_term, "name")
        if self.aggregation == "seq-mean-token-sum-norm" and self.max_response_length is None:
            raise ValueError(
                "aggregation seq-mean-token-sum-norm divides by max_response_length, which is absent; set it to the "
                "longest response that rollouts may have (never the padded width of a batch)"
            )
        for item in self.correction:
            mode = label_of(item, "mode")
            if is_weight(item) and self.policy_term.carries_w:
                raise ValueError(
                    f"correction mode {mode} on policy term {name}, which already carries w = pi/mu: the mismatch "
                    f"would be corrected twice; leave it out (masks alone, reject, mask, veto and opsm, are allowed)"
                )
            bypasses = self.anchor == "bypass" and not self.policy_term.is_anchored_on_rollout
            if is_weight(item) and bypasses:
                raise ValueError(
                    f"correction mode {mode} with anchor bypass: the ratio of {name} is pi/mu already and the "
                    "mismatch would be corrected twice; leave it out (masks alone, reject, mask, veto and opsm, are "
                    "allowed) or use anchor: recompute"
                )
            counted = next((key for key in ("renormalize", "normalize") if getattr(item, key, False)), None)
            if item.mode == "m2po" and self.needs_no_po:
                raise ValueError(
                    f"correction mode m2po with policy term {name}, anchor {self.anchor}: the second moment of a ratio "
                    "to the current policy would be known only after every microbatch has run; use a term with r and "
                    "anchor: recompute, or leave m2po out"
                )
            if counted and (self.needs_no_po or item.mode == "opsm"):
                raise ValueError(
                    f"{counted} on {mode} with policy term {name}, anchor {self.anchor}: what it does depends on the "
                    "current policy, so the global denominator would be known only after every microbatch has run; "
                    "leave it false"
                )
        if self.anchor == "interpolate" and self.policy_term.is_anchored_on_rollout:
            raise ValueError(f"anchor interpolate with policy term {name}, which has no ratio r; leave the anchor out")
        if self.router_shift is not None and self.needs_no_po:
            raise ValueError(
                f"router_shift with policy term {name}, anchor {self.anchor}: it weighs the ratio of the learner's two "
                "policies; use a term with r and anchor: recompute, or null"
            )
        is_other_ratio = self.anchor == "interpolate" or self.router_shift is not None
        if is_other_ratio and self.kl_loss is not None and self.kl_loss.unbiased:
            key = "anchor: interpolate" if self.router_shift is None else f"router_shift: {self.router_shift:g}"
            raise ValueError(
                f"kl_loss.unbiased: true with {key}, under which r is not the ratio to a policy that sampled; use "
                "unbiased: false"
            )
        if self.score_centering:
            self._check_centering(name)
        if sum(item.mode == "m2po" for item in self.correction) > 1:
            raise ValueError("correction mode m2po more than once: the smallest threshold decides; keep that one")
        if sum(getattr(item, "normalize", False) for item in self.correction) > 1:
            raise ValueError("normalize on more than one correction: a product of weights has one mean; use it once")
        for message in objective_warnings(self):
            warnings.warn(message, ObjectiveWarning, stacklevel=2)
        return self

    def _check_centering(self, name: str) -> None:
        if name not in ("reinforce", "ppo_clip"):
            raise ValueError(
                f"score_centering with policy term {name}: the mean score is defined for reinforce and ppo_clip; use "
                "one of them, or score_centering: false"
            )
        if self.anchor == "interpolate" or self.router_shift is not None:
            key = "anchor interpolate" if self.router_shift is None else "router_shift"
            raise ValueError(
                f"score_centering with {key}: the ratio of tokens that were not sampled is not known; use anchor: "
                "recompute without router_shift, or score_centering: false"
            )
        for item in self.correction:
            if self.renormalizes and (getattr(item, "normalize", False) or getattr(item, "renormalize", False)):
                raise ValueError(
                    f"score_centering with normalize or renormalize on {label_of(item, 'mode')}: the mean weight of "
                    "tokens that were not sampled is not known; leave them false, or use score_centering: false"
                )
            mode, level = label_of(item, "mode"), getattr(item, "level", "token")
            is_mask = item.mode in SEQUENCE_MASKS or (item.mode == "mask" and level != "token")
            if item.mode != "none" and not is_of_one_token(item) and not is_mask:
                at = "" if item.mode == "function" else f" at level {level}"
                raise ValueError(
                    f"score_centering with correction mode {mode}{at}, which is not a function of one token's ratio: "
                    "what it weighs other tokens by is not known; use level: token, a mask of whole sequences, or "
                    "score_centering: false"
                )

    @property
    def anchored_on_rollout(self) -> bool:
        """Whether corrections see w = pi/mu in the place of rho, and no pass at rollout weights is needed for r."""
        return self.anchor == "bypass" or self.policy_term.is_anchored_on_rollout

    @property
    def needs_no_po(self) -> bool:
        """Whether r and the ratio of the corrections are made of pi and mu alone."""
        return self.anchored_on_rollout or self.anchor == "interpolate"

    @property
    def centres_on_po(self) -> bool:
        """Whether `score_centering` reads log po of the head."""
        return self.score_centering and not self.needs_no_po

    @property
    def regularizes_ratio(self) -> bool:
        """Whether a regularizer contains r, or w where the objective is anchored on the rollout engine."""
        return self.log_ratio_penalty > 0 or (self.kl_loss is not None and self.kl_loss.unbiased)

    @property
    def active_corrections(self) -> list[Correction]:
        """The correction list without `none`."""
        return [item for item in self.correction if item.mode != "none"]

    @property
    def renormalizes(self) -> bool:
        """Whether the counts of the mini-batch depend on what the corrections do, and so on old and inference
        log-probs."""
        return (
            self.normalizes
            or any(getattr(item, "renormalize", False) for item in self.correction)
            or bool(self.m2po_threshold)
        )

    @property
    def m2po_threshold(self) -> float | None:
        return next((item.threshold for item in self.correction if item.mode == "m2po"), None)

    @property
    def normalizes(self) -> bool:
        """Whether a correction's weight is divided by its mean over the mini-batch."""
        return any(getattr(item, "normalize", False) for item in self.correction)

    def needs_old_logprobs(self, num_updates_per_batch: int) -> bool:
        """Whether a learner must run a forward pass at rollout weights before updating (about 25% of training time,
        arXiv 2510.26788 §2.1).

        `kl_in_reward` is made of po. Else with one update per rollout batch pi equals po and `old_logprobs` stays None.
        With more, only what is anchored on the rollout engine (`anchored_on_rollout`) or interpolated goes without;
        opsm on the learner's pi_old and distortion look at po themselves, and `renormalize`, `normalize` and m2po must
        know what corrections do before the first gradient.
        """
        if self.renormalizes or self.kl_in_reward is not None:
            return True
        if num_updates_per_batch == 1:
            return False
        looks_at_po = self.distortion is not None or any(
            item.mode == "opsm" and item.pi_old == "learner" for item in self.correction
        )
        return looks_at_po or not self.needs_no_po


def objective_warnings(config: ObjectiveConfig) -> list[str]:
    """Reasons to doubt a legal objective, one sentence each; raised as ObjectiveWarning on validation."""
    term, warnings = config.policy_term, []
    if term.name == "gspo" and max(term.clip_low, term.clip_high) >= PPO_LIKE_CLIP:
        warnings.append(
            f"gspo clips at 1 - {term.clip_low:g} and 1 + {term.clip_high:g}, which look like PPO's per-token bounds; "
            "its ratio is a geometric mean over the sequence and needs about 3e-4 and 4e-4, or it is never clipped"
        )
    if term.name == "ppo_clip" and max(term.clip_low, term.clip_high) < PPO_LIKE_CLIP:
        warnings.append(
            f"ppo_clip clips at 1 - {term.clip_low:g} and 1 + {term.clip_high:g}, which look like GSPO's bounds for a "
            "sequence ratio; per-token ratios usually need about 0.2"
        )
    if term.has_sequence_ratio and config.aggregation != "seq-mean-token-mean":
        warnings.append(
            f"{label_of(term, 'name')} equals the paper's sequence objective only under aggregation "
            f"seq-mean-token-mean, found {config.aggregation}"
        )
    weighting = [label_of(item, "mode") for item in config.correction if is_weight(item)]
    by_sequence = any(is_weight(item) and getattr(item, "level", "") == "sequence" for item in config.correction)
    if config.advantage == "min_variance" and not by_sequence and term.name != "vespo":
        warnings.append(
            "advantage min_variance is the best baseline for terms that are multiplied by the product of a sequence's "
            "ratios; add correction {mode: is, level: sequence}, or tis"
        )
    if config.anchor == "interpolate" and not weighting and not term.carries_w:
        warnings.append(
            "anchor interpolate without a weight leaves out the ratio of the interpolated policy to mu, which is in "
            "the paper's loss; add correction is or tis"
        )
    if config.score_centering and [item.mode for item in config.correction if is_of_one_token(item)] == ["is"]:
        warnings.append(
            "score_centering with correction is alone: the weighted mean score is 0 already; use tis, or none"
        )
    if len(weighting) > 1:
        warnings.append(
            f"the corrections {', '.join(weighting)} each multiply by an importance ratio: the product counts it twice"
        )
    for item in config.correction:
        if item.mode == "reject" and item.on_ratio_scale and not (item.lower or 0) < 1 < (item.upper or math.inf):
            warnings.append(
                f"reject on {item.statistic} compares on the ratio scale, where 1 means agreement, and its bounds "
                f"(lower {item.lower}, upper {item.upper}) drop sequences on which both engines agree; divergences "
                "like 0.001 belong to seq_mean_k3 and max_k3"
            )
    if config.kl_loss is not None and config.kl_loss.type == "k1" and not config.kl_loss.unbiased:
        warnings.append(
            "kl_loss of type k1: its gradient is that of log pi, whose mean is 0 on policy, and holds nothing back; "
            "use k2, k1+ or k3+, or kl_in_reward"
        )
    if any(getattr(item, "cap", math.inf) < 1 for item in config.correction):
        warnings.append("a correction cap below 1 shrinks tokens on which both engines agree")
    return warnings


def parts_without_effect(config: ObjectiveConfig, num_updates_per_batch: int, has_mismatch: bool) -> list[str]:
    """Parts of a legal objective that cannot act, one sentence each. ``has_mismatch``: mu may differ from po."""
    one_update = num_updates_per_batch == 1
    reason = "the rollout engine computes what the learner computes, so that"
    sentences = []
    for i, item in enumerate(config.correction):
        if item.mode in ("none", "function") or has_mismatch:
            continue
        if item.mode == "opsm":
            if one_update:
                sentences.append(f"objective.correction.{i}: opsm: {reason} pi is pi_old")
        elif one_update or not config.anchored_on_rollout:
            sentences.append(f"objective.correction.{i}: {item.mode}: {reason} every ratio is 1")
    if config.policy_term.name == "fipo" and one_update and config.anchor == "recompute":
        sentences.append(
            "objective.policy_term: fipo is ppo_clip: with batch.minibatches 1 pi is po, and every influence is 1"
        )
    return sentences


def with_max_response_length(section: Mapping[str, Any] | None, max_response_length: int) -> dict[str, Any]:
    """The raw `objective` mapping of a recipe with max_response_length filled where absent or null.

    A loader calls this with rollout's limit before `ObjectiveConfig` validates the section.
    """
    filled = dict(section or {})
    if filled.get("max_response_length") is None:
        filled["max_response_length"] = max_response_length
    return filled
