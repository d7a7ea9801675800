"""One response inside a server, from the body of a request to that of the answer.

vLLM's own route for token ids (`/inference/v1/generate`) makes several objects for every token. It takes 1.6 ms of
processor time for a response of 24 tokens, in the process that also passes on every token of the engine. Here a
response is two arrays.
"""

from __future__ import annotations

import base64
import io
import itertools
from typing import Any

import numpy as np

from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.sampling_params import sampled_tokens, sampling_params

MAX_STOP_TOKENS = 1024

_numbers = itertools.count()


async def sample(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Body: ``token_ids`` of the prompt, ``sampling_params`` (see `sampling_fields`). ``engine``: vLLM's AsyncLLM.

    Answer: ``tokens``; ``logprobs``, base64 of float32; ``finish_reason``; ``routes``, base64 of a .npy file, or null.
    Raises `ValueError`, `TypeError` or `KeyError` for what cannot be sampled, and what vLLM raises where the engine
    fails.
    """
    model = engine.model_config
    prompt = _checked_ids("token_ids", body["token_ids"], model.get_vocab_size(), model.max_model_len - 1)
    if not prompt:
        raise ValueError("token_ids: the prompt is empty")
    fields = body["sampling_params"]
    _checked_ids("stop_token_ids", fields.get("stop_token_ids", []), model.get_vocab_size(), MAX_STOP_TOKENS)
    params = sampling_params(fields)
    stream = engine.generate({"prompt_token_ids": prompt}, params, f"response-{next(_numbers)}")
    *_, last = [output async for output in stream]  # FINAL_ONLY: there is one
    (completion,) = last.outputs
    if completion.finish_reason == "error":
        raise RolloutError("the engine gave this response up")
    tokens, logprobs = sampled_tokens(completion)
    return {
        "tokens": tokens,
        "logprobs": base64.b64encode(np.asarray(logprobs, np.float32).tobytes()).decode(),
        "finish_reason": completion.finish_reason,
        "routes": None if completion.routed_experts is None else _npy(completion.routed_experts),
    }


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


def _npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
