"""Policy terms of the `objective` section, and its divergences from a reference policy: their parameters. Equations:
`objective/policy_terms.py`, `objective/reference_kl.py`.

Symbols: mu = probability under the rollout engine, po = under the learner at rollout weights, pi = under the learner
now; r = pi/po, w = pi/mu; A = advantage.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, PositiveFloat, model_validator

from megatron_rl.config.base import FUNCTION_PATH, LookedUp, Section


class TermSection(Section):
    """What the rest of the objective has to know of a term, beside its parameters."""

    is_anchored_on_rollout: ClassVar[bool] = False
    """Defined by pi and mu alone: no forward pass at rollout weights, and corrections see w in the place of rho."""
    carries_w: ClassVar[bool] = False
    """Holds w = pi/mu already: a second importance weight would square the correction."""
    has_sequence_ratio: ClassVar[bool] = False
    """Its ratio belongs to a sequence: it is the paper's only when sequences count alike."""


class PpoClip(TermSection):
    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """epsilon_low: the ratio r is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """epsilon_high: r is clipped above at 1 + clip_high (0.28 is DAPO's, 0.2 PPO's)."""
    dual_clip: float | None = Field(None, gt=1)
    """For A < 0 the loss is bounded by -dual_clip · A. null: no bound."""


class Gspo(TermSection):
    name: Literal["gspo"] = "gspo"
    has_sequence_ratio: ClassVar[bool] = True
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """epsilon_low of the sequence ratio s; far smaller than PPO's because s is a geometric mean over tokens."""
    clip_high: PositiveFloat = 4e-4
    """epsilon_high of the sequence ratio s."""


class Gmpo(TermSection):
    name: Literal["gmpo"] = "gmpo"
    has_sequence_ratio: ClassVar[bool] = True
    log_clip_low: PositiveFloat = 0.4
    """A token's log-ratio is clipped below at -log_clip_low where A < 0."""
    log_clip_high: PositiveFloat = 0.4
    """A token's log-ratio is clipped above at log_clip_high where A > 0."""


class Cispo(TermSection):
    name: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(None, gt=0, lt=1)
    """epsilon_low: the detached ratio is clipped below at 1 - clip_low. null: no lower bound, as the paper trains."""
    clip_high: PositiveFloat = 5.0
    """epsilon_high: the detached ratio is clipped above at 1 + clip_high. The paper tunes it and prints no value."""


class Reinforce(TermSection):
    name: Literal["reinforce"] = "reinforce"
    is_anchored_on_rollout: ClassVar[bool] = True


class MiniRl(TermSection):
    name: Literal["minirl"] = "minirl"
    carries_w: ClassVar[bool] = True
    cap: PositiveFloat = 5.0
    """w is truncated here."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Tokens with A < 0 and r < 1 - clip_low are masked."""
    clip_high: PositiveFloat = 0.27
    """Tokens with A > 0 and r > 1 + clip_high are masked."""


class Dppo(TermSection):
    name: Literal["dppo"] = "dppo"
    is_anchored_on_rollout: ClassVar[bool] = True
    carries_w: ClassVar[bool] = True
    divergence: Literal["tv", "kl"] = "tv"
    """Distance between the two-point distributions (sampled token, any other) of mu and pi: |mu - pi|, or KL."""
    delta: PositiveFloat | None = None
    """Distance from which updates that move further away are masked. null: 0.15 for tv, 0.05 for kl."""
    cap: PositiveFloat = 20.0
    """C: w is truncated here (20 in the authors' code)."""
    delta_low: PositiveFloat | None = None
    """Another distance for tokens with A < 0, whose probability falls. null: delta, as in the paper."""

    @property
    def thresholds(self) -> tuple[float, float]:
        """Distances for A < 0 and for A > 0."""
        high = self.delta if self.delta is not None else {"tv": 0.15, "kl": 0.05}[self.divergence]
        return high if self.delta_low is None else self.delta_low, high


class Drpo(TermSection):
    name: Literal["drpo"] = "drpo"
    is_anchored_on_rollout: ClassVar[bool] = True
    carries_w: ClassVar[bool] = True
    delta: PositiveFloat = 12.5
    """delta: the gradient of an update that moves away from mu falls with |mu - pi| / delta, to 0 and below. 12.5 in
    the paper, where it falls by 8% at most; below 1 it can turn around."""


class Sapo(TermSection):
    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """Temperature of the sigmoid gate where A >= 0."""
    tau_negative: PositiveFloat = 1.05
    """Temperature of the sigmoid gate where A < 0; larger, so that these fade faster away from r = 1."""


class Vespo(TermSection):
    name: Literal["vespo"] = "vespo"
    is_anchored_on_rollout: ClassVar[bool] = True
    carries_w: ClassVar[bool] = True
    c1_positive: PositiveFloat = 2.0
    """c1 where A >= 0: the larger, the less weight has a sequence with W < 1."""
    c2_positive: PositiveFloat = 3.0
    """c2 where A >= 0: the larger, the less weight has a sequence with W > 1."""
    c1_negative: PositiveFloat = 3.0
    """c1 where A < 0."""
    c2_negative: PositiveFloat = 2.0
    """c2 where A < 0."""


class Fipo(TermSection):
    name: Literal["fipo"] = "fipo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """epsilon_low: the ratio r is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """epsilon_high: r is clipped above at 1 + clip_high."""
    dual_clip: float = Field(10.0, gt=1)
    """c: for A < 0 the loss is bounded by -c f A, and a token with r > c is left out of the sums of others."""
    half_life: PositiveFloat = 32.0
    """tau: a later token counts half as much for every tau tokens that it is away."""
    influence_low: float = Field(1.0, ge=0, le=1)
    """The influence f is at least this; 0.8 with influence_high 1.2 is the symmetric form."""
    influence_high: float = Field(1.2, gt=1)
    """The influence f is at most this."""
    safe_ratio: float = Field(4.0, gt=1)
    """Where A < 0 and r is above this, f is between 0.8 and 1: such a token is not punished more than without f."""


FunctionPath = Annotated[str, Field(pattern=FUNCTION_PATH)]
"""path/to/file.py:function; a relative path counts from the recipe's folder, where the file is there."""
Parameters = dict[str, bool | int | float | str | None]


class FunctionTerm(Section):
    name: Literal["function"] = "function"
    function: Annotated[FunctionPath, LookedUp(is_function=True)]
    """Your own term, `term(tokens, **parameters)`: the loss of each token. docs/add-an-objective.md says what it gets.
    `name: file.py:function` is the short way to write it."""
    parameters: Parameters = {}
    """Passed to the function by name. Keys that stand beside a short `name` come here."""
    is_anchored_on_rollout: bool = False
    """The function uses pi and mu alone: no forward pass at rollout weights, corrections see w = pi/mu."""
    carries_w: bool = False
    """The function multiplies by w = pi/mu: a second importance weight is then refused."""
    has_sequence_ratio: bool = False
    """Its ratio belongs to a sequence: another aggregation than seq-mean-token-mean is then warned of."""


PolicyTerm = Annotated[
    PpoClip | Gspo | Gmpo | Cispo | Reinforce | MiniRl | Dppo | Drpo | Sapo | Vespo | Fipo | FunctionTerm,
    Discriminator("name"),
]


class KlLoss(Section):
    """The divergence from `reference` in the loss."""

    coef: PositiveFloat = 0.001
    """β: β k is added to the loss of each token, whatever the corrections do."""
    type: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """k of a token, with d = log pi - log ref: k1 is d, k2 d²/2, k3 exp(-d) - 1 + d. k1+ and k3+ have the value of k1
    and k3, and the gradient of k2, whose mean over tokens of pi is the gradient of the divergence."""
    cap: PositiveFloat | None = 10.0
    """k3 is at most this, without a gradient beyond. null: no bound."""
    unbiased: bool = False
    """true: k times the token's ratio r, or w where the objective is anchored on the rollout engine, with the gradient
    of both (DeepSeek-V3.2): the tokens were sampled by another policy than pi. Not with k1+ and k3+."""

    @model_validator(mode="after")
    def _has_one_gradient(self) -> KlLoss:
        if self.unbiased and self.type.endswith("+"):
            raise ValueError(f"unbiased: true with type {self.type}, whose gradient is k2's; use {self.type[:-1]}")
        return self


class KlInReward(Section):
    """The divergence from `reference` in the reward."""

    coef: PositiveFloat = 0.001
    """β: β Σ_t k is subtracted from the reward of a response, before advantages."""
    type: Literal["k1", "k2", "k3"] = "k1"
    """k of a token as in `kl_loss`, with d = log po - log ref, and k3 of at most 10."""
