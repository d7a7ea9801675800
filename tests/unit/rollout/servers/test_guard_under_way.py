"""Responses that are under way while a server's weights change: every token is said to be of the weights it is of.

The engine is made up: its tokens are the numbers of the weights that sampled them.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.guard import Overtaken, UnderWay
from megatron_rl.rollout.servers.server import replace_weights
from tests.support.made_up_engine import MadeUpEngine

LENGTH = 6


class Scene:
    """Some responses of one engine."""

    def __init__(self) -> None:
        self.engine = MadeUpEngine()
        self.under_way = UnderWay(self.engine)
        self.version = 0

    async def ask(self, number: int = 1, length: int = LENGTH) -> list[asyncio.Task]:
        asked = [
            asyncio.create_task(self.under_way.sample([1], SimpleNamespace(max_tokens=length), lambda: True))
            for _ in range(number)
        ]
        await self.settle()
        return asked

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def replace(self, keep: bool) -> None:
        self.version += 1
        await replace_weights(self.engine, self.under_way, {"files": ["f"]}, self.version, keep)

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.engine.step()


def play(scene):
    """The result of ``scene``, given a `Scene` in an event loop."""

    async def run():
        return await scene(Scene())

    return asyncio.run(run())


def told(response) -> tuple[str, list[int]]:
    """Finish reason, and tokens; what is said of their versions must be true."""
    completion, versions = response
    assert versions.tolist() == completion.token_ids
    return completion.finish_reason, completion.token_ids


def test_tokens_on_their_way_at_an_update_are_of_the_old_weights():
    """Three steps are sampled, none is processed; the update comes in between."""

    async def scene(s):
        asked = await s.ask(2)
        s.engine.may_process.clear()
        s.step(3)
        update = asyncio.create_task(s.replace(keep=True))
        await s.settle()
        assert not update.done()
        s.engine.may_process.set()
        await update
        s.step(3)
        return [told(response) for response in await asyncio.gather(*asked)]

    assert play(scene) == [("stop", [0, 0, 0, 1, 1, 1])] * 2


def test_a_response_that_ended_before_an_update_and_is_taken_after_it():
    """Its last output waits to be processed, or to be fetched from its queue."""

    async def scene(s):
        asked = await s.ask(1, length=2) + await s.ask(1, length=9)
        s.engine.may_process.clear()
        s.step(2)
        update = asyncio.create_task(s.replace(keep=True))
        await s.settle()
        s.engine.may_process.set()
        await update
        await s.replace(keep=True)
        s.step(7)
        return [told(response) for response in await asyncio.gather(*asked)]

    assert play(scene) == [("stop", [0, 0]), ("stop", [0, 0, *[2] * 7])]


def test_an_update_that_cuts_ends_every_response_with_what_it_has():
    async def scene(s):
        asked = await s.ask(2)
        s.step(4)
        await s.replace(keep=False)
        assert not s.engine.is_paused
        return [told(await response) for response in asked], s.engine.calls

    responses, calls = play(scene)
    assert responses == [("abort", [0] * 4)] * 2
    abort = ["abort response-0", "abort response-1"]
    assert calls == ["pause keep False", *abort, "replace_weights ['f']", "resume"]


def test_a_response_without_a_token_does_not_go_on():
    """Keys and values of its prompt came from the old weights, while all its tokens would be of the new."""

    async def scene(s):
        first = await s.ask()
        s.step()
        second = await s.ask()
        await s.replace(keep=True)
        s.step(LENGTH - 1)
        return told(await first[0]), told(await second[0])

    assert play(scene) == (("stop", [0, *[1] * (LENGTH - 1)]), ("abort", []))


def test_a_request_on_its_way_into_the_engine_is_waited_for():
    async def scene(s):
        first = await s.ask()
        s.step()
        s.engine.may_enter.clear()
        entering = await s.ask()
        update = asyncio.create_task(s.replace(keep=True))
        await s.settle()
        assert "pause keep False" not in s.engine.calls
        s.engine.may_enter.set()
        await update
        s.step(LENGTH - 1)
        return told(await first[0]), told(await entering[0])

    assert play(scene) == (("stop", [0, *[1] * (LENGTH - 1)]), ("abort", []))


def test_prompts_find_nothing_in_the_cache_that_older_weights_left():
    async def scene(s):
        for _ in range(2):
            asked = await s.ask(2, length=1)
            s.step()
            await asyncio.gather(*asked)
            await s.replace(keep=True)
        return [prompt["cache_salt"] for prompt, _, _ in s.engine.asked]

    assert play(scene) == ["0", "0", "1", "1"]


def test_an_idle_engine_is_not_paused():
    async def scene(s):
        asked = await s.ask(length=1)
        s.step()
        await asked[0]
        await s.replace(keep=True)
        return s.engine.calls

    assert play(scene) == ["replace_weights ['f']"]


def test_a_request_for_weights_that_are_gone():
    async def scene(s):
        with pytest.raises(Overtaken):
            await s.under_way.sample([1], SimpleNamespace(max_tokens=1), lambda: False)
        return s.engine.asked

    assert play(scene) == []


def test_an_update_that_fails_ends_responses_with_what_the_old_weights_sampled():
    """Nobody knows which weights are there: not one token more may come from them."""

    async def scene(s):
        asked = await s.ask()
        s.step(2)
        s.engine.fails = True
        with pytest.raises(RuntimeError, match="lost"):
            await s.replace(keep=True)
        return told(await asked[0]), s.engine.calls[-1]

    assert play(scene) == (("abort", [0, 0]), "resume")


def test_a_response_that_nobody_waits_for_is_aborted():
    async def scene(s):
        asked = await s.ask()
        s.step()
        await s.settle()
        asked[0].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await s.replace(keep=True)
        return s.engine.calls

    assert play(scene) == ["abort response-0", "replace_weights ['f']"]


def test_an_engine_whose_outputs_nobody_processes_fails_the_update():
    async def scene(s):
        asked = await s.ask()
        s.step()
        s.engine.output_handler.cancel()
        with pytest.raises(RolloutError, match="not processed any more"):
            await s.replace(keep=True)
        asked[0].cancel()

    play(scene)
