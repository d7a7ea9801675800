"""One response on its way from a server to the trainer: a JSON head, and arrays as they lie in memory.

Neither side makes an object for every token. At 48 MoE layers and 8 experts a token weighs 392 bytes, nearly all of
them routes; what the trainer spends on one is a copy.

    length   of the head, 8 bytes, little-endian
    head     JSON: finish_reason; arrays [[name, dtype, shape], …], in the order in which they follow
    arrays   of a `Rollout`; whose it is, the request says

What a response says is checked once, where it becomes a rollout (`requests.make_rollout`); routes bear their seals.

How busy a server is, as it says of itself with every answer and with its settings.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from megatron_rl.types import Rollout

SETTINGS, WEIGHTS, GENERATE = "/megatron_rl/settings", "/megatron_rl/weights", "/megatron_rl/generate"
SCORE = "/megatron_rl/score"
MODELS, COMPLETIONS = "/v1/models", "/v1/completions"  # of other servers, for a teacher's log-probs
MEDIA_TYPE = "application/octet-stream"
# A connection that is idle is closed by the trainer, long before the server would: a request that meets a closing one
# fails unread, and a weight update that fails costs the run a server.
IDLE_S, SERVER_IDLE_S = 15, 60
ALIGNMENT = LENGTH_BYTES = 8


class Damaged(ValueError):
    """The bytes are not an answer."""


# Wider numbers first: all lie aligned.
_OF_HEADS = ("head_tokens", "head_logprobs")
_ARRAYS = ("route_checksums", "tokens", "inference_logprobs", "policy_versions", *_OF_HEADS, "routed_experts")


def pack(answer: Rollout) -> list[bytes | memoryview]:
    """The pieces of the body, in order. Arrays are not copied: they must not change until the pieces are sent."""
    arrays = {name: np.ascontiguousarray(array) for name in _ARRAYS if (array := getattr(answer, name)) is not None}
    described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = json.dumps({"finish_reason": answer.finish_reason, "arrays": described}).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    contents = (array.reshape(-1).view(np.uint8).data for array in arrays.values())
    return [len(head).to_bytes(LENGTH_BYTES, "little") + head, *(content for content in contents if len(content))]


def unpack(body: bytes | bytearray | memoryview) -> Rollout:
    """The answer whose arrays lie in ``body``. Raises `Damaged` where it is none, or not whole."""
    try:
        body = memoryview(body)
        end = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
        head, arrays = json.loads(bytes(body[LENGTH_BYTES:end])), {}
        for name, dtype, shape in head["arrays"]:
            arrays[name] = np.frombuffer(body, dtype, math.prod(shape), end if math.prod(shape) else 0).reshape(shape)
            end += arrays[name].nbytes
        answer = Rollout("", (), **arrays, finish_reason=head["finish_reason"])
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Damaged(f"no answer: {type(error).__name__}: {error}") from error
    lengths = (len(answer.tokens), len(answer.inference_logprobs), len(answer.policy_versions))
    if end != len(body) or len(set(lengths)) > 1:
        raise Damaged(f"{len(body)} bytes of {end}, with {lengths} tokens, log-probs and versions")
    return answer


LOAD_HEADER = "X-Server-Load"


@dataclass(frozen=True)
class Load:
    """Load of a server by all ranks' requests."""

    running: int = 0  # responses that the engine works on
    waiting: int = 0  # responses that wait for a place in it
    kv_usage: float = 0.0  # tokens of responses under way, shared prompts counted for each, of what the cache holds

    @property
    def queue(self) -> int:
        return self.running + self.waiting

    @classmethod
    def of(cls, text: str | dict[str, Any] | None) -> Load:
        """What a server sent; an empty one where it sent none."""
        values = json.loads(text) if isinstance(text, str) else text or {}
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


class Meter:
    """Inside a server. ``engine``: vLLM's AsyncLLM; None: counts of requests alone."""

    def __init__(self, engine: Any = None) -> None:
        self._engine, self.under_way = engine, 0  # requests

    def load(self) -> Load:
        if self._engine is None:
            return Load(running=self.under_way)
        places = self._engine.vllm_config.scheduler_config.max_num_seqs
        waiting = max(0, self.under_way - places)
        return Load(self.under_way - waiting, waiting, round(_kv_usage(self._engine), 4))

    def header(self) -> str:
        return json.dumps(asdict(self.load()))


def _kv_usage(engine: Any) -> float:
    cache = engine.vllm_config.cache_config
    room = (cache.num_gpu_blocks or 0) * cache.block_size
    states = engine.output_processor.request_states.values()
    held = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)
    return min(1.0, held / room) if room else 0.0
