"""Several ranks that fetch responses from the same servers, each for itself; the servers are made up, HTTP is real."""

import pytest

from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout.generator import Sampling
from megatron_rl.rollout.requests import make_requests
from megatron_rl.rollout.servers.client import request_body
from megatron_rl.rollout.servers.rendezvous import agreed_settings
from tests.parallel.gloo import run_ranks
from tests.parallel.programs.servers import FIELDS, equal, prompts
from tests.support.made_up_server import response
from tests.support.tiny import MODEL
from tests.support.zygote import surroundings, zygote

TOKEN = "token-of-made-up-servers"
CONFIG = {
    "engine": "vllm_server",
    "max_response_length": 24,
    "max_staleness": 1,
    "servers": {"count": 2, "wait_s": 60.0, "health_every_s": 0.2},
    "max_num_seqs": 5,
}
SERVER = "tests.support.made_up_server"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """Of three ranks, of which 0 and 2 are the first of their nodes."""
    run_dir = tmp_path_factory.mktemp("run") / "fetched"
    agreed = agreed_settings(
        RolloutConfig.model_validate(CONFIG), MODEL, 16, record_routes=True, precision=PrecisionConfig()
    )
    servers = [
        zygote().start(
            SERVER,
            "serve",
            {
                "run_dir": str(run_dir),
                "name": name,
                "token": TOKEN,
                "agreed": agreed,
                "architecture": read_architecture(MODEL),
            },
            log=tmp_path_factory.mktemp("log") / name,
        )
        for name in ("a", "b")
    ]
    environment = surroundings() | {"MRL_SERVER_TOKEN": TOKEN}
    try:
        yield run_ranks(
            "tests.parallel.programs.servers",
            "fetch",
            3,
            helper=zygote(),
            env=environment,
            run_dir=str(run_dir),
            local_ranks=[0, 1, 0],
            config=CONFIG,
        )
    finally:
        for server in servers:
            server.end()


SCENES = ("first", "none for some", "begun", "later", "after the update", "killed", "after")


@pytest.mark.parametrize("scene", SCENES)
def test_a_response_is_whole_where_it_was_fetched_and_known_everywhere(results, scene):
    seen = [rank[scene] for rank in results]
    assert seen[0]["about"] == seen[1]["about"] == seen[2]["about"]
    owners = [owner for *_, owner in seen[0]["about"]]
    assert [rank["here"] for rank in seen] == [[i for i, owner in enumerate(owners) if owner == r] for r in range(3)]
    for rank in range(3):
        assert [bool(text) for text in seen[rank]["texts"]] == [owner == rank for owner in owners]
    assert equal(seen[0]["arrays"], seen[1]["arrays"])


def test_requests_are_dealt_by_prompt(results):
    assert [rank["fetchers"] for rank in results] == [[0, 2]] * 3
    owners = [owner for *_, owner in results[0]["first"]["about"]]
    assert owners == [0] * 3 + [2] * 3 + [0] * 3 + [2] * 3 + [0] * 3 + [2] * 3 + [0] * 3
    assert [owner for *_, owner in results[0]["none for some"]["about"]] == [0]


@pytest.mark.parametrize(
    ("scene", "samples", "version", "step", "asked"),
    [
        ("first", 3, 0, 0, prompts(7)),
        ("begun", 2, 1, 1, prompts(4, slow=(1, 3))),
        ("later", 2, 2, 2, prompts(4)),
        ("after the update", 2, 3, 11, prompts(4)),
        ("killed", 2, 3, 3, prompts(8, slow=range(8))),
        ("after", 2, 3, 4, prompts(4)),
    ],
)
def test_responses_are_those_that_the_servers_gave(results, scene, samples, version, step, asked):
    """Each once, from the weights that the batch was begun with, bit for bit; weights wait for the slowest rank."""
    expected = expected_arrays(asked, samples, version, step)
    assert equal(results[0][scene]["arrays"], expected)


def expected_arrays(asked, samples: int, version: int, step: int) -> dict[str, list]:
    architecture = read_architecture(MODEL)
    answers = [
        response(request_body(request, Sampling(24), [2]), version, architecture, None)
        for request in make_requests(asked, samples, seed=0, step=step)
    ]
    return {name: [getattr(answer, name) for answer in answers] for name in FIELDS}


def test_a_server_that_dies_costs_no_rank_a_response(results):
    assert results[0]["requeued before"] == 0, "no rank asked for weights that were not there yet"
    assert {rank["requeued"] for rank in results} == {results[0]["requeued"]}
    assert results[0]["requeued"] > 0


def test_with_all_servers_dead_every_rank_hears_the_same_error(results):
    assert {rank["error"] for rank in results} == {results[0]["error"]}
    assert "waited 2 s (rollout.servers.wait_s) for a server to sample from" in results[0]["error"]


def test_rank_0_alone_speaks_of_servers(results):
    assert any("is lost" in line for line in results[0]["said"])
    assert results[1]["said"] == results[2]["said"] == []


def test_the_run_tells_of_its_servers(results):
    assert results[0]["stats"]["rollout/servers/lost"] == 1
    states = {one["name"]: one["state"] for one in results[0]["table"]["servers"]}  # in the order in which they joined
    assert states == {"a": "lost", "b": "lost"}
    assert all(one["lost"] for one in results[0]["table"]["servers"])
