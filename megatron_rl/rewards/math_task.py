r"""``math_reward``: whether a response's final answer equals the gold answer as mathematics.

Most answers are decided here in a few hundred microseconds: equal spellings, rational numbers, words, and combinations
of these. A worker process compares the rest by values with many digits, under hard limits in addition to the bounds of
the comparison.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Any

from megatron_rl.rewards.compare import same
from megatron_rl.rewards.extract import MAX_ANSWER_CHARS, final_answer, gold_answer
from megatron_rl.rewards.pool import WorkerPool
from megatron_rl.rewards.values import Algebra, NeedsWorker

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S, DEFAULT_MEMORY_MIB = 5.0, 1024

MathTask = dict[str, Any]

_EXACT = Algebra()


def math_verdict(response: str, gold: str, accept_unevaluated: bool = False) -> float | MathTask:
    """Return 1.0 or 0.0 if fractions decide, else the task for a worker. Never raises for two strings."""
    answer, reference = final_answer(response), gold_answer(gold)
    if answer is None or not reference:
        return 0.0
    if len(reference) > MAX_ANSWER_CHARS:
        return float(answer == reference)
    try:
        return float(same(answer, reference, _EXACT, accept_unevaluated))
    except NeedsWorker:
        return {"kind": "math", "candidate": answer, "gold": reference, "accept_unevaluated": accept_unevaluated}


_lock = threading.Lock()
_pool: tuple[int, WorkerPool] | None = None  # (process that owns it, the pool)


def _shared_pool() -> WorkerPool:
    """Return this process's pool of one worker, started when first needed; a forked child gets its own."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid():
            pool = WorkerPool(1, timeout_s=DEFAULT_TIMEOUT_S, memory_limit_mib=DEFAULT_MEMORY_MIB)
            _pool = (os.getpid(), pool)
            atexit.register(pool.close)
        return _pool[1]


def math_reward(response: str, gold_answer: str, *, accept_unevaluated: bool = False) -> float:
    r"""Return 1.0 if the final answer of ``response`` equals ``gold_answer``, else 0.0.

    The final answer is the last ``\boxed{…}`` after the last ``</think>``, else the text after the last ``####``, else
    after the last "answer is …", else the whole of a short response. ``accept_unevaluated``: also accept an answer with
    a computation left to do (``1234\times 5678`` or ``\log_2 1024`` for their values). Never raises; takes at most
    ``DEFAULT_TIMEOUT_S`` of processor time. To score many responses use ``Rewarder``, which spreads them over workers.
    """
    texts = ["" if value is None else str(value) for value in (response, gold_answer)]
    verdict = math_verdict(*texts, accept_unevaluated)
    if isinstance(verdict, float):
        return verdict
    try:
        return _shared_pool().run([verdict])[0].value
    except (OSError, RuntimeError) as error:
        logger.warning("math_reward: no worker process could be started, scoring 0: %s", error)
        return 0.0
