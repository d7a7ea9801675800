"""From an engine's answer to a `Rollout`, with the checks that make a wrong answer an error instead of a bad gradient.

Shape legend: ``P`` prompt tokens, ``R`` response tokens, ``L`` MoE layers, ``K`` experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.requests import Request
from megatron_rl.routing import RouteShape, missing_id, route_checksums
from megatron_rl.types import FINISH_REASONS, FinishReason, Rollout

# Above this a log-prob cannot be rounding: probabilities do not exceed one.
MAX_LOGPROB = 1e-4


@dataclass(frozen=True)
class SealedRoutes:
    """Routes of one response with the checksums that tie them to its tokens."""

    routes: np.ndarray  # [P + R - 1, L, K] of `RouteShape.dtype`
    checksums: np.ndarray  # [P + R - 1 + L] int64


def make_rollout(
    request: Request,
    tokens: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    finish_reason: str | None,
    policy_version: int | np.ndarray,
    routes: np.ndarray | SealedRoutes | None = None,
    architecture: Architecture | None = None,
    text: str = "",
) -> Rollout:
    """Check one response and wrap it. Raises `RolloutError` that names the prompt and sample.

    ``policy_version``: of the response, or [R] of each token. ``routes`` [P + R - 1, all layers, K] as the engine
    records them (see `seal_routes`), or sealed elsewhere. Absent where routes were not asked for, together with
    ``architecture``.
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
    sealed = None
    if isinstance(routes, SealedRoutes):
        sealed = _checked(where, request, len(tokens), routes, architecture)
    elif architecture is not None:  # sealed where the routes arrive, so that every later change is noticed
        sealed = seal_routes(where, request.sequence_id, request.prompt.tokens, tokens, routes, architecture)
    return Rollout(
        prompt_id=request.prompt.id,
        sample=request.sample,
        tokens=np.asarray(tokens, dtype=np.int32),
        inference_logprobs=inference_logprobs,
        finish_reason=finish_reason,
        policy_versions=np.full(len(tokens), policy_version, dtype=np.int32),
        routed_experts=None if sealed is None else sealed.routes,
        route_checksums=None if sealed is None else sealed.checksums,
        text=text,
    )


def elsewhere(request: Request, length: int, finish_reason: FinishReason) -> Rollout:
    """What a rank knows of a response that another one holds."""
    return Rollout(request.prompt.id, request.sample, None, None, finish_reason, None, length=length)


def seal_routes(
    where: str,
    sequence_id: str,
    prompt: Sequence[int],
    tokens: Sequence[int] | np.ndarray,
    routes: np.ndarray | None,
    architecture: Architecture,
    first_row: int = 0,
) -> SealedRoutes:
    """``routes`` [P + R - 1, all layers, K] as an engine records them, checked and sealed for ``sequence_id``.

    Rows are those of prompt and response tokens but the last, without the first ``first_row``. Dense layers are
    dropped. Rows of -1, the engine's "not recorded", become `missing_id`. Raises `RolloutError`, begun with ``where``,
    for routes that cannot be true.
    """
    expected = (len(prompt) + len(tokens) - 1 - first_row, architecture.num_layers, architecture.experts_per_token)
    if routes is None or routes.shape != expected:
        found = "none" if routes is None else routes.shape
        raise RolloutError(
            f"{where}: routes of shape {expected} (prompt + response - 1, layers, top-k) due, got {found}"
        )
    recorded = _of_experts(where, routes, RouteShape.of(architecture), architecture.num_layers)
    whole = np.concatenate([prompt, tokens])
    return SealedRoutes(recorded, route_checksums(sequence_id, whole, recorded, first_row))


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
    where: str, request: Request, num_tokens: int, sealed: SealedRoutes, architecture: Architecture | None
) -> SealedRoutes:
    """``sealed``, whose shape and type are those of the response; its seals are checked where routes are used."""
    assert architecture is not None, "routes that nobody asked for"
    shape = RouteShape.of(architecture)
    rows = len(request.prompt.tokens) + num_tokens - 1
    expected = (rows, len(shape.layers), shape.topk)
    found = (sealed.routes.shape, sealed.routes.dtype, sealed.checksums.shape)
    if found != (expected, shape.dtype, (rows + len(shape.layers),)):
        raise RolloutError(
            f"{where}: routes of shape {expected} (prompt + response - 1, MoE layers, top-k) and {shape.dtype} due, "
            f"with a checksum for each row and layer; got {found[0]} of {found[1]} with {found[2]} checksums"
        )
    return sealed


def _where(request: Request) -> str:
    return f"prompt {request.prompt.id!r}, sample {request.sample}"
