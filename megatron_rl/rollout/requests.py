"""From prompts to single requests: who samples what, and from which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_rl.process.ranks import gather_objects
from megatron_rl.types import Group, Prompt, Rollout

S = TypeVar("S", bound=Seq)


@dataclass(frozen=True)
class Request:
    """One response to be sampled."""

    row: int  # index of the prompt in the call
    prompt: Prompt
    sample: int  # 0 … G-1
    seed: int

    @property
    def sequence_id(self) -> str:
        """`types.Sequence.id` of what this becomes."""
        return f"{self.prompt.id}/{self.sample}"


def request_seed(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """The seed of one response: 63 bits of a hash of what identifies it.

    It does not depend on the engine, the rank or the neighbours in the batch, so that the same step sampled on
    another number of ranks draws the same random numbers.
    """
    key = f"{seed}/{step}/{sample}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def leg_seed(seed: int, leg: int) -> int:
    """The seed with which leg 1, 2, … of a response goes on that was cut; ``seed``: the response's own, of leg 0."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/leg {leg}".encode(), digest_size=8).digest(), "big") >> 1


def make_requests(prompts: list[Prompt], num_samples: int, *, seed: int, step: int) -> list[Request]:
    """All requests of a call, the samples of one prompt next to each other."""
    return [
        Request(row, prompt, sample, request_seed(seed, step, prompt.id, sample))
        for row, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def share_of(requests: S, engine: int, num_engines: int) -> S:
    """What engine number ``engine`` samples: every ``num_engines``-th request. Shares differ by one at most.

    Samples of one prompt have like lengths, so an engine that had them all would end early or late. In return a prompt
    is computed on up to min(samples, engines) engines, where one engine would find it in its prefix cache: one pass
    over a prompt on each, beside responses that are generated token by token. Responses do not depend on their engine
    (`request_seed`), except for the rounding of matrix products over batches of another shape.

    No engine takes over the work of another: which responses ran together would then depend on the engines' speed, and
    with it the rounding, so that a run could not be repeated bit for bit.
    """
    return requests[engine::num_engines]


def engines_of(num_requests: int, num_engines: int) -> list[int]:
    """The engine in whose `share_of` each request is."""
    return [number % num_engines for number in range(num_requests)]


def owners_of(num_requests: int, ranks: Seq[Seq[int]]) -> list[int]:
    """The rank that keeps the response to each request: the ranks of an engine take turns over its share.

    ``ranks``: of each engine.
    """
    engines = engines_of(num_requests, len(ranks))
    return [ranks[engine][number // len(ranks) % len(ranks[engine])] for number, engine in enumerate(engines)]


def consecutive_ranks(num_engines: int, ranks_per_engine: int) -> list[range]:
    """Of each engine, where engines have the ranks of the job in order."""
    return [
        range(first, first + ranks_per_engine) for first in range(0, num_engines * ranks_per_engine, ranks_per_engine)
    ]


def make_groups(prompts: list[Prompt], num_samples: int, rollouts: list[Rollout]) -> list[Group]:
    """Put rollouts, in the order of `make_requests`, back under their prompts."""
    assert len(rollouts) == len(prompts) * num_samples, f"{len(rollouts)} rollouts of {len(prompts)} × {num_samples}"
    return [Group(prompt, rollouts[row * num_samples : (row + 1) * num_samples]) for row, prompt in enumerate(prompts)]


def everywhere(groups: list[Group]) -> list[Group]:
    """``groups`` with every response whole on every rank: for tools, on batches small enough. Collective."""
    mine = [[r if r.tokens is not None else None for r in group.rollouts] for group in groups]
    shares = gather_objects(mine)
    for row, group in enumerate(groups):
        for place, rollout in enumerate(group.rollouts):
            if rollout.owner is not None:
                group.rollouts[place] = replace(shares[rollout.owner][row][place], owner=None)
    return groups
