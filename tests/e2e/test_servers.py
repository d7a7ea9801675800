"""Two real servers: what they answer, that updates reach them bit for bit, who may talk to them, and what happens when
they die. They are started once; the tests run in order, and the last ones kill them.

For the slow ones, which kill trainers and servers, stands test_server_faults.py with the same faults; for the run that
samples ahead, test_server_resume.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import OversampleConfig
from megatron_rl.data import PromptSampler, PromptSet
from megatron_rl.rollout import RolloutError, Sampling
from megatron_rl.rollout.conversation import load_talk
from megatron_rl.rollout.servers import weight_broadcast, weight_updates
from megatron_rl.rollout.servers.client import ServerClient
from megatron_rl.rollout.servers.dispatch import TalkLoop
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.servers.guard import GENERATE
from megatron_rl.rollout.servers.rendezvous import Address, folder, read
from megatron_rl.rollout.servers.weight_broadcast import GroupError
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.rollout.weights import parameter_checksums
from megatron_rl.routing import route_checksums
from megatron_rl.run.lookahead import Oversampling
from megatron_rl.types import Group, Prompt
from tests.e2e.hf_reference import assert_same as assert_same_by
from tests.e2e.hf_reference import flat
from tests.e2e.in_flight import wait
from tests.support.patience import PATIENCE_S
from tests.support.tiny import DATA, MODEL, REPOSITORY, tiny_recipe
from tests.support.zygote import run_command
from tools.dev.make_tiny_checkpoint import build_tokenizer

TOKEN = "token-of-the-servers-in-this-test"
ROLLOUT = {"dtype": "fp32", "max_response_length": 24, "kv_cache_gib": 0.0625}
SERVERS = {"weights": "broadcast", "launch": 2, "health_every_s": 0.5, "wait_s": 550.0}


def prompts(number: int) -> list[Prompt]:
    tokenizer = build_tokenizer()
    rows = [json.loads(line) for line in (DATA / "validation.jsonl").read_text().splitlines()[:number]]
    return [Prompt(id=row["id"], tokens=tokenizer.encode(row["problem"]), answer=row["answer"]) for row in rows]


def perturbed(seed: int) -> dict[str, torch.Tensor]:
    """The trained weights, each tensor moved by a tenth of its own spread."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in HFFolder(MODEL).items()
    }


def assert_same(first: list[Group], second: list[Group]) -> None:
    assert_same_by(first, second, Sampling(ROLLOUT["max_response_length"]))


class TestTwoServers:
    @pytest.fixture(scope="class")
    def run_dir(self, tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("run") / "served"

    @pytest.fixture(scope="class")
    def generator(self, run_dir):
        rollout = {**ROLLOUT, "engine": "vllm_server", "max_staleness": 1, "servers": SERVERS}
        recipe = tiny_recipe(name=run_dir.name, run_root=str(run_dir.parent), rollout=rollout, routing={"replay": "r3"})
        run_dir.mkdir()
        file = run_dir / "recipe.resolved.yaml"
        file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MRL_SERVER_TOKEN", TOKEN)
            generator = ServerGenerator(
                recipe.rollout, MODEL, max_prompt_length=16, run_dir=run_dir, recipe_file=file, record_routes=True
            )
        yield generator
        generator.close()
        assert list(folder(run_dir).glob("*.json")) == []  # the servers have left, and their weights with them
        assert not (folder(run_dir) / "weights").exists()

    @pytest.fixture(scope="class")
    def fresh(self, generator, tmp_path_factory):
        """An engine in this process that was started from the weights of version 2."""
        checkpoint = tmp_path_factory.mktemp("v2") / "model"
        shutil.copytree(MODEL, checkpoint)
        save_file(perturbed(2), checkpoint / "model.safetensors", metadata={"format": "pt"})
        config = RolloutConfig.model_validate({**ROLLOUT, "verify_refit": False})
        engine = VllmGenerator(config, checkpoint, max_prompt_length=16, record_routes=True)
        yield engine
        engine.close()

    @pytest.fixture
    def chunks(self, generator, monkeypatch):
        """Small ones, so that an update has a middle."""
        generator._updates.broadcaster.close()
        monkeypatch.setattr(weight_broadcast, "CHUNK_BYTES", {"cpu": 1 << 14})
        yield
        generator._updates.broadcaster.close()

    def test_updated_servers_equal_a_fresh_engine(self, generator, fresh):
        initial = generator.rollout(prompts(8), 4, policy_version=0, step=0)
        assert "perf/push_s" not in generator.stats()
        for version in (1, 2):
            generator.refit(perturbed(version).items(), version)
        groups = generator.rollout(prompts(16), 8, policy_version=2, step=0)
        assert 0.0 < generator.stats()["perf/push_s"] < generator.start_s
        assert_same(groups, fresh.rollout(prompts(16), 8, policy_version=0, step=0))
        assert flat(groups, "tokens")[:32] != flat(initial, "tokens")
        assert {int(version) for versions in flat(groups, "policy_versions") for version in versions} == {2}
        sampling = Sampling(10, temperature=1.3, top_k=3)
        again = [
            engine.rollout(prompts(4), 4, policy_version=version, step=1, sampling=sampling)
            for engine, version in ((generator, 2), (fresh, 0))
        ]
        assert_same(*again)
        assert set(flat(again[0], "finish_reason")) == {"stop", "length"}
        assert generator.stats()["rollout/servers"] == 2
        for member in generator._servers.pool.ready:
            there = generator._main.submit(member.client.checksums()).result(PATIENCE_S)
            assert there == fresh._llm.apply_model(parameter_checksums)[0]

    def test_servers_that_were_tampered_with_get_their_weights_again(self, generator, fresh):
        """Any call into the engine closes a server until the next push; the first test asked for checksums."""
        groups = generator.rollout(prompts(8), 2, policy_version=2, step=2)
        assert generator.stats()["rollout/requeued"] > 0
        assert_same(groups, fresh.rollout(prompts(8), 2, policy_version=0, step=2))

    def test_conversations_equal_those_of_a_fresh_engine(self, generator, fresh, monkeypatch):
        """Each server seals the routes of a turn; stitched, they are sealed for the whole response."""
        talk = load_talk(f"{REPOSITORY / 'recipes' / 'tiny' / 'calculator.py'}:calculator", build_tokenizer())
        loop = TalkLoop()
        for where, name, value in (
            (generator, "_talk", talk),
            (generator._sampler, "_talk", talk),
            (generator._sampler, "_talk_loop", loop),
            (fresh, "_talk", talk),
        ):
            monkeypatch.setattr(where, name, value)
        try:
            groups = generator.rollout(prompts(8), 4, policy_version=2, step=1)
        finally:
            loop.close()
        assert_same(groups, fresh.rollout(prompts(8), 4, policy_version=0, step=1))
        assert generator.stats()["rollout/turns_mean"] == fresh.stats()["rollout/turns_mean"] > 1
        for group in groups:
            for rollout in group.rollouts:
                whole = np.concatenate([group.prompt.tokens, rollout.tokens])
                seals = route_checksums(rollout.id, whole, rollout.routed_experts)
                assert np.array_equal(rollout.route_checksums, seals)
                assert (rollout.policy_versions == 2).all()
        told = [rollout.length - rollout.num_sampled for group in groups for rollout in group.rollouts]
        assert sum(told) > 0

    def test_a_batch_that_was_begun_is_not_changed_by_later_weights(self, generator):
        begun = generator.begin(prompts(8), 4, policy_version=2, step=3)
        generator.refit(perturbed(3).items(), 3)
        next_one = generator.begin(prompts(8), 4, policy_version=3, step=3)
        first, second = generator.finish(begun), generator.finish(next_one)
        assert {int(v[0]) for v in flat(first, "policy_versions")} == {2}
        assert {int(v[0]) for v in flat(second, "policy_versions")} == {3}
        assert flat(first, "tokens") != flat(second, "tokens")
        generator.refit(perturbed(2).items(), 4)
        assert_same(first, generator.rollout(prompts(8), 4, policy_version=4, step=3))
        with pytest.raises(RolloutError, match="rollouts of 9 were asked for: a refit is missing"):
            generator.begin(prompts(1), 1, policy_version=9, step=0)

    def test_groups_come_as_they_are_complete_and_the_rest_is_cancelled(self, generator):
        whole = generator.rollout(prompts(8), 4, policy_version=4, step=3)
        one, two = (generator.begin(part, 4, policy_version=4, step=3) for part in (prompts(8)[:5], prompts(8)[5:]))
        arrivals = []
        while news := generator.completed([one, two]):
            assert [arrival.age_s for arrival in news] == sorted((arrival.age_s for arrival in news), reverse=True)
            arrivals += news
        ordered = sorted(arrivals, key=lambda arrival: (arrival.ticket is two, arrival.place))
        assert [(a.ticket is two, a.place) for a in ordered] == [(i > 4, i % 5) for i in range(8)]
        assert_same([arrival.group for arrival in ordered], whole)
        assert generator.cancel(one) == 0, "nothing was left"
        begun = generator.begin(prompts(16), 8, policy_version=4, step=3)
        assert 0 < len(generator.completed([begun])) <= 16
        generator.cancel(begun)
        assert generator.completed([begun]) == []
        wait(generator, lambda: not any(m.in_flight for m in generator._servers.pool.ready))
        assert_same(generator.rollout(prompts(8), 4, policy_version=4, step=3), whole)

    def test_throughput_leaves_out_what_a_finished_batch_waited(self, generator):
        start = time.perf_counter()
        begun = generator.begin(prompts(8), 2, policy_version=4, step=4)
        begun.answers.result(PATIENCE_S)
        sampling = time.perf_counter() - start
        time.sleep(sampling)
        tokens = sum(map(len, flat(generator.finish(begun), "tokens")))
        assert generator.stats()["perf/tokens_per_s/rollout"] >= tokens / sampling

    def test_weights_that_find_no_room_are_one_clear_error(self, generator, monkeypatch):
        def no_room(*_):
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        stream = iter(perturbed(3).items())
        monkeypatch.setattr(weight_updates, "save_file", no_room)
        monkeypatch.setattr(generator._updates.broadcaster, "refused", "this test")
        with pytest.raises(RolloutError, match=r"weights for the servers could not be written to .*: .*No space"):
            generator.refit(stream, 5)
        assert list(stream) == []  # read to its end: on several ranks every tensor is collective
        assert len(generator.rollout(prompts(1), 1, policy_version=4, step=4)) == 1  # those before are still there

    def test_files_leave_the_same_bits_as_broadcasts(self, generator, fresh, monkeypatch):
        monkeypatch.setattr(generator._updates.broadcaster, "refused", "this test")
        for seed in (3, 2):
            generator.refit(perturbed(seed).items(), 4)
        assert len(generator.rollout(prompts(1), 1, policy_version=4, step=4)) == 1
        assert held(generator) == [fresh._llm.apply_model(parameter_checksums)[0]] * 2

    def test_where_no_group_can_be_formed_weights_go_through_files(self, generator, fresh, monkeypatch):
        said: list[str] = []

        def unreachable(urls):
            raise GroupError("servers reach this machine at different addresses")

        generator._updates.broadcaster.close()
        monkeypatch.setattr(weight_updates, "address_for", unreachable)
        monkeypatch.setattr(generator._updates, "_say", said.append)
        generator.refit(perturbed(2).items(), 4)
        (line,) = said
        assert line.startswith("weights go to the servers through files in ")
        assert line.endswith("servers reach this machine at different addresses")
        assert_same(*(e.rollout(prompts(2), 2, policy_version=v, step=4) for e, v in ((generator, 4), (fresh, 0))))
        generator._updates.broadcaster.refused = ""

    def test_an_update_that_breaks_off_leaves_servers_closed_and_the_next_one_is_whole(self, generator, fresh, chunks):
        def breaks_off():
            yield from list(perturbed(3).items())[:70]
            raise RuntimeError("the learner failed")

        with pytest.raises(RuntimeError, match="the learner failed"):
            generator.refit(breaks_off(), 5)
        body = json.dumps({"token_ids": [3, 4], "sampling_params": {"max_tokens": 1}}).encode()
        for member in generator._servers.pool.members.values():
            for version in ("4", "5"):
                assert status(member.address, GENERATE, TOKEN, body=body, **{"X-Policy-Version": version}) == 409
        generator.refit(perturbed(2).items(), 5)
        assert generator._updates.broadcaster.amount.bytes == sum(tensor.nbytes for tensor in perturbed(2).values())
        assert held(generator) == [fresh._llm.apply_model(parameter_checksums)[0]] * 2

    @pytest.mark.slow
    def test_a_trainer_that_is_killed_in_an_update_leaves_servers_that_take_the_next_one(self, generator, fresh):
        members = list(generator._servers.pool.members.values())
        program = Path(__file__).parent / "programs" / "dying_trainer.py"
        urls = [member.address.url for member in members]
        command = [sys.executable, program, MODEL, TOKEN, *urls]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        died = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
        assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
        generator.refit(perturbed(2).items(), 5)  # waits until they have given the other one up
        assert held(generator) == [fresh._llm.apply_model(parameter_checksums)[0]] * 2

    @pytest.mark.slow
    def test_a_server_killed_in_an_update_costs_the_others_nothing_but_time(self, generator, fresh, chunks):
        victim, survivor = generator._servers.pool.members.values()
        weights = Disturbed(perturbed(2), lambda: stop(victim.address, signal.SIGKILL))
        generator.refit(weights, 5)
        assert weights.passes <= 2  # 1: the survivor had everything before the other one's death was seen
        assert victim.lost
        assert not survivor.lost
        assert held(generator) == [fresh._llm.apply_model(parameter_checksums)[0]]
        generator.refit(perturbed(2).items(), 5)  # the survivor's checksums closed it

    @pytest.mark.slow
    def test_a_server_that_came_back_gets_the_weights_while_all_wait_for_responses(self, generator, fresh):
        """It is the only one that is left, and the learner sends what it sent before."""
        pool = generator._servers.pool
        (survivor,) = pool.ready
        wait(generator, lambda: len(pool.lacking) == 1)
        begun = generator.begin(prompts(8), 2, policy_version=5, step=2)
        stop(survivor.address, signal.SIGKILL)
        assert_same(generator.finish(begun), fresh.rollout(prompts(8), 2, policy_version=0, step=2))
        assert pool.ready
        assert survivor not in pool.ready

    @pytest.mark.slow
    def test_a_server_that_hangs_in_an_update_is_lost_and_comes_back(self, generator, fresh, chunks, monkeypatch):
        pool = generator._servers.pool
        wait(generator, lambda: len(pool.lacking) == 1)
        generator.refit(perturbed(3).items(), 5)
        victim, survivor = pool.ready
        generator._updates.broadcaster.close()  # so that the group is made anew, with these limits
        monkeypatch.setattr(generator._updates.broadcaster, "_stall_s", 2.0)
        monkeypatch.setattr(weight_updates, "GRACE_S", 3.0)
        start = time.monotonic()
        generator.refit(Disturbed(perturbed(2), lambda: stop(victim.address, signal.SIGSTOP)), 5)
        assert victim.lost
        assert time.monotonic() - start < 60.0  # of the four times 2 + 3 s; request_deadline_s is 1800
        assert held(generator) == [fresh._llm.apply_model(parameter_checksums)[0]]
        assert not survivor.lost
        stop(victim.address, signal.SIGCONT)
        wait(generator, lambda: not any(m.lost for m in pool.members.values()))
        monkeypatch.undo()
        generator.refit(perturbed(2).items(), 5)
        assert held(generator) == [fresh._llm.apply_model(parameter_checksums)[0]] * 2
        generator.refit(perturbed(2).items(), 5)  # their checksums closed them

    def test_nothing_answers_without_the_token_and_the_token_is_nowhere(self, generator, run_dir):
        paths = ["/health", "/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate", "/v1/models"]
        paths += ["/megatron_rl/generate", "/megatron_rl/weights"]
        for member in generator._servers.pool.ready:
            for token in (None, "another-token-altogether"):
                assert {status(member.address, path, token) for path in paths} == {401}
            assert status(member.address, "/is_paused", TOKEN, method="GET") == 200
        files = [path for path in run_dir.rglob("*") if path.is_file()]
        assert [path for path in files if path.suffix == ".log"]
        assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert TOKEN.encode() not in process.read_bytes()
            except OSError:
                continue

    def test_hostile_requests_are_refused_and_the_engine_lives(self, generator):
        """vLLM without a tokenizer takes an id of -1, and its engine ends."""
        generator.refit(perturbed(2).items(), 5)  # what asked for checksums has closed them
        address = generator._servers.pool.ready[0].address
        headers = {"X-Policy-Version": str(asyncio.run(settings_of(address))["version"])}
        for ids in ([-1], [10**6], [3] * 4_000, []):
            body = json.dumps({"token_ids": ids, "sampling_params": {"max_tokens": 1}}).encode()
            assert status(address, GENERATE, TOKEN, body=body, **headers) == 400, ids
        with contextlib.suppress(urllib.error.URLError):  # it hangs up on who goes on sending
            assert status(address, GENERATE, TOKEN, body=b"[" * 10_000_000, **headers) == 413
        assert status(address, GENERATE, TOKEN, **{"X-Policy-Version": "None"}) == 409
        assert status(address, "/v1/completions", TOKEN) == 404
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        assert status(address, "/", None, "GET", **upgrade, **{"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}) < 500
        assert status(address, "/health", TOKEN, "GET") == 200
        body = json.dumps({"token_ids": [3, 4], "sampling_params": {"max_tokens": 1}}).encode()
        assert status(address, GENERATE, TOKEN, body=body, **headers) == 200

    @pytest.mark.slow
    def test_a_server_killed_in_the_middle_costs_no_response(self, generator, run_dir):
        members = generator._servers.pool.members
        wait(generator, lambda: len(members) == 2 and not any(member.lost for member in members.values()))
        generator.refit(perturbed(2).items(), 5)  # one of them may have come back without weights
        expected = generator.rollout(prompts(16), 4, policy_version=5, step=5)
        name, victim = next(iter(generator._servers.pool.members.items()))
        stop(victim.address, signal.SIGSTOP)  # so that it cannot answer what it is asked
        begun = generator.begin(prompts(16), 4, policy_version=5, step=5)
        wait(generator, lambda: victim.in_flight > 0)
        stop(victim.address, signal.SIGKILL)
        groups = generator.finish(begun)
        assert_same(groups, expected)
        assert generator.stats()["rollout/requeued"] > 0
        assert generator.stats()["rollout/servers"] == 1
        assert generator._servers.pool.members[name].lost
        generator.refit(perturbed(3).items(), 5)
        assert len(generator.rollout(prompts(2), 2, policy_version=5, step=6)) == 2

    @pytest.mark.slow
    def test_groups_that_were_carried_over_survive_the_death_of_their_server(self, generator):
        wait(generator, lambda: len(generator._servers.pool.lacking) == 1)
        generator.refit(perturbed(3).items(), 5)
        sampler = PromptSampler(prompts(16))
        config = OversampleConfig(factor=1.5, rest="carry_over")
        ahead = Oversampling(sampler, generator, config, num_prompts=4, num_samples=4, max_staleness=1, num_steps=8)
        carried, others = (
            [prompt.id for prompt in part] for part in (sampler.take(2), PromptSampler(prompts(16)).take(6)[2:])
        )
        ahead.load_state_dict([{"step": 0, "prompts": carried}], PromptSet.of(prompts(16)))
        victim = generator._servers.pool.ready[0]
        stop(victim.address, signal.SIGSTOP)  # so that it cannot answer what it is asked
        ahead.open(1, 5)
        wait(generator, lambda: victim.in_flight > 0)
        stop(victim.address, signal.SIGKILL)
        learned = []
        for step in (1, 2):
            if step > 1:
                ahead.open(step, 5)
            while not ahead.is_filled:
                ahead.keep(ahead.arrivals())
            kept, metrics = ahead.close()
            assert metrics["rollout/oversample/carried"] == 2
            learned.append([group.prompt.id for group in kept])
            (left,) = ahead.state_dict()
            if step == 1:
                assert learned[0][:2] == carried
                assert sorted(learned[0][2:] + left["prompts"]) == sorted(others)
                second = left["prompts"]
        assert set(second) <= set(learned[1])
        for begun in ahead._begun:
            generator.cancel(begun.ticket)

    @pytest.mark.slow
    def test_a_server_that_was_killed_is_started_again_and_gets_the_next_weights(self, generator):
        wait(generator, lambda: len(generator._servers.pool.lacking) == 1)
        generator.refit(perturbed(3).items(), 5)
        assert generator.rollout(prompts(8), 4, policy_version=5, step=6)
        assert generator.stats()["rollout/servers"] == 2
        first, second = held(generator)
        assert first == second

    @pytest.mark.slow
    def test_with_all_servers_dead_the_run_ends_with_one_clear_error(self, generator):
        generator._servers.pool._limits.wait_s = 1.0
        for member in list(generator._servers.pool.members.values()):
            stop(member.address, signal.SIGKILL)
        with pytest.raises(
            RolloutError, match=r"waited 1 s .*4 of 4 responses are not there yet.* is lost .* is lost "
        ):
            generator.rollout(prompts(2), 2, policy_version=5, step=7)


class Disturbed:
    """Weights that can be sent again; in the middle of the first time something happens."""

    def __init__(self, weights: dict[str, torch.Tensor], happens: Callable[[], None]) -> None:
        self._weights, self._happens, self.passes = weights, happens, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for number, item in enumerate(self._weights.items()):
            if self.passes == 1 and number == 70:
                self._happens()
            yield item


def held(generator: ServerGenerator) -> list[dict[str, int]]:
    """Checksums of every server that may be used. Closes them."""
    return [generator._main.submit(m.client.checksums()).result(PATIENCE_S) for m in generator._servers.pool.ready]


def stop(address: Address, number: int) -> None:
    os.kill(address.pid, number)


async def settings_of(address: Address) -> dict:
    client = ServerClient(address, TOKEN, 60.0)
    try:
        return await client.settings()
    finally:
        await client.close()


def status(
    address: Address, path: str, token: str | None, method: str = "POST", body: bytes = b"{}", **headers: str
) -> int:
    request = urllib.request.Request(address.url + path, method=method, data=body if method == "POST" else None)
    for name, value in {"Content-Type": "application/json", **headers}.items():
        request.add_header(name, value)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE_S) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_run_that_samples_ahead_resumes_without_losing_or_repeating_a_prompt(tmp_path):
    """Stopped after its first step, while the batch of the second was being sampled; then the same command again."""
    run = tmp_path / "ahead"
    run.mkdir()
    (run / "STOP").touch()
    settings = [f"name={run.name}", f"run_root={tmp_path}", "num_steps=3", "batch.prompts=4", "rollout.num_samples=4"]
    settings += ["rollout.max_staleness=1", "rollout.servers.launch=1", "validation.every=0", "monitor.plots=false"]
    settings += ["recorder.record_batches=all", "checkpoint.every=0", "rollout.servers.health_every_s=0.5"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    for attempt in range(2):
        done = run_command("megatron_rl", ["train", "recipes/tiny/servers.yaml", *arguments], tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        if attempt == 0:
            assert "stopped on request after step 0" in done.stdout
            saved = json.loads((run / "checkpoints" / "step_00000001" / "trainer.json").read_text())
            assert [item["step"] for item in saved["ahead"]] == [1]
            assert not (run / "STOP").exists(), "a STOP that was acted on is used up"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 0, 1]  # step 1 was sampled anew after the resume
    batches = [json.loads(path.read_text()) for path in sorted((run / "batches").rglob("*.json"))]
    names = [sequence["id"] for batch in batches for sequence in batch["sequences"]]
    assert len(names) == len(set(names)) == 3 * 4 * 4
    expected = [name for item in saved["ahead"] for name in item["prompts"]]
    assert list(dict.fromkeys(name.rsplit("/", 1)[0] for name in names[16:32])) == expected
    assert read(folder(run) / "local-0.json") is None
