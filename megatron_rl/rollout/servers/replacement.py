"""New weights inside a server: what has to happen between the last response of one policy and the first of the next.

Nothing can be sampled while this goes on, so every millisecond of it is one of the step. vLLM offers it as seven HTTP
calls, of which the one that pauses sleeps for 0.02 s; here it is one, and the engine is paused only where a response is
still under way, which the trainer has given up.
"""

from __future__ import annotations

import asyncio
from typing import Any

RESET_ATTEMPTS, RESET_PAUSE_S = 20, 0.1  # requests that were just aborted hold their cache blocks a moment longer


async def replace_weights(engine: Any, files: list[str], version: int) -> None:
    """Load ``files`` into all workers of ``engine`` (vLLM's AsyncLLM), and empty its prefix cache.

    Raises what vLLM raises, and `RuntimeError` where requests that cannot be ended keep the old policy's cache alive.
    """
    paused = False
    try:
        if engine.output_processor.has_unfinished_requests():
            paused = True
            await engine.pause_generation(mode="abort")
        await engine.collective_rpc("replace_weights", args=(files,))
        await engine.update_weight_version(str(version))
        for _ in range(RESET_ATTEMPTS):
            if await engine.reset_prefix_cache():
                return
            if not paused:  # a request came in between: it had passed the guard already
                paused = True
                await engine.pause_generation(mode="abort")
            await asyncio.sleep(RESET_PAUSE_S)
        raise RuntimeError("the prefix cache could not be emptied after a weight update")
    finally:
        if paused:
            await engine.resume_generation()
