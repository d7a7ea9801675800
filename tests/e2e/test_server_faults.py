"""Every fault of real servers that docs/reliability.md lists, under each mode of `rollout.in_flight`, while responses
are under way: each response is there once, whole, and every token is of the weights that are said to have sampled it.

Servers are started once, and again where they were killed; a scene with two servers waits for that.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from megatron_rl.errors import InputError
from megatron_rl.rollout.generator import RolloutError, RolloutInterrupted
from megatron_rl.rollout.servers import weight_broadcast, weight_updates
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.servers.pool import Member
from megatron_rl.rollout.servers.rendezvous import folder, publish, read
from megatron_rl.rollout.servers.weight_broadcast import GroupError
from megatron_rl.types import Group
from tests.e2e import in_flight
from tests.e2e.in_flight import (
    TOKEN,
    assert_sampled_as_said,
    flat,
    generator_on,
    prompts,
    recorded_legs,
    served_recipe,
    two_models,
    update,
    wait,
    weights,
)
from tests.support.forked_servers import ForkedServers
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tests.support.zygote import zygote

LENGTH = 72
MODES = ("finish", "abort_and_resume", "keep")
MIDDLE = 70  # tensors of an update; chunks are small, so that some have been sent before


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return two_models(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "served"
    recipe, file = served_recipe(run_dir, LENGTH)
    local = ForkedServers(2, file, run_dir, TOKEN)
    with pytest.MonkeyPatch.context() as patch, recorded_legs():
        patch.setattr(weight_broadcast, "CHUNK_BYTES", {"cpu": 1 << 14})
        yield run_dir, recipe, local
    local.close()


@pytest.fixture(scope="module", params=slow_but(["abort_and_resume"], MODES))
def generator(request, servers):
    run_dir, recipe, local = servers
    local.relaunch(print)  # what the mode before has killed at its end
    made = generator_on(run_dir, recipe, request.param, weights="broadcast")
    made._servers._local, made._servers._relaunches = local, True
    for name in made._servers.pool.members:
        local.came_up(name)  # they joined before ``made`` knew whose they are
    yield made
    made._servers._local = None  # the next mode's
    made.close()


@pytest.fixture
def both(generator, models) -> tuple[Member, Member]:
    """The servers, when both are there and hold the newest weights."""
    pool, broadcast = generator._servers.pool, generator._updates.broadcaster
    broadcast.refused = ""
    wait(generator, lambda: sum(not member.lost for member in pool.members.values()) == 2)
    while len(pool.ready) < 2:
        update(generator, models)
    return tuple(pool.ready)


class Asked:
    """A batch that was begun by the weights of the moment, and what must come of it."""

    def __init__(self, generator: ServerGenerator, seed: int) -> None:
        self.generator, self.begun_with = generator, generator.version
        self.ticket = generator.begin(prompts(5, seed), 2, policy_version=generator.version, step=seed)

    def until_at(self, *members: Member) -> Asked:
        """Wait until each of ``members`` has some of it."""
        for member in members:
            wait(self.generator, lambda member=member: member.in_flight > 0 or self.ticket.answers.done())
        return self

    def assert_once_and_as_said(self, models: list[Path]) -> None:
        groups = self.generator.finish(self.ticket)
        assert [(prompt.id, rollout.sample) for prompt, rollout in flat(groups)] == [
            (prompt.id, sample) for prompt in self.ticket.prompts for sample in range(2)
        ]
        assert_as_said(self.generator, models, groups, self.begun_with)


def assert_as_said(
    generator: ServerGenerator,
    models: list[Path],
    groups: list[Group],
    begun_with: int,
    last_with: int | None = None,
    newest: int | None = None,
) -> None:
    """``begun_with``, ``last_with``: weights with which the first and the last of ``groups`` were begun; ``newest``:
    the last that servers were given, the generator's own by default."""
    assert {(rollout.length, rollout.finish_reason) for _, rollout in flat(groups)} == {(LENGTH, "length")}
    versions = np.concatenate([rollout.policy_versions for _, rollout in flat(groups)])
    last_with = begun_with if last_with is None else last_with
    newest = generator.version if newest is None else newest
    newest = last_with if generator._config.in_flight.mode == "finish" else newest
    assert begun_with <= versions.min() <= versions.max() <= newest
    assert_sampled_as_said(generator, models, groups)


class Disturbed:
    """Weights that can be sent again; in the middle of the first time something happens."""

    def __init__(self, items, happens: Callable[[], None]) -> None:
        self._items, self._happens, self._is_first = items, happens, True

    def __iter__(self) -> Iterator:
        is_first, self._is_first = self._is_first, False
        for number, item in enumerate(self._items):
            if is_first and number == MIDDLE:
                self._happens()
            yield item


def disturbed_update(generator: ServerGenerator, models: list[Path], happens: Callable[[], None]) -> None:
    generator.refit(Disturbed(weights(models, generator.version + 1), happens), generator.version + 1)
    generator.version += 1


def engine_of(member: Member) -> int:
    """The process in which the server's engine samples and takes weights."""
    pid = member.address.pid
    (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return child


class TestFaults:
    def test_a_server_that_cannot_load_new_weights_is_lost_until_it_can(self, generator, models, both, monkeypatch):
        victim, other = both
        push = victim.client.push
        monkeypatch.setattr(
            victim.client, "push", lambda new: push(replace(new, files=("/absent.safetensors",), broadcast=None))
        )
        asked = Asked(generator, 3).until_at(*both)
        update(generator, models)
        assert "/megatron_rl/weights: status 500" in victim.lost
        assert not other.lost
        asked.assert_once_and_as_said(models)

    def test_a_learner_that_fails_in_an_update_leaves_servers_closed_until_one_is_whole(self, generator, models, both):
        def breaks_off():
            yield from itertools.islice(weights(models, generator.version + 1), MIDDLE)
            raise RuntimeError("the learner failed")

        asked = Asked(generator, 4).until_at(*both)
        with pytest.raises(RuntimeError, match="the learner failed"):
            generator.refit(breaks_off(), generator.version + 1)
        assert not generator._servers.pool.ready
        update(generator, models)
        asked.assert_once_and_as_said(models)

    def test_a_trainer_that_is_killed_in_an_update_leaves_servers_that_go_on(self, generator, models, both, tmp_path):
        """Another trainer's: what it left is thrown away, and servers are given the weights that are due again, from
        files."""
        generator._updates.broadcaster.refused = "this test"
        update(generator, models)
        wait(generator, lambda: len(generator._servers.pool.ready) == 2)
        asked = Asked(generator, 5).until_at(*both)
        call = {"name": "tests.e2e.programs.dying_trainer"}
        call["arguments"] = [str(MODEL), TOKEN, *(member.address.url for member in both)]
        died = zygote().start("tests.support.zygote", "run_module", call, log=tmp_path / "log")
        assert died.wait() == -signal.SIGKILL, died.output
        asked.assert_once_and_as_said(models)
        update(generator, models)  # one of them may be closed, unasked, and nobody knows

    def test_where_no_group_can_be_formed_weights_go_through_files(self, generator, models, both, monkeypatch):
        def unreachable(urls):
            raise GroupError("servers reach this machine at different addresses")

        generator._updates.broadcaster.close()
        monkeypatch.setattr(weight_updates, "address_for", unreachable)
        asked = Asked(generator, 6).until_at(*both)
        update(generator, models)
        assert generator._updates.broadcaster.refused == "servers reach this machine at different addresses"
        asked.assert_once_and_as_said(models)

    def test_weights_in_files_that_find_no_room_are_an_error_and_change_no_server(
        self, generator, models, both, monkeypatch
    ):
        def no_room(*_):
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(weight_updates, "save_file", no_room)
        generator._updates.broadcaster.refused = "this test"
        asked = Asked(generator, 7).until_at(*both)
        with pytest.raises(RolloutError, match=r"weights for the servers could not be written to .*No space"):
            generator.refit(stream := iter(weights(models, generator.version + 1)), generator.version + 1)
        assert list(stream) == []  # read to its end: on several ranks every tensor is collective
        asked.assert_once_and_as_said(models)
        assert generator.stats()["rollout/requeued"] == 0

    def test_a_server_whose_engine_hangs_in_an_update_comes_back_when_that_has_ended(
        self, generator, models, both, monkeypatch
    ):
        victim, engine = both[0], engine_of(both[0])
        generator._updates.broadcaster.close()  # so that the group is made anew, with these limits
        monkeypatch.setattr(generator._updates.broadcaster, "_stall_s", 3.0)
        monkeypatch.setattr(weight_updates, "GRACE_S", 1.0)
        asked = Asked(generator, 8).until_at(*both)
        try:
            disturbed_update(generator, models, lambda: os.kill(engine, signal.SIGSTOP))
            assert victim.lost
            asked.assert_once_and_as_said(models)
            assert victim is generator._servers.pool.members[victim.address.name], "it has not come back yet"
        finally:
            os.kill(engine, signal.SIGCONT)
        monkeypatch.undo()
        wait(generator, lambda: not any(member.lost for member in generator._servers.pool.members.values()))

    def test_a_server_that_dies_in_an_update_costs_the_others_nothing_but_time(self, generator, models, both):
        victim, other = both
        asked = Asked(generator, 11).until_at(*both)
        disturbed_update(generator, models, lambda: os.kill(victim.address.pid, signal.SIGKILL))
        assert victim.lost
        assert other in generator._servers.pool.ready
        asked.assert_once_and_as_said(models)

    def test_with_no_server_left_a_stop_ends_the_wait_and_the_time_limit_is_one_clear_error(
        self, generator, both, monkeypatch
    ):
        """One is killed, of the other the engine's process."""
        pool = generator._servers.pool
        generator._servers._relaunches = False
        last = [engine_of(both[0]), both[1].address.pid]
        for process in last:
            os.kill(process, signal.SIGSTOP)  # no response is whole before they die
        asked = Asked(generator, 12).until_at(*both)
        for process in last:
            os.kill(process, signal.SIGKILL)
        wait(generator, lambda: all(member.lost for member in pool.members.values()))
        monkeypatch.setattr(pool, "_stop", lambda: True)
        with pytest.raises(RolloutInterrupted):
            generator.finish(asked.ticket)
        monkeypatch.undo()
        monkeypatch.setattr(pool._limits, "wait_s", 0.5)
        with pytest.raises(RolloutError, match=r"waited 0\.5 s .*2 of 2 responses are not there yet.* is lost"):
            generator.rollout(prompts(1, 13), 2, policy_version=generator.version, step=13)
        processes = generator._servers._local._processes.values()
        wait(generator, lambda: all(process.poll() is not None for process in processes))  # the next mode's start


def on_same_servers(servers, tmp_path: Path, model: Path | None = None) -> None:
    run_dir = tmp_path / "run"
    for path in sorted(folder(servers[0]).glob("*.json")):
        publish(run_dir, read(path))
    recipe = servers[1]
    if model is not None:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})
    generator_on(run_dir, recipe, "finish", wait_s=3.0, health_every_s=0.2).close()


def test_a_run_of_another_token_or_model_gets_no_answer(servers, models, tmp_path, monkeypatch):
    """Shapes of the other model are the same: version 0 would be of other weights than the learner starts from."""
    servers[2].relaunch(print)
    while len(list(folder(servers[0]).glob("*.json"))) < 2:
        servers[2].check()
        time.sleep(0.2)
    with pytest.raises(InputError, match=r"server local-[01]: weights: the server has '.*', the recipe says '"):
        on_same_servers(servers, tmp_path / "model", models[1])
    monkeypatch.setattr(in_flight, "TOKEN", "another-token-of-this-test")
    with pytest.raises(RolloutError, match=r"0 can be used; local-[01] is not used \(.*status 401"):
        on_same_servers(servers, tmp_path / "token")
