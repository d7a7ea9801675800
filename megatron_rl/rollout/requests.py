"""From prompts to single requests: who samples what, and from which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_rl.types import Group, Prompt, Rollout

S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True)
class Request:
    """One response to be sampled."""

    row: int  # index of the prompt in the call
    prompt: Prompt
    sample: int  # 0 … G-1
    seed: int


def request_seed(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """The seed of one response: 63 bits of a hash of what identifies it.

    It does not depend on the engine, the rank or the neighbours in the batch, so that the same step sampled on
    another number of ranks draws the same random numbers.
    """
    key = f"{seed}/{step}/{sample}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def make_requests(prompts: list[Prompt], num_samples: int, *, seed: int, step: int) -> list[Request]:
    """All requests of a call, the samples of one prompt next to each other (they share a cached prefix)."""
    return [
        Request(row, prompt, sample, request_seed(seed, step, prompt.id, sample))
        for row, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def share_of(requests: S, engine: int, num_engines: int) -> S:
    """The contiguous share of engine number ``engine``; shares differ by one request at most."""
    start, end = (len(requests) * index // num_engines for index in (engine, engine + 1))
    return requests[start:end]


def make_groups(prompts: list[Prompt], num_samples: int, rollouts: list[Rollout]) -> list[Group]:
    """Put rollouts, in the order of `make_requests`, back under their prompts."""
    assert len(rollouts) == len(prompts) * num_samples, f"{len(rollouts)} rollouts of {len(prompts)} × {num_samples}"
    return [Group(prompt, rollouts[row * num_samples : (row + 1) * num_samples]) for row, prompt in enumerate(prompts)]
