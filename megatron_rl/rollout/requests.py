"""From prompts to single requests with their seeds, and from an engine's answers to rollouts that all ranks know.

An answer is checked before it becomes a `Rollout`: a wrong one is an error, not a bad gradient. A response's arrays
stay on the rank that owns it; the other ranks learn its length and how it ended.

Shapes: ``P`` prompt tokens, ``R`` response tokens, ``L`` MoE layers, ``K`` experts per token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from megatron_rl.model.architecture import Architecture
from megatron_rl.process.ranks import gather_objects, gather_rows, world_rank
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.routing import RouteShape, missing_id, route_checksums
from megatron_rl.types import FINISH_REASONS, MAX_LOGPROB, FinishReason, Group, Prompt, Rollout, sequence_id

S = TypeVar("S", bound=Seq)


@dataclass(frozen=True)
class Request:
    """One response to be sampled."""

    row: int  # index of the prompt in the call
    prompt: Prompt
    sample: int  # 0 … G-1
    seed: int
    occurrence: int = 0  # how often the same step had asked for this prompt before

    @property
    def sequence_id(self) -> str:
        """`types.Rollout.id` of what this becomes."""
        return sequence_id(self.prompt.id, self.sample, self.occurrence)


def request_seed(seed: int, step: int, prompt_id: str, sample: int, occurrence: int = 0) -> int:
    """The seed of one response: 63 bits of a hash of what identifies it.

    It does not depend on the engine, the rank or the neighbours in the batch, so that the same step sampled on
    another number of ranks draws the same random numbers. ``occurrence``: `Request.occurrence`; a prompt that comes
    twice in a step gets other random numbers the second time.
    """
    number = f"{sample}+{occurrence}" if occurrence else f"{sample}"
    key = f"{seed}/{step}/{number}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def leg_seed(seed: int, leg: int) -> int:
    """The seed with which leg 1, 2, … of a response goes on that was cut; ``seed``: the response's own, of leg 0."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/leg {leg}".encode(), digest_size=8).digest(), "big") >> 1


def make_requests(prompts: list[Prompt], num_samples: int, *, seed: int, step: int) -> list[Request]:
    """All requests of a call, the samples of one prompt next to each other.

    No two have the same seed or `Request.sequence_id`: a prompt that comes twice in the call counts its occurrences on
    from `Prompt.occurrence`, which has those of earlier calls for this step.
    """
    following: dict[str, int] = {}  # prompt id → the lowest occurrence that is left
    requests = []
    for row, prompt in enumerate(prompts):
        occurrence = max(prompt.occurrence, following.get(prompt.id, 0))
        following[prompt.id] = occurrence + 1
        requests += [
            Request(row, prompt, sample, request_seed(seed, step, prompt.id, sample, occurrence), occurrence)
            for sample in range(num_samples)
        ]
    return requests


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
    """Return the ranks of each engine; engines take the ranks of the job in order."""
    return [
        range(first, first + ranks_per_engine) for first in range(0, num_engines * ranks_per_engine, ranks_per_engine)
    ]


def make_groups(prompts: list[Prompt], num_samples: int, rollouts: list[Rollout]) -> list[Group]:
    """Put rollouts, in the order of `make_requests`, back under their prompts."""
    assert len(rollouts) == len(prompts) * num_samples, f"{len(rollouts)} rollouts of {len(prompts)} × {num_samples}"
    return [Group(prompt, rollouts[row * num_samples : (row + 1) * num_samples]) for row, prompt in enumerate(prompts)]


def everywhere(groups: list[Group]) -> list[Group]:
    """Return ``groups`` with every response whole on every rank: for tools, on batches small enough. Collective."""
    local_groups = [[r if r.tokens is not None else None for r in group.rollouts] for group in groups]
    shares = gather_objects(local_groups)
    for row, group in enumerate(groups):
        for place, rollout in enumerate(group.rollouts):
            if rollout.owner is not None:
                group.rollouts[place] = replace(shares[rollout.owner][row][place], owner=None)
    return groups


Sealed = tuple[np.ndarray, np.ndarray]
"""Routes [P + R - 1, L, K] of `RouteShape.dtype`, and the `route_checksums` that tie them to their tokens."""


def make_rollout(
    request: Request,
    tokens: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    finish_reason: str | None,
    policy_version: int | np.ndarray,
    routes: np.ndarray | Sealed | None = None,
    architecture: Architecture | None = None,
    text: str = "",
    kept_tokens: np.ndarray | None = None,
    head_tokens: np.ndarray | None = None,
    head_logprobs: np.ndarray | None = None,
    sampled: np.ndarray | None = None,
    num_turns: int = 1,
) -> Rollout:
    """Check one response and wrap it. Raises `RolloutError` that names the prompt and sample.

    ``policy_version``: of the response, or [R] of each token. ``routes`` [P + R - 1, all layers, K] as the engine
    records them, or what `seal_routes` made of them elsewhere. Absent where routes were not asked for, together with
    ``architecture``. The arguments after ``text``: as in `Rollout`.
    """
    where = _where(request)
    if finish_reason not in FINISH_REASONS:
        raise RolloutError(f"{where}: unknown finish reason {finish_reason!r}")
    if not len(tokens) or len(tokens) != len(logprobs):
        raise RolloutError(f"{where}: {len(tokens)} tokens came with {len(logprobs)} log-probs")
    inference_logprobs = np.asarray(logprobs, dtype=np.float32)
    if not (np.isfinite(inference_logprobs).all() and (inference_logprobs <= MAX_LOGPROB).all()):
        worst = int(np.argmax(~np.isfinite(inference_logprobs) | (inference_logprobs > MAX_LOGPROB)))
        raise RolloutError(f"{where}: log-prob {inference_logprobs[worst]} of response token {worst} is impossible")
    if head_logprobs is not None:
        _check_head(where, len(tokens), kept_tokens if head_tokens is None else head_tokens, head_logprobs)
    experts = checksums = None
    if isinstance(routes, tuple):
        experts, checksums = _checked(where, request, len(tokens), routes, architecture)
    elif architecture is not None:  # sealed on arrival, so that every later change is noticed
        experts, checksums = seal_routes(
            where, request.sequence_id, request.prompt.tokens, tokens, routes, architecture
        )
    return Rollout(
        id=request.sequence_id,
        prompt=request.prompt.tokens,
        tokens=np.asarray(tokens, dtype=np.int32),
        inference_logprobs=inference_logprobs,
        finish_reason=finish_reason,
        policy_versions=np.full(len(tokens), policy_version, dtype=np.int32),
        routed_experts=experts,
        route_checksums=checksums,
        kept_tokens=kept_tokens,
        head_tokens=head_tokens,
        head_logprobs=head_logprobs,
        sampled=sampled,
        num_turns=num_turns,
        text=text,
    )


def elsewhere(
    request: Request, length: int, finish_reason: FinishReason, num_sampled: int | None = None, num_turns: int = 1
) -> Rollout:
    """What a rank knows of a response that another one holds."""
    return Rollout(
        request.sequence_id,
        request.prompt.tokens,
        None,
        None,
        None,
        finish_reason,
        length=length,
        num_sampled=num_sampled,
        num_turns=num_turns,
    )


def _check_head(where: str, num_tokens: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    if tokens.shape != logprobs.shape or tokens.ndim != 2 or len(tokens) != num_tokens:
        raise RolloutError(
            f"{where}: {num_tokens} tokens came with heads of shape {tokens.shape} and log-probs of {logprobs.shape}"
        )
    if not (logprobs <= MAX_LOGPROB).all():
        raise RolloutError(f"{where}: log-prob {logprobs[~(logprobs <= MAX_LOGPROB)][0]} in a head is impossible")


def seal_routes(
    where: str,
    sequence_id: str,
    prompt: Sequence[int],
    tokens: Sequence[int] | np.ndarray,
    routes: np.ndarray | None,
    architecture: Architecture,
    first_row: int = 0,
) -> Sealed:
    """Return an engine's ``routes`` [P + R - 1, all layers, K], checked and sealed for ``sequence_id``.

    Rows are those of prompt and response tokens but the last, without the first ``first_row``. Dense layers are
    dropped. Rows of -1, the engine's "not recorded", become `missing_id`. Raises `RolloutError`, begun with ``where``,
    for routes that cannot be true.
    """
    expected = (len(prompt) + len(tokens) - 1 - first_row, architecture.num_layers, architecture.experts_per_token)
    if routes is None or routes.shape != expected:
        shape = "none" if routes is None else routes.shape
        raise RolloutError(
            f"{where}: routes of shape {expected} (prompt + response - 1, layers, top-k) due, got {shape}"
        )
    recorded = _of_experts(where, routes, RouteShape.of(architecture), architecture.num_layers)
    whole = np.concatenate([prompt, tokens])
    return recorded, route_checksums(sequence_id, whole, recorded, first_row)


def _of_experts(where: str, routes: np.ndarray, shape: RouteShape, num_layers: int) -> np.ndarray:
    """[P + R - 1, L, K] of `RouteShape.dtype`."""
    moe_routes = routes if len(shape.layers) == num_layers else routes[:, list(shape.layers)]
    if moe_routes.size and moe_routes.min() >= 0 and moe_routes.max() < shape.num_experts:
        return np.ascontiguousarray(moe_routes, dtype=shape.dtype)
    moe_routes = moe_routes.astype(np.int64)
    missing = (moe_routes == -1).all(axis=-1, keepdims=True)  # no record: the learner's router decides, and counts it
    wrong = ((moe_routes < 0) | (moe_routes >= shape.num_experts)) & ~missing
    if wrong.any():
        token, layer, k = (int(x) for x in np.argwhere(wrong)[0])
        raise RolloutError(
            f"{where}: token {token}, layer {shape.layers[layer]}: route to expert {moe_routes[token, layer, k]} of "
            f"{shape.num_experts}"
        )
    return np.where(missing, missing_id(shape.dtype), moe_routes).astype(shape.dtype)


def _checked(
    where: str, request: Request, num_tokens: int, sealed: Sealed, architecture: Architecture | None
) -> Sealed:
    """Return ``sealed`` if its shape and type are those of the response; its seals are checked where routes are
    used."""
    assert architecture is not None, "routes that nobody asked for"
    (routes, seals), shape = sealed, RouteShape.of(architecture)
    rows = len(request.prompt.tokens) + num_tokens - 1
    expected = (rows, len(shape.layers), shape.topk)
    if (routes.shape, routes.dtype, seals.shape) != (expected, shape.dtype, (rows + len(shape.layers),)):
        raise RolloutError(
            f"{where}: routes of shape {expected} (prompt + response - 1, MoE layers, top-k) and {shape.dtype} due, "
            f"with a checksum for each row and layer; got {routes.shape} of {routes.dtype} with {seals.shape} checksums"
        )
    return sealed


def _where(request: Request) -> str:
    return f"prompt {request.prompt.id!r}, sample {request.sample}"


def known_everywhere(requests: Sequence[Request], owners: Sequence[int], held: Sequence[Rollout]) -> list[Rollout]:
    """All responses in the order of the requests: whole on their owner, with length and end on the others.

    ``owners``: the rank that holds each, the same list on every rank. ``held``: this rank's, in order. Collective.
    """
    local_rollouts = iter(held)
    rollouts = [next(local_rollouts) if owner == world_rank() else None for owner in owners]
    rows = [(r.length, FINISH_REASONS.index(r.finish_reason), r.num_sampled, r.num_turns) for r in held]
    about = gather_rows(rows, owners, width=4).astype(int).tolist()
    for number, (request, owner, (length, reason, *turns)) in enumerate(zip(requests, owners, about, strict=True)):
        if rollouts[number] is None:
            rollouts[number] = elsewhere(request, length, FINISH_REASONS[reason], *turns)
        rollouts[number].owner = owner
    return rollouts
