r"""``math_reward``: whether a response's final answer equals the gold answer as mathematics.

Most answers are decided here in microseconds: equal spellings, plain numbers, words, and everything built of these.
The rest goes to math-verify in a worker process under hard limits. Text that a model wrote is never evaluated in the
calling process.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from megatron_rl.rewards.canonical import canonical
from megatron_rl.rewards.compare import same
from megatron_rl.rewards.extract import MAX_ANSWER_CHARS, final_answer, gold_answer
from megatron_rl.rewards.pool import WorkerPool

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S, DEFAULT_MEMORY_MIB = 5.0, 1024

MathTask = dict[str, str]


class _NeedsAlgebra(Exception):
    pass


def _defer(candidate: str, gold: str) -> bool:
    raise _NeedsAlgebra


def math_verdict(response: str, gold: str) -> float | MathTask:
    """1.0 or 0.0 where that needs no algebra, else the task to give to a worker. Never raises on two strings."""
    answer, reference = final_answer(response), gold_answer(gold)
    if answer is None or not reference:
        return 0.0
    if len(reference) > MAX_ANSWER_CHARS:
        return float(answer == reference)
    candidate, reference = canonical(answer), canonical(reference)
    try:
        return float(same(candidate, reference, _defer))
    except _NeedsAlgebra:
        return {"kind": "math", "candidate": candidate, "gold": reference}


_lock = threading.Lock()
_pool: tuple[int, WorkerPool] | None = None  # (process that owns it, the pool)


def _shared_pool() -> WorkerPool:
    """One worker for this process, started on first need; a forked child gets its own."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid():
            pool = WorkerPool(1, timeout_s=DEFAULT_TIMEOUT_S, memory_limit_mib=DEFAULT_MEMORY_MIB)
            _pool = (os.getpid(), pool)
            atexit.register(pool.close)
        return _pool[1]


def math_reward(response: str, gold_answer: str) -> float:
    r"""1.0 where the final answer of ``response`` equals ``gold_answer``, else 0.0.

    The final answer is the last ``\boxed{…}``, else what follows the last ``####``, else the last "answer is …", else a
    short response as a whole. Never raises, for any two values; takes at most ``DEFAULT_TIMEOUT_S`` of processor time.
    To score many responses use ``Rewarder``, which spreads them over several workers.
    """
    verdict = math_verdict("" if response is None else str(response), "" if gold_answer is None else str(gold_answer))
    if isinstance(verdict, float):
        return verdict
    try:
        return _shared_pool().run([verdict])[0].value
    except (OSError, RuntimeError) as error:
        logger.warning("math_reward: no worker process could be had, scoring 0: %s", error)
        return 0.0
