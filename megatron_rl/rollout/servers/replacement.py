"""New weights inside a server: what has to happen between the last token of one policy and the first of the next.

Nothing can be sampled while this goes on, so every millisecond of it is one of the step. vLLM offers it as seven HTTP
calls, of which the one that pauses sleeps for 0.02 s; here it is one, and the engine is paused only where a response is
still under way. What becomes of that one, the update's mode says (`InFlightMode`).
"""

from __future__ import annotations

from typing import Any

from megatron_rl.rollout.servers.under_way import UnderWay
from megatron_rl.rollout.servers.weight_group import GroupError


async def load(engine: Any, update: dict[str, Any]) -> dict[str, int]:
    """Load all weights of ``update`` (`extension.ServerUpdate`) into all workers of ``engine`` (vLLM's AsyncLLM).

    Returns ``tensors`` and ``bytes``, the same of every worker. Raises `GroupError` where a broadcast broke off, what
    vLLM raises where its engine is gone, else `RuntimeError`.
    """
    amounts = await engine.collective_rpc("replace_weights", args=(update,))
    for amount in amounts:
        if "error" in amount:
            raise (GroupError if amount["interrupted"] else RuntimeError)(amount["error"])
    if any(amount != amounts[0] for amount in amounts):
        raise RuntimeError(f"the workers of this server did not get the same: {amounts}")
    return amounts[0]


async def replace_weights(
    engine: Any, under_way: UnderWay, update: dict[str, Any], version: int, keep: bool = False
) -> dict[str, int]:
    """`load` ``update``, as ``version``; returns what it does.

    ``keep``: responses under way go on, with the keys and values that they have; else they end with what they have. No
    prompt that comes later finds keys and values of older weights (`UnderWay`). Raises what `load` raises, after all
    responses were ended, because nobody knows which weights are there.
    """
    try:
        await under_way.hold(keep)
        amount = await load(engine, update)
        await engine.update_weight_version(str(version))
        return amount
    except BaseException:
        await under_way.drop()
        raise
    finally:
        await under_way.release(version)
