"""Batches and weights of one rank, in which order they reach servers: real sampler and pool, made-up servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout import RolloutError, Sampling
from megatron_rl.rollout.requests import make_requests
from megatron_rl.rollout.servers.client import Weights
from megatron_rl.rollout.servers.generator import Sampler
from megatron_rl.rollout.servers.weight_updates import WeightUpdates
from megatron_rl.types import Prompt, Rollout
from tests.unit.rollout.servers import test_dispatch_in_flight as in_flight

LENGTH = in_flight.LENGTH


class MadeUpServer(in_flight.MadeUpServer):
    """Without routes."""

    def _answer(self, body, tokens, reason):
        return replace(super()._answer(body, tokens, reason), routed_experts=None, route_checksums=None)


class Rank:
    """Batches of one rank under ``mode``, on one server with room for two responses. ``ended``: those that are done."""

    def __init__(self, mode: str, pool) -> None:
        fields = {"engine": "vllm_server", "max_num_seqs": 2, "max_staleness": 1, "in_flight": {"mode": mode}}
        servers = SimpleNamespace(members=pool, turn=asyncio.Lock(), fetchers=[0])
        self.turn, self.ended, self._number = servers.turn, [], 0
        self.announced: list[tuple[str, int]] = []  # prompt and number of responses
        self._sampler = Sampler(RolloutConfig.model_validate(fields), servers, None, [], None, dict)

    def begin(self, name: str, num_responses: int, version: int = 0, is_awaited: bool = False) -> asyncio.Task:
        self._number += 1
        requests = make_requests([Prompt(name, in_flight.PROMPT, "")], num_responses, seed=0, step=self._number)

        def listen(prompt: Prompt, rollouts: list[Rollout]) -> None:
            self.announced.append((prompt.id, len(rollouts)))

        work = self._sampler.sample(self._number, requests, Sampling(LENGTH), version, listen, is_awaited)
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.ended.append(name))
        return task


def play(mode: str, scene, monkeypatch):
    monkeypatch.setattr(in_flight, "MadeUpServer", MadeUpServer)

    async def with_rank(pool, servers, clock):
        return await scene(Rank(mode, pool), pool, servers["s0"], clock)

    return in_flight.play(with_rank, keeps=mode == "keep", number=1)


@pytest.mark.parametrize("mode", ["abort_and_resume", "keep"])
def test_a_batch_that_is_waited_for_goes_before_those_that_run_ahead(mode, monkeypatch):
    async def scene(rank, pool, server, clock):
        tasks = [rank.begin("ahead", 8)]
        await clock.tick()
        tasks.append(rank.begin("validation", 4, is_awaited=True))
        await clock.until(asyncio.gather(*tasks))
        return rank.ended

    assert play(mode, scene, monkeypatch) == ["validation", "ahead"]


@pytest.mark.parametrize("mode", ["abort_and_resume", "keep"])
def test_a_batch_that_is_waited_for_may_have_no_other_weights_and_one_that_runs_ahead_may(mode, monkeypatch):
    async def scene(rank, pool, server, clock):
        tasks = [rank.begin(name, 1, is_awaited=name == "validation") for name in ("validation", "ahead")]
        await clock.tick(4)
        await pool.push(Weights(1))
        answers = await clock.until(asyncio.gather(*tasks, return_exceptions=True))
        return answers

    validation, ahead = play(mode, scene, monkeypatch)
    assert isinstance(validation, RolloutError)
    assert "was sampled by policy version 1, expected 0" in str(validation)
    (rollout,) = ahead.rollouts
    assert set(rollout.policy_versions.tolist()) == {0, 1}
    assert (ahead.counts.versions, ahead.counts.legs) == (2, 1 if mode == "keep" else 2)


def test_responses_are_announced_as_they_come(monkeypatch):
    """Each once and alone, so that a judge need not wait for the longest of a group."""

    async def scene(rank, pool, server, clock):
        await clock.until(rank.begin("first", 3))
        await clock.until(rank.begin("second", 2))
        return rank.announced

    assert play("keep", scene, monkeypatch) == [("first", 1)] * 3 + [("second", 1)] * 2


def test_batches_and_weights_have_their_turns_under_finish(monkeypatch):
    async def scene(rank, pool, server, clock):
        async def push() -> None:
            async with rank.turn:
                await pool.push(Weights(1))
                rank.ended.append("weights")

        tasks = [rank.begin("first", 3)]
        await clock.tick()
        tasks += [asyncio.create_task(push())]
        await clock.tick()
        tasks += [rank.begin("second", 3, version=1)]
        return await clock.until(asyncio.gather(*tasks)), rank.ended

    (first, _, second), ended = play("finish", scene, monkeypatch)
    assert ended.index("weights") < ended.index("second")
    for share, version in ((first, 0), (second, 1)):
        assert {int(v) for rollout in share.rollouts for v in rollout.policy_versions} == {version}


def test_a_batch_whose_weights_are_gone_is_refused_under_finish(monkeypatch):
    async def scene(rank, pool, server, clock):
        await pool.push(Weights(1))
        with pytest.raises(RolloutError, match="policy version 1 was pushed before a batch of 0 was sampled"):
            await rank.begin("late", 1, version=0)
        return server.asked

    assert play("finish", scene, monkeypatch) == []


@pytest.mark.parametrize("mode", ["finish", "keep"])
def test_weights_that_servers_hold_are_not_sent_again_where_responses_would_be_cut_for_them(mode, tmp_path):
    fields = {"engine": "vllm_server", "max_num_seqs": 2, "max_staleness": 1, "in_flight": {"mode": mode}}
    servers, sent = SimpleNamespace(main=SimpleNamespace(is_this=True)), []
    updates = WeightUpdates(RolloutConfig.model_validate(fields), {}, servers, tmp_path, print)
    updates.broadcaster.refused = "this test"
    updates._send_files = lambda weights, version, num_begun: sent.append(version)
    done = [updates.send([], version, 0) for version in (1, 1, 2)]
    assert (sent, done) == (([1, 2], [True, False, True]) if mode == "keep" else ([1, 1, 2], [True] * 3))
