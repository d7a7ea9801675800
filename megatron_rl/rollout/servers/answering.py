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

_numbers = itertools.count()


async def sample(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Body: ``token_ids`` of the prompt, ``sampling_params`` (see `sampling_fields`). ``engine``: vLLM's AsyncLLM.

    Answer: ``tokens``; ``logprobs``, base64 of float32; ``finish_reason``; ``routes``, base64 of a .npy file, or null.
    Raises `ValueError` or `TypeError` for what vLLM refuses, and what vLLM raises where the engine fails.
    """
    params = sampling_params(body["sampling_params"])
    stream = engine.generate({"prompt_token_ids": body["token_ids"]}, params, f"response-{next(_numbers)}")
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


def _npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
