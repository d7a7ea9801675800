"""Stored batches of a real run: run again bit for bit, changed, from repeated updates; mismatch split into causes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.run.recorded_batches import batch_path, load_batch
from tests.parallel.gloo import run_ranks
from tests.support.plain_training import Limits, float32_limits_on
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from tests.support.routes import save_random_model

    # Without a token of padding: its embedding is zero, and the norm behind has a gradient a thousand times as large
    # there, which would be all that the gradient's norm shows.
    return save_random_model(tmp_path_factory.mktemp("model"), initializer_range=0.12, pad_token_id=None)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (path,) = run_ranks("tests.e2e.programs.flight", "record_run", 1, folder=str(folder), model=str(model))
    return Path(path)


@pytest.fixture(scope="module")
def on_two_ranks(run, tmp_path_factory) -> dict:
    """The tool as a user starts it, on another layout. Before `tools`, which deletes files."""
    told = tmp_path_factory.mktemp("told") / "told.json"
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    command = [sys.executable, "-m", "megatron_rl", "replay", str(run), "--step", "1", "--layout", "tp=2,ep=2"]
    done = subprocess.run(
        [*command, "--set", "learner.dtype=fp32", "--set", "routing.replay=r3", "--json", str(told)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(told.read_text())


@pytest.fixture(scope="module")
def plain(run, model, tmp_path_factory) -> dict:
    """The batch of step 1 and what plain PyTorch needs to update on it as the run did. Before `tools`, likewise."""
    weights = tmp_path_factory.mktemp("weights") / "hf"
    assert main(["convert", "to-hf", str(run / "checkpoints/step_00000001"), str(weights), "--model", str(model)]) == 0
    recorded = load_batch(batch_path(run / "batches", 1))
    return {"batches": [recorded.batch], "lr": recorded.metrics["actor/lr"], "path": str(weights), "replay": True}


@pytest.fixture(scope="module")
def limits(plain) -> Limits:
    return float32_limits_on(**plain)


@pytest.fixture(scope="module")
def tools(run, plain, request) -> dict[str, dict]:
    if any("on_two_ranks" in item.fixturenames for item in request.session.items if item.module is request.module):
        request.getfixturevalue("on_two_ranks")
    return run_ranks("tests.e2e.programs.flight", "use_tools", 1, run=str(run))[0]


SAME = ("actor/pg_loss", "actor/grad_norm", "mismatch/rho_std", "actor/ppo_kl", "router/agree_frac")


@pytest.mark.parametrize(
    ("case", "source"), [("again", "step_00000001"), ("repeated", "step_00000001, then the updates")]
)
def test_a_step_runs_again_as_it_was(tools, case, source):
    """bf16, two updates: the second depends on the optimizer's state, too."""
    told = tools[case]["json"]
    assert told["weights"].startswith(source)
    assert told["logprob_difference"] == {"max": 0.0, "mean": 0.0}
    for name in SAME:
        assert told["replayed"][name] == told["stored"][name], name


def test_replay_of_routes_can_be_tried_afterwards(tools):
    told = tools["r3"]["json"]
    assert "router/replay_coverage" not in told["stored"]
    assert told["replayed"]["router/replay_coverage"] == 1.0
    assert told["replayed"]["mismatch/rho_std"] < told["stored"]["mismatch/rho_std"] / 2
    assert "router/agree_frac/layer_3" in tools["r3"]["out"]


@pytest.mark.slow
def test_another_layout_gives_the_same(tools, on_two_ranks, plain, limits):
    """In fp32 and with the engine's routes, so that no choice between experts depends on rounding.

    The other tests stand for it, on one rank.
    """
    one, two = tools["fp32"]["json"]["replayed"], on_two_ranks["replayed"]
    for name in ("actor/pg_loss", "actor/grad_norm", "mismatch/rho_std", "actor/entropy"):
        assert abs(one[name] - two[name]) <= limits.of_metric(name), name
    choices = 4 * sum(s.whole_length - 1 for s in plain["batches"][0].sequences)
    assert abs(one["router/agree_frac"] - two["router/agree_frac"]) <= sum(limits.ties) / choices < 0.01


def test_what_is_missing_is_named(tools):
    assert tools["impossible"]["status"] == 2
    assert "batches of steps 1 would have to be on disk" in tools["impossible"]["errors"]
    assert tools["nearest"]["status"] == 0
    assert "1 steps older than the batch" in tools["nearest"]["json"]["weights"]
    assert tools["absent"]["status"] == 2
    assert "recorded steps: 0, 2" in tools["absent"]["errors"]


def test_causes_add_up_and_routing_is_the_largest(tools):
    told = tools["attribution"]["json"]
    parts, total = told["parts"], told["total"]
    assert sum(parts.values()) == rounded(total)
    assert parts["routing"] == max(parts.values())
    assert parts["routing"] > 0.5 * total
    assert parts["remainder"] > 0.0
    assert parts["staleness"] != 0.0, "two updates: the second one's policy is not the one that sampled"
    assert len(told["measured"]) == 8
    assert "routing" in tools["attribution"]["out"]


def test_the_mismatch_turns_the_gradient(tools):
    told = tools["gradient bias"]["json"]
    assert 0.0 < told["cosine"] < 1.0
    assert told["bias norm"] > 0.0
    assert "mode" in tools["gradient bias"]["out"]
