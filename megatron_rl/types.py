"""Data types of the loop: prompts become rollouts in groups, and the rollouts of a step are its batch.

Shape legend: ``P`` prompt tokens, ``R`` response tokens of one rollout, ``L`` MoE layers, ``K`` experts per token,
``G`` group size, ``B`` responses of the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
MAX_LOGPROB = 1e-4  # above this a log-prob cannot be rounding: probabilities do not exceed one
MIN_LOGPROB = -1e4
"""Floor of log mu and log po. A sampled token with a reported log-prob of -inf then has a ratio at the clamp. Every
mask with an upper bound drops it, and sums over its sequence stay finite."""
SET_ARRAYS = {
    "kept_tokens": np.int32,
    "head_tokens": np.int32,
    "head_logprobs": np.float32,
    "teacher_tokens": np.int32,
    "teacher_set_logprobs": np.float32,
}
"""Fields of `Rollout` [R, C or k] about some of the tokens at each place, and their dtypes."""
SCORED_ARRAYS = ("reference_logprobs", "scoring_logprobs", "teacher_logprobs")
"""Fields of `Rollout` [R] float32: log-probs of its tokens under a second model."""
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclass(frozen=True)
class Prompt:
    """One problem, already tokenized.

    Example: ``Prompt(id="train:17", tokens=[1, 65, 23], answer="3", text="^12=", data_source="modsum")``
    """

    id: str  # unique within its source: "<source name>:<row>"
    tokens: list[int]  # [P]
    answer: str  # gold answer as the source spells it
    text: str = ""  # the tokenized text, for logs and batches on disk
    data_source: str = ""  # selects the reward if the recipe has `reward.name: by_source`
    extra: dict[str, Any] = field(default_factory=dict)
    occurrence: int = 0  # number of earlier requests for this prompt in the same step


def sequence_id(prompt_id: str, sample: int, occurrence: int = 0) -> str:
    """Return ``<prompt id>/<sample>``, followed by ``+<occurrence>`` if a step requests the prompt again."""
    return f"{prompt_id}/{sample}+{occurrence}" if occurrence else f"{prompt_id}/{sample}"


@dataclass
class Rollout:
    """One response to a prompt: what the engine sampled, what the learner makes of it, and what is stored.

    Every rank has an entry for every response. Its arrays are on the rank that sampled it (`owner`), then on those that
    learn from it (`learner.passes`), and None elsewhere. ``S = P + R``.
    """

    id: str  # `sequence_id`, which seeds, route checksums and recorded batches use
    prompt: Seq[int]  # [P] tokens
    tokens: np.ndarray | None  # [R] int32, the stop token included
    inference_logprobs: np.ndarray | None  # [R] float32, log mu of each sampled token
    policy_versions: np.ndarray | None  # [R] int32, optimizer step of the weights each token was sampled from
    finish_reason: FinishReason | None = (
        None  # "stop": a stop token; "length": cut; "abort": interrupted; None: unknown
    )
    routed_experts: np.ndarray | None = None  # [S - 1, L, K] uint8/uint16; the last sampled token has none
    route_checksums: np.ndarray | None = None  # [S - 1 + L] int64, per row, then per layer: `routing.payload`
    kept_tokens: np.ndarray | None = None  # [R, C] int32, what mu and pi are distributions over, then -1; None: all
    head_tokens: np.ndarray | None = None  # [R, k] int32, the most probable tokens at each place; None: as kept_tokens
    head_logprobs: np.ndarray | None = None  # [R, k] float32, log mu of them, -inf where there is none; None: no head
    reference_logprobs: np.ndarray | None = None  # [R] float32, log-probs under `reference`; None unless computed
    scoring_logprobs: np.ndarray | None = None  # [R] float32, log po in the precision of `scoring`
    teacher_logprobs: np.ndarray | None = None  # [R] float32, log-probs under a teacher; None unless computed
    teacher_tokens: np.ndarray | None = None  # [R, k] int32, most probable under a teacher, then -1; None: the head's
    teacher_set_logprobs: np.ndarray | None = None  # [R, k] float32, log τ of them, -inf where there is none
    exact_logprobs: np.ndarray | None = None  # [R] float32, engine exact: log po must equal it bit for bit
    sampled: np.ndarray | None = None  # [R] bool, tokens that the policy sampled (`rollout.function`); None: all
    text: str = ""  # decoded response, special tokens removed; empty where another rank sampled it
    num_turns: int = 1  # times that the policy's turn came

    reward: float = 0.0  # after shaping; input of advantages
    kl_penalty: float = 0.0  # of `objective.kl_in_reward`: taken off the reward in advantages alone
    raw_reward: float = 0.0  # before shaping: 1.0 = correct
    masked: bool = False  # left out of the loss, and kept in the group's baseline if it has a score (mask_truncated)
    unscored: bool = False  # masked because its reward failed (reward.on_error): no reward of it is known
    repetition: float | None = None  # share of repeated n-grams, if the owner has sent it
    advantage: float = 0.0
    group: int | None = None  # number of its prompt in the batch; None: of a batch whose advantages are final

    old_logprobs: np.ndarray | None = None  # [R] float32, log po; None unless computed
    head_old_logprobs: np.ndarray | None = None  # [R, k] float32, log po of the head's tokens; None unless computed
    old_experts: np.ndarray | None = None  # [S, L, K] int16, experts of the pass for log po, for `router_shift`
    old_scores: np.ndarray | None = None  # [S, L, K] float32, the routers' log scores of them there
    current_logprobs: np.ndarray | None = None  # [R] float32, log pi of the update's forward pass, if kept

    length: int = 0  # R, known on every rank; computed from `tokens` if they are here
    num_sampled: int | None = None  # of the R, known on every rank; computed from `sampled`, or R
    owner: int | None = None  # the rank that sampled it and has it until the exchange; None: every rank
    holder: int | None = None  # the rank that reports for the replica which learned from it; None: every rank

    def __post_init__(self) -> None:
        if self.tokens is not None:
            self.length = len(self.tokens)
        if self.num_sampled is None:
            self.num_sampled = self.length if self.sampled is None else int(np.count_nonzero(self.sampled))
        if self.num_sampled == self.length:
            self.sampled = None

    @property
    def sample(self) -> int:
        """0 … G-1 within its group."""
        return int(self.id.rpartition("/")[2].partition("+")[0])

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def whole(self) -> np.ndarray:
        """[S] int64: prompt and response."""
        return np.concatenate([self.prompt, self.tokens]).astype(np.int64, copy=False)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def whole_length(self) -> int:
        """S, known on every rank."""
        return len(self.prompt) + self.length

    @property
    def loss_mask(self) -> np.ndarray | None:
        """[R] bool: trained tokens; None where another rank has the response."""
        if self.tokens is None:
            return None
        if self.masked or self.sampled is None:
            return np.full(self.length, not self.masked)
        return self.sampled

    @property
    def learner_logprobs(self) -> np.ndarray | None:
        """[R] float32, log po; None where it was not kept. With one update a batch it is that of the update's pass."""
        return self.current_logprobs if self.old_logprobs is None else self.old_logprobs

    @property
    def log_rho(self) -> np.ndarray | None:
        """[R] float64, log po - log mu; None where log po was not kept."""
        if self.learner_logprobs is None:
            return None
        return self.learner_logprobs.astype(np.float64) - self.inference_logprobs

    @property
    def num_trained(self) -> int:
        """Number of tokens under the loss mask, known on every rank."""
        return 0 if self.masked else self.num_sampled


@dataclass
class Group:
    """All rollouts of one prompt, the unit over which advantages are centred."""

    prompt: Prompt
    rollouts: list[Rollout]  # [G]

    @property
    def scored(self) -> list[Rollout]:
        """The rollouts whose reward is known."""
        return [rollout for rollout in self.rollouts if not rollout.unscored]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the `scored` responses."""
        return [rollout.reward for rollout in self.scored]


@dataclass
class Batch:
    """The responses of one step, known to every rank, in a fixed order.

    ``minibatches`` are index lists into ``sequences``; one optimizer step each. Denominators are always computed over a
    whole mini-batch (all data-parallel ranks, all microbatches), never over one rank's part.
    """

    step: int
    sequences: list[Rollout]  # [B]
    minibatches: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.whole_length for sequence in self.sequences)


class Scores(NamedTuple):
    """What a second model says of a response."""

    logprobs: np.ndarray  # [R] float32, of its tokens
    tokens: np.ndarray | None = None  # [R, k] int32, the most probable ones at each place; None: not asked for
    of_tokens: np.ndarray | None = None  # [R, k] float32, log-probs of them


class TokenScorer(Protocol):
    """A second model that has engines of its own."""

    def score(self, rollouts: Seq[Rollout], top_k: int = 0) -> list[Scores]:
        """Return what it says of each response, with ``top_k`` tokens a place, from rollouts whose arrays are here."""

    def close(self) -> None:
        """End its engines."""
