"""New weights inside a server: what has to happen between the last token of one policy and the first of the next.

Nothing can be sampled while this goes on, so every millisecond of it is one of the step. vLLM offers it as seven HTTP
calls, of which the one that pauses sleeps for 0.02 s; here it is one, and the engine is paused only where a response is
still under way. What becomes of that one, the update's mode says (`InFlightMode`).
"""

from __future__ import annotations

from typing import Any

from megatron_rl.rollout.servers.under_way import UnderWay


async def replace_weights(engine: Any, under_way: UnderWay, files: list[str], version: int, keep: bool = False) -> None:
    """Load ``files`` into all workers of ``engine`` (vLLM's AsyncLLM).

    ``keep``: responses under way go on, with the keys and values that they have; else they end with what they have. No
    prompt that comes later finds keys and values of older weights (`UnderWay`). Raises what vLLM raises, after all
    responses were ended, because nobody knows which weights are there.
    """
    try:
        await under_way.hold(keep)
        await engine.collective_rpc("replace_weights", args=(files,))
        await engine.update_weight_version(str(version))
    except BaseException:
        await under_way.drop()
        raise
    finally:
        await under_way.release(version)
