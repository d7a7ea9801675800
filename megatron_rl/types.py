"""What flows through the loop: prompts become rollouts, rollouts become groups, groups become one batch.

Shape legend: ``P`` prompt tokens, ``R`` response tokens of one rollout, ``L`` MoE layers, ``K`` experts per token,
``G`` group size, ``B`` sequences of the step, ``T`` longest response of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One problem, already tokenized.

    Example: ``Prompt(id="train:17", tokens=[1, 65, 23], answer="3", text="^12=", data_source="modsum")``
    """

    id: str  # unique within its source: "<source name>:<row>"
    tokens: list[int]  # [P]
    answer: str  # gold answer as the source spells it
    text: str = ""  # what was tokenized, for logs and batches on disk
    data_source: str = ""  # chooses the reward where a recipe says `reward.name: by_source`
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Rollout:
    """One sampled response and everything the engine knows about it."""

    prompt_id: str
    sample: int  # 0 … G-1 within its group
    tokens: list[int]  # [R], the stop token included
    inference_logprobs: np.ndarray  # [R] float32, log mu of each sampled token
    finish_reason: FinishReason  # "stop": ended by itself; "length": cut at the limit; "abort": interrupted
    policy_versions: np.ndarray  # [R] int32, optimizer step of the weights each token was sampled from
    exact_logprobs: np.ndarray | None = None  # [R] float32, engine exact: log po as generation computed it
    routed_experts: np.ndarray | None = None  # [P + R - 1, L, K] uint8/uint16; the last sampled token has none
    route_checksums: np.ndarray | None = None  # [P + R - 1 + L] int64, per row, then per layer: `routing.checksum`
    text: str = ""  # decoded response, special tokens removed
    reward: float = 0.0  # after shaping; what advantages see
    raw_reward: float = 0.0  # before shaping: 1.0 = correct
    masked: bool = False  # kept in the group's baseline, left out of the loss (mask_truncated)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass
class Group:
    """All rollouts of one prompt, the unit over which advantages are centred."""

    prompt: Prompt
    rollouts: list[Rollout]  # [G]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


@dataclass
class Sequence:
    """One prompt + response as the learner sees it. ``S = P + R`` tokens."""

    id: str  # "<prompt id>/<sample>", the identity that route checksums and the flight recorder use
    tokens: np.ndarray  # [S] int64
    prompt_length: int  # P
    inference_logprobs: np.ndarray  # [R] float32
    loss_mask: np.ndarray  # [R] bool: trained tokens
    advantage: float
    reward: float
    policy_versions: np.ndarray  # [R] int32
    exact_logprobs: np.ndarray | None = None  # [R] float32, what log po must equal bit for bit under engine exact
    routed_experts: np.ndarray | None = None  # [S - 1, L, K]
    route_checksums: np.ndarray | None = None  # [S - 1 + L] int64, per row, then per layer: `routing.checksum`
    old_logprobs: np.ndarray | None = None  # [R] float32, log po; absent until (unless) computed
    current_logprobs: np.ndarray | None = None  # [R] float32, log pi of the update's forward pass, where it was kept

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass
class Batch:
    """The sequences of one step, the same on every rank, in a fixed order.

    ``minibatches`` are index lists into ``sequences``; one optimizer step each. Every denominator is taken over
    a whole mini-batch (all data-parallel ranks, all microbatches), never over what one rank happens to hold.
    """

    step: int
    sequences: list[Sequence]  # [B]
    minibatches: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)
