"""A `rollout.function` is called with a stand-in for the engine, so that a wrong one is found before engines start."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.rollout.chat import NO_REQUEST
from megatron_rl.rollout.conversation import Client, Talk, Turn, converse
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.types import Prompt

PATIENCE_S = 5.0  # for all rehearsals together: tools that start processes or ask services may take longer


@dataclass
class StandIn:
    """Samples tokens of the prompt. A turn ends with a stop token, another one each time, or is filled (``fills``)."""

    prompt: list[int]
    fills: bool
    num_turns: int

    async def answer(self, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        stops, most = fields["stop_token_ids"], fields["max_tokens"]
        self.num_turns += 1
        if self.fills or not stops:
            sampled = (self.prompt * most)[:most]
        else:
            sampled = [*self.prompt[: min(most, 4) - 1], stops[self.num_turns % len(stops)]]
        return Turn(tokens, sampled, [-1.0] * len(sampled), "length" if self.fills or not stops else "stop")


def rehearse(talk: Talk, prompt: Prompt, sampling: Sampling, stops: list[int], vocab_size: int) -> str:
    """Hold three conversations without an engine and return how they went, in a sentence.

    Raises `InputError` where the function raises or breaks its contract. What depends on the machine is only said: a
    service or a file that is not here, a tool that takes longer than `PATIENCE_S`.
    """
    request = Request(0, prompt, 0, seed=0)
    ended: list[RolloutError | None] = []
    endpoints: list[int] = []

    def hold() -> None:
        for fills, num_turns in ((False, 0), (False, 1), (True, 0)):
            stand_in = StandIn(prompt.tokens, fills, num_turns)
            client = Client(talk, request, stand_in, sampling, stops, vocab_size)
            try:
                conversation = asyncio.run(converse(talk, client, request))
                ended.append(_refused(talk, conversation.refusal) if conversation.refusal else None)
                endpoints.append(client.num_endpoints)
            except RolloutError as error:
                ended.append(error)
            except (SystemExit, KeyboardInterrupt) as error:  # would end a run as well
                ended.append(RolloutError(f"rollout.function {talk.name}: {type(error).__name__}: {error}"))

    thread = threading.Thread(target=hold, daemon=True)  # a function that computes cannot be interrupted
    thread.start()
    thread.join(PATIENCE_S)
    for error in filter(None, ended):
        if isinstance(error.__cause__, OSError):
            return f"{talk.name}: not tried to its end: {error.__cause__}"
        raise InputError(f"{error} (called by `check` with tokens of the prompt in place of what a policy samples)")
    if thread.is_alive():
        return f"{talk.name}: not tried to its end, which took more than {PATIENCE_S:g} s"
    tried = f"{talk.name}: tried with three conversations without an engine"
    if talk.chat is None or not any(endpoints):
        return tried
    return "; ".join([tried, *(f"endpoint: {why}" for why in talk.chat.rewrites.values())])


def _refused(talk: Talk, refusal: str) -> RolloutError:
    error = RolloutError(f"rollout.function {talk.name}: its program got no answer: {refusal}")
    if refusal == NO_REQUEST:  # the program may be at home on another machine
        error.__cause__ = OSError(refusal)
    return error
