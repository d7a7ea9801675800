"""How busy a server is, as it says of itself with every answer and with its settings."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

LOAD_HEADER = "X-Server-Load"


@dataclass(frozen=True)
class Load:
    """Of all ranks' requests. Counts are since the server's start."""

    running: int = 0  # responses that the engine works on
    waiting: int = 0  # responses that wait for a place in it
    kv_usage: float = 0.0  # tokens of responses under way, shared prompts counted for each, of what the cache holds
    answered: int = 0  # responses
    tokens: int = 0  # of these responses
    busy_s: float = 0.0  # with at least one response under way
    prompt_tokens: int = 0  # of requests that were sampled
    cached_tokens: int = 0  # of these, found in the prefix cache

    @property
    def queue(self) -> int:
        return self.running + self.waiting

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.busy_s if self.busy_s else 0.0

    @property
    def prefix_hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @classmethod
    def of(cls, text: str | dict[str, Any] | None) -> Load:
        """What a server sent; an empty one where it is none."""
        try:
            found = json.loads(text) if isinstance(text, str) else dict(text or {})
            return cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})
        except (ValueError, TypeError):
            return cls()


class Meter:
    """Inside a server. ``engine``: vLLM's AsyncLLM, with its ``under_way``; None: counts of requests alone."""

    def __init__(self, engine: Any = None, under_way: Any = None) -> None:
        self._engine, self._under_way_there = engine, under_way
        self._under_way, self._answered, self._tokens, self._busy_s, self._since = 0, 0, 0, 0.0, 0.0

    def begin(self) -> None:
        self._since = time.monotonic() if not self._under_way else self._since
        self._under_way += 1

    def end(self, num_tokens: int | None) -> None:
        """A request is done with; ``num_tokens``: of its response, None where there is none."""
        self._under_way -= 1
        if not self._under_way:
            self._busy_s += time.monotonic() - self._since
        if num_tokens is not None:
            self._answered, self._tokens = self._answered + 1, self._tokens + num_tokens

    def load(self) -> Load:
        busy_s = self._busy_s + (time.monotonic() - self._since if self._under_way else 0.0)
        counts = {"answered": self._answered, "tokens": self._tokens, "busy_s": round(busy_s, 3)}
        if self._engine is None:
            return Load(running=self._under_way, **counts)
        places = self._engine.vllm_config.scheduler_config.max_num_seqs
        return Load(
            running=min(self._under_way, places),
            waiting=max(0, self._under_way - places),
            kv_usage=round(_kv_usage(self._engine), 4),
            prompt_tokens=self._under_way_there.num_prompt_tokens,
            cached_tokens=self._under_way_there.num_cached_tokens,
            **counts,
        )

    def header(self) -> str:
        return json.dumps(asdict(self.load()))


def _kv_usage(engine: Any) -> float:
    cache = engine.vllm_config.cache_config
    room = (cache.num_gpu_blocks or 0) * cache.block_size
    states = engine.output_processor.request_states.values()
    held = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)
    return min(1.0, held / room) if room else 0.0
