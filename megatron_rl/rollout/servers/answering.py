"""One response inside a server, from the body of a request to that of the answer.

vLLM's own route for token ids (`/inference/v1/generate`) makes several objects for every token. It takes 1.6 ms of
processor time for a response of 24 tokens, in the process that also passes on every token of the engine. Here a
response is a few arrays, and travels as such (`wire`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.payload import seal_routes
from megatron_rl.rollout.sampling_params import sampled_tokens, sampling_params
from megatron_rl.rollout.servers.under_way import UnderWay
from megatron_rl.rollout.servers.wire import Answer

MAX_STOP_TOKENS = 1024


async def sample(
    engine: Any,
    under_way: UnderWay,
    architecture: Architecture | None,
    body: dict[str, Any],
    is_open: Callable[[], bool] = lambda: True,
) -> Answer:
    """One response of ``engine`` (vLLM's AsyncLLM). ``is_open``: whether it holds the weights that were asked for.

    Body: ``token_ids`` of the prompt; ``sampling_params`` (see `sampling_fields`); where routes are wanted,
    ``wants_routes`` and the ``id`` of the sequence that they are sealed for, and ``first_route``, the position from
    which on (default 0). ``architecture``: of an engine that records routes. Raises `ValueError`, `TypeError` or
    `KeyError` for what cannot be sampled, `Overtaken`, and what vLLM raises where the engine fails.
    """
    model = engine.model_config
    prompt = _checked_ids("token_ids", body["token_ids"], model.get_vocab_size(), model.max_model_len - 1)
    if not prompt:
        raise ValueError("token_ids: the prompt is empty")
    fields = body["sampling_params"]
    _checked_ids("stop_token_ids", fields.get("stop_token_ids", []), model.get_vocab_size(), MAX_STOP_TOKENS)
    params = sampling_params(fields)
    sequence_id = str(body["id"]) if architecture is not None and body.get("wants_routes") else None
    first_route = _checked_row(body.get("first_route", 0), len(prompt))
    if sequence_id is not None:
        params.routed_experts_prompt_start = first_route
    completion, versions = await under_way.sample(prompt, params, is_open)
    if completion.finish_reason == "error":
        raise RolloutError("the engine gave this response up")
    sampled, logprobs = sampled_tokens(completion)
    tokens, sealed = np.asarray(sampled, np.int32), None
    if sequence_id is not None and len(tokens):
        routes = completion.routed_experts
        # In a thread: at 8k tokens it takes 10 ms, in which the loop passes other responses' tokens on.
        sealed = await asyncio.to_thread(
            seal_routes, sequence_id, sequence_id, prompt, tokens, routes, architecture, first_route
        )
    return Answer(
        tokens=tokens,
        logprobs=np.asarray(logprobs, np.float32),
        versions=versions,
        finish_reason=completion.finish_reason,
        routes=None if sealed is None else sealed.routes,
        route_checksums=None if sealed is None else sealed.checksums,
    )


def _checked_ids(name: str, ids: Any, vocab_size: int, limit: int) -> list[int]:
    """``ids``, a list of at most ``limit`` token ids below ``vocab_size``; else `ValueError`.

    vLLM without a tokenizer checks none of it, and an id that is not in the vocabulary ends the engine.
    """
    if not isinstance(ids, list) or len(ids) > limit:
        found = f"{len(ids)} of them" if isinstance(ids, list) else type(ids).__name__
        raise ValueError(f"{name}: expected a list of at most {limit} token ids, found {found}")
    array = np.asarray(ids) if ids else np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind != "i":
        raise ValueError(f"{name}: expected whole numbers, found {array.dtype.name} of {array.ndim} dimensions")
    if ids and not 0 <= array.min() <= array.max() < vocab_size:
        outside = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"{name}: {outside} is outside the vocabulary (0 … {vocab_size - 1})")
    return ids


def _checked_row(row: Any, prompt_length: int) -> int:
    if type(row) is not int or not 0 <= row < prompt_length:
        raise ValueError(f"first_route: expected a position in the prompt of {prompt_length} tokens")
    return row
