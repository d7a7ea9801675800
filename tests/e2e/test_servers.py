"""Two real servers: what they answer, that updates reach them bit for bit, and who may talk to them. They are started
once; the tests run in order. Faults: test_server_faults.py; a run that samples ahead: test_server_resume.py."""

import asyncio
import json
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import save_file

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout import RolloutError, Sampling
from megatron_rl.rollout.conversation import load_talk
from megatron_rl.rollout.scoring import ServerScorer
from megatron_rl.rollout.servers.client import ServerClient
from megatron_rl.rollout.servers.dispatch import TalkLoop
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.servers.guard import GENERATE
from megatron_rl.rollout.servers.rendezvous import Address, folder
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.routing import route_checksums
from megatron_rl.types import Group
from tests.e2e.hf_reference import assert_same as assert_same_by
from tests.e2e.hf_reference import flat, perturbed, prompts, rounding_bound
from tests.support.patience import PATIENCE_S
from tests.support.tiny import MODEL, REPOSITORY, tiny_recipe
from tools.dev.make_tiny_checkpoint import build_tokenizer

TOKEN = "token-of-the-servers-in-this-test"
ROLLOUT = {"dtype": "fp32", "max_response_length": 24, "kv_cache_gib": 0.0625}
SERVERS = {"weights": "broadcast", "launch": 2, "health_every_s": 0.5, "wait_s": 550.0}


def assert_same(first: list[Group], second: list[Group]) -> None:
    assert_same_by(first, second, Sampling(ROLLOUT["max_response_length"]))


class TestTwoServers:
    @pytest.fixture(scope="class")
    def run_dir(self, tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("run") / "served"

    @pytest.fixture(scope="class")
    def generator(self, run_dir):
        rollout = {**ROLLOUT, "engine": "vllm_server", "max_staleness": 1, "servers": SERVERS, "sampled_head": 6}
        centred = {"policy_term": "reinforce", "score_centering": True}
        names = {"name": run_dir.name, "run_root": str(run_dir.parent)}
        recipe = tiny_recipe(**names, rollout=rollout, routing={"replay": "r3"}, objective=centred)
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
        assert not any((folder(run_dir) / "weights").iterdir())

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

    def test_a_server_scores_for_a_teacher_what_it_sampled(self, generator, run_dir, monkeypatch):
        """Before its weights change. Its own log-probs, but for the rounding of a pass over all places at once."""
        groups = generator.rollout(prompts(8), 4, policy_version=0, step=0)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        addresses = [json.loads(file.read_text())["url"] for file in folder(run_dir).glob("*.json")]
        monkeypatch.setenv("MRL_SERVER_TOKEN", TOKEN)
        logprobs, tokens, of_tokens = zip(
            *ServerScorer(addresses, 39, 60.0, at_once=8).score(rollouts, 40), strict=True
        )
        got, at = np.concatenate(logprobs), np.concatenate(tokens) == np.concatenate(flat(groups, "tokens"))[:, None]
        assert np.array_equal(np.concatenate(of_tokens)[at], got[at.any(axis=1)])
        bound = 2 * rounding_bound(groups, Sampling(ROLLOUT["max_response_length"]))
        assert np.abs(got - np.concatenate(flat(groups, "inference_logprobs"))).max() <= bound
        with pytest.raises(RolloutError, match="takes 40 tokens; it needs 41"):
            ServerScorer(addresses, 40, 60.0, at_once=8)

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

    def test_heads_equal_those_of_a_fresh_engine(self, generator, fresh):
        """The most probable tokens at each place with log mu, in the order of the tokens; none in validation."""
        sampling = Sampling(24, head=6)
        there = generator.rollout(prompts(8), 4, policy_version=2, step=2, sampling=sampling)
        here = fresh.rollout(prompts(8), 4, policy_version=0, step=2, sampling=sampling)
        assert_same(there, here)
        bound = 2 * rounding_bound(here, sampling)
        for name in ("head_tokens", "head_logprobs", "tokens", "inference_logprobs"):
            assert [len(array) for array in flat(there, name)] == [len(array) for array in flat(here, name)], name
        ids, values, own_ids, own = (
            np.concatenate(flat(groups, name)) for groups in (there, here) for name in ("head_tokens", "head_logprobs")
        )
        assert values.shape == own.shape == (len(np.concatenate(flat(there, "tokens"))), 6)
        assert np.abs(values - own).max() <= bound
        is_clear = np.abs(np.diff(own, axis=1)).min(axis=1) > 2 * bound  # else two may change places
        assert (ids == own_ids)[is_clear, :5].all()
        assert is_clear.mean() > 0.5
        sampled, chosen = (np.concatenate(flat(there, name)) for name in ("tokens", "inference_logprobs"))
        places, columns = np.nonzero(ids == sampled[:, None])
        assert (values[places, columns] == chosen[places]).all()
        plain = generator.rollout(prompts(2), 1, policy_version=2, step=2, sampling=Sampling(4))
        assert set(flat(plain, "head_logprobs")) == {None}

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

    def test_throughput_leaves_out_what_a_finished_batch_waited(self, generator):
        start = time.perf_counter()
        begun = generator.begin(prompts(8), 2, policy_version=4, step=4)
        begun.answers.result(PATIENCE_S)
        sampling = time.perf_counter() - start
        time.sleep(sampling)
        tokens = sum(map(len, flat(generator.finish(begun), "tokens")))
        assert generator.stats()["perf/tokens_per_s/rollout"] >= tokens / sampling

    def test_files_leave_the_weights_that_broadcasts_leave(self, generator, fresh, monkeypatch):
        monkeypatch.setattr(generator._updates.broadcaster, "refused", "this test")
        for seed in (3, 2):
            generator.refit(perturbed(seed).items(), 4)
        assert_same(*(e.rollout(prompts(4), 2, policy_version=v, step=4) for e, v in ((generator, 4), (fresh, 0))))

    def test_nothing_answers_without_the_token_and_the_token_is_nowhere(self, generator, run_dir):
        paths = ["/health", "/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate", "/v1/models"]
        paths += ["/megatron_rl/generate", "/megatron_rl/weights"]
        for member in generator._servers.pool.ready:
            for token in (None, "another-token-altogether"):
                assert {status(member.address, path, token) for path in paths} == {401}
            assert status(member.address, "/health", TOKEN, method="GET") == 200
        files = [path for path in run_dir.rglob("*") if path.is_file()]
        assert [path for path in files if path.suffix == ".log"]
        assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert TOKEN.encode() not in process.read_bytes()
            except OSError:
                continue

    def test_only_what_the_trainer_uses_is_offered(self, generator):
        address = generator._servers.pool.ready[0].address
        headers = {"X-Policy-Version": str(asyncio.run(settings_of(address))["version"])}
        assert status(address, GENERATE, TOKEN, **headers) == 400
        assert status(address, GENERATE, TOKEN, **{"X-Policy-Version": "None"}) == 409
        assert {status(address, path, TOKEN) for path in ("/v1/completions", "/collective_rpc", "/pause")} == {404}
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        assert status(address, "/", None, "GET", **upgrade, **{"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}) < 500
        body = json.dumps({"token_ids": [3, 4], "sampling_params": {"max_tokens": 1}}).encode()
        assert status(address, GENERATE, TOKEN, body=body, **headers) == 200


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
