"""Data types of the loop: prompts become rollouts, rollouts become groups, groups become one batch.

Shape legend: ``P`` prompt tokens, ``R`` response tokens of one rollout, ``L`` MoE layers, ``K`` experts per token,
``G`` group size, ``B`` sequences of the step, ``T`` longest response of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
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
    weight: float = 1.0  # factor of its responses' advantages
    occurrence: int = 0  # number of earlier requests for this prompt in the same step


def sequence_id(prompt_id: str, sample: int, occurrence: int = 0) -> str:
    """Return ``<prompt id>/<sample>``, followed by ``+<occurrence>`` if a step requests the prompt again."""
    return f"{prompt_id}/{sample}+{occurrence}" if occurrence else f"{prompt_id}/{sample}"


@dataclass
class Rollout:
    """One sampled response with the engine's data on it."""

    prompt_id: str
    sample: int  # 0 … G-1 within its group
    tokens: np.ndarray | None  # [R] int32, the stop token included; None: another rank holds the response
    inference_logprobs: np.ndarray | None  # [R] float32, log mu of each sampled token
    finish_reason: FinishReason  # "stop": ended with a stop token; "length": cut at the limit; "abort": interrupted
    policy_versions: np.ndarray | None  # [R] int32, optimizer step of the weights each token was sampled from
    exact_logprobs: np.ndarray | None = None  # [R] float32, engine exact: log po as generation computed it
    routed_experts: np.ndarray | None = None  # [P + R - 1, L, K] uint8/uint16; the last sampled token has none
    route_checksums: np.ndarray | None = None  # [P + R - 1 + L] int64, per row, then per layer: `routing.payload`
    kept_tokens: np.ndarray | None = None  # [R, C] int32, what top-k and top-p kept, then -1 (`rollout.kept_sets`)
    sampled: np.ndarray | None = None  # [R] bool, tokens that the policy sampled (`rollout.function`); None: all
    text: str = ""  # decoded response, special tokens removed; empty where `tokens` is None
    reward: float = 0.0  # after shaping; input of advantages
    raw_reward: float = 0.0  # before shaping: 1.0 = correct
    masked: bool = False  # left out of the loss, and kept in the group's baseline if it has a score (mask_truncated)
    unscored: bool = False  # masked because its reward failed (reward.on_error): no reward of it is known
    length: int = 0  # R, known on every rank; computed from `tokens` if they are here
    num_sampled: int | None = None  # of the R, known on every rank; computed from `sampled`, or R
    num_turns: int = 1  # times that the policy's turn came
    owner: int | None = None  # the rank that has the response; None: every rank
    repetition: float | None = None  # share of repeated n-grams, if the owner has sent it
    occurrence: int = 0  # `Prompt.occurrence` of the request

    def __post_init__(self) -> None:
        if self.tokens is not None:
            self.length = len(self.tokens)
        if self.num_sampled is None:
            self.num_sampled = self.length if self.sampled is None else int(np.count_nonzero(self.sampled))

    @property
    def id(self) -> str:
        """`sequence_id` of this response, unique within its step."""
        return sequence_id(self.prompt_id, self.sample, self.occurrence)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


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
class Sequence:
    """One prompt + response for the learner, ``S = P + R`` tokens.

    Every rank has an entry for every sequence. Arrays of tokens are on the ranks that learn from it
    (`learner.passes`) and None on the others.
    """

    id: str  # `sequence_id`, the identity that route checksums and the flight recorder use
    tokens: np.ndarray | None  # [S] int64
    prompt_length: int  # P
    inference_logprobs: np.ndarray | None  # [R] float32
    loss_mask: np.ndarray | None  # [R] bool: trained tokens
    advantage: float
    reward: float
    policy_versions: np.ndarray | None  # [R] int32
    exact_logprobs: np.ndarray | None = None  # [R] float32, engine exact: log po must equal it bit for bit
    routed_experts: np.ndarray | None = None  # [S - 1, L, K]
    route_checksums: np.ndarray | None = None  # [S - 1 + L] int64, per row, then per layer: `routing.payload`
    kept_tokens: np.ndarray | None = None  # [R, C] int32, tokens that mu and pi are distributions over; None: all
    old_logprobs: np.ndarray | None = None  # [R] float32, log po; None unless computed
    old_experts: np.ndarray | None = None  # [S, L, K] int16, experts of the pass for log po, for `router_shift`
    old_scores: np.ndarray | None = None  # [S, L, K] float32, the routers' log scores of them there
    current_logprobs: np.ndarray | None = None  # [R] float32, log pi of the update's forward pass, if kept
    group: int | None = None  # number of its prompt in the batch; None: of a batch whose advantages are final
    prompt_weight: float = 1.0  # of its prompt, with which the advantage is multiplied
    length: int = 0  # S, known on every rank
    mask_elsewhere: int = 0  # tokens under the loss mask, if the mask is on other ranks
    owner: int | None = None  # the rank that sampled it and has it until the exchange; None: every rank
    holder: int | None = None  # the rank that reports for the replica which learned from it; None: every rank

    def __post_init__(self) -> None:
        if self.tokens is not None:
            self.length = len(self.tokens)

    @property
    def response_length(self) -> int:
        return self.length - self.prompt_length

    @property
    def num_trained(self) -> int:
        """Number of tokens under the loss mask, known on every rank."""
        return self.mask_elsewhere if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))


@dataclass
class Batch:
    """The sequences of one step, known to every rank, in a fixed order.

    ``minibatches`` are index lists into ``sequences``; one optimizer step each. Denominators are always computed over a
    whole mini-batch (all data-parallel ranks, all microbatches), never over one rank's part.
    """

    step: int
    sequences: list[Sequence]  # [B]
    minibatches: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)
