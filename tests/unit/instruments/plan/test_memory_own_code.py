"""`plan` counts our own code by unit costs on record; tools.bench.scale measures them."""

from __future__ import annotations

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan import GPUS, make_plan, make_workload
from megatron_rl.instruments.plan.hardware import HOST_NETWORK
from megatron_rl.instruments.plan.memory import DRIVERS, FETCHED, JOINED, OF_A_PASS, OF_OWNER, on_record, own_code
from megatron_rl.model.architecture import shape_of
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY
from tests.unit.instruments.plan.test_report import work

R3 = REPOSITORY / "recipes" / "router_replay" / "grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"
NOTHING = [0.0] * 5


def record(stage: str, **costs: list[float]) -> dict:
    full = {what: costs.get(what, NOTHING) for what in ("seconds", "received", "peak")}
    none = [0.0] * 3
    return {"stages": {stage: full}, "reward_s": 0.0, "fetch": none, "turns": none, "sockets": [3.0, 2.0]}


@pytest.mark.parametrize(("stage", "holders"), [("responses", 32), ("exchange", 8)])
@pytest.mark.parametrize("driver", range(5))
def test_a_stage_goes_by_what_its_rank_holds(stage, holders, driver):
    """128 × 16 sequences of 256 + 4096 tokens on 32 ranks, TP4; routes of 48 layers × 8 experts."""
    unit = [0.0] * 5
    unit[driver] = 1e-6
    tokens = 2048 * (256 + 4096) / holders
    amount = [tokens, tokens * 48 * 8, 2048 / holders, 2048, 32][driver]
    costs = own_code(work(R3), record(stage, seconds=unit, peak=unit))
    assert costs.seconds == rounded(1e-6 * amount)
    assert costs.host_rank == rounded(1e-6 * amount)
    assert costs.host_node == 8 * costs.host_rank


@pytest.mark.parametrize(("updates", "replay", "passes"), [(1, "r3", 1), (4, "r3", 2), (1, "r2", 2)])
def test_work_of_a_pass_is_done_again_in_the_pass_for_old_log_probs(updates, replay, passes):
    """Which several updates need, and R2 for its routes."""
    planned = work(R3, "h100-80", f"batch.minibatches={updates}", f"routing.replay={replay}")
    costs = own_code(planned, record("pack", seconds=[0.0, 0.0, 0.0, 1.0, 0.0]))
    assert costs.seconds == passes * 2048


SERVED = ("rollout.engine=vllm_server", "rollout.servers.count=4")


@pytest.mark.parametrize("driver", range(3))
def test_one_rank_a_node_fetches_answers_while_they_are_sampled(driver):
    """As above, with servers: 4 ranks fetch 2048 responses of 4096 tokens with their routes."""
    units = record("responses", seconds=[1.0] * 5, peak=[1.0, 0, 0, 0, 0])
    units["fetch"] = [1e-6 * (i == driver) for i in range(3)]
    costs = own_code(work(R3, "h100-80", *SERVED), units)
    (stage,) = [stage for stage in costs.stages if stage.name == FETCHED]
    mean = work(R3).mean_response
    assert stage.seconds == rounded(1e-6 * 2048 / 4 * [1, mean, mean * 48 * 8][driver])
    assert costs.seconds == 0.0  # servers sample meanwhile
    assert costs.host_node == costs.host_rank == rounded(2048 * 4352 / 4)


TURNS = ("rollout.function=turns.py:hold", "rollout.tensor_parallel=1")


@pytest.mark.parametrize("driver", range(3))
@pytest.mark.parametrize(("settings", "ranks", "of_node"), [((), 32, 8), (SERVED, 4, 1)], ids=["vllm", "servers"])
def test_turns_of_conversations_are_joined_by_who_holds_them(driver, settings, ranks, of_node):
    """2048 responses: by each of 32 ranks between the engine's steps, or by one rank a node while servers sample."""
    units = record("pack") | {"turns": [1e-6 * (i == driver) for i in range(3)]}
    own = own_code(work(R3, "h100-80", *TURNS, *settings), units)
    (stage,) = [stage for stage in own.stages if stage.name == JOINED]
    mean = work(R3).mean_response
    assert stage.seconds == rounded(1e-6 * 2048 / ranks * [1, mean, mean * 48 * 8][driver])
    assert stage.ranks_of_node == of_node
    assert own.seconds == (0.0 if settings else stage.seconds)


def test_single_turns_are_not_joined():
    assert JOINED not in [stage.name for stage in own_code(work(R3)).stages]


def test_the_command_shows_the_turns_that_it_assumes(capsys, tmp_path):
    (tmp_path / "turns.py").write_text("async def hold(client, problem): ...\n")
    recipe = tmp_path / "turns.yaml"
    recipe.write_text(f"extends: {R3}\nname: turns-4n8g\nrollout: {{function: turns.py:hold, tensor_parallel: 1}}\n")
    assert main(["plan", str(recipe), "--gpu", "h200-141", "--detail"]) == 0
    text = capsys.readouterr().out
    assert f"s  {JOINED}\n" in text
    assert "; 8 turns a conversation." in text


@pytest.mark.parametrize("stage", sorted(OF_OWNER - {"responses"}))
def test_ranks_that_fetch_own_all_responses(stage):
    units = record(stage, seconds=[1e-6, 0, 0, 0, 0])
    assert own_code(work(R3, "h100-80", *SERVED), units).seconds == rounded(8 * own_code(work(R3), units).seconds)


def test_bytes_take_their_time_over_the_network():
    costs = own_code(work(R3), record("exchange", received=[1.0, 0, 0, 0, 0]))
    assert costs.seconds == rounded(2048 * 4352 / 8 / HOST_NETWORK)


def test_recipes_without_recorded_routes_pay_for_none():
    units = record("exchange", seconds=[0, 1.0, 0, 0, 0])
    assert own_code(work(R3), units).seconds > 0
    assert own_code(work(R3, "h100-80", "routing.replay=off"), units).seconds == 0


@pytest.mark.parametrize("stage", sorted(OF_A_PASS))
def test_packing_comes_once_a_pass(stage):
    units = record(stage, seconds=[1e-6, 0, 0, 0, 0])
    two = own_code(work(R3), units).seconds
    one = own_code(work(R3, "h100-80", "batch.minibatches=1"), units).seconds
    assert two == 2 * one


def test_rewards_by_workers_in_rounds():
    """64 responses a rank over 16 workers take four rounds, over 60 two."""
    units = record("rewards") | {"reward_s": 0.5}
    assert own_code(work(R3), units).seconds == 2.0
    assert own_code(work(R3, "h100-80", "reward.num_workers=60"), units).seconds == 1.0


def test_sockets_grow_with_the_ranks():
    assert own_code(work(R3), record("rewards")).sockets == 3 + 2 * 32
    assert own_code(work(R3, nodes=8), record("rewards")).sockets == 3 + 2 * 64


def test_what_is_on_record_is_complete():
    known = on_record()
    assert known["drivers"] == list(DRIVERS)
    assert "tools.bench.scale" in known["origin"]
    for costs in known["stages"].values():
        assert all(len(costs[what]) == 5 and min(costs[what]) >= 0 for what in ("seconds", "received", "peak"))


@pytest.mark.parametrize(
    ("prompts", "response", "nodes"), [(128, 8192, 4), (512, 32512, 32)], ids=["2048x8k-32", "8192x32k-256"]
)
def test_our_code_takes_a_twentieth_of_a_step_at_most(prompts, response, nodes):
    overrides = (f"batch.prompts={prompts}", f"rollout.max_response_length={response}", "data.prompt.max_length=256")
    plan = make_plan(work(R3, "h100-80", *overrides, nodes=nodes, mean_response=response, mean_prompt=256))
    assert plan.own.seconds <= 0.05 * plan.time.total


def test_the_command_says_it_as_text_and_as_json(capsys):
    assert main(["plan", str(R3), "--gpu", "h100-80", "--detail"]) == 0
    text = capsys.readouterr().out
    assert main(["plan", str(R3), "--gpu", "h100-80", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    recipe = load_recipe(R3)
    plan = make_plan(make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"]))
    assert printed["own_code"]["seconds"] == plan.own.seconds
    assert printed["step_s"] == plan.time.total
    assert f"about {plan.own.seconds:.1f} s a step beside the engines" in text
    for stage in plan.own.stages:
        assert f"s  {stage.name}" in text


@pytest.mark.parametrize("arm", ["4n8g-tp4ep8-8k-servers8-sync", "8n8g-tp4ep8-32k-servers48-keep2-r3"])
def test_answers_of_servers_are_fetched_while_they_sample(arm, capsys):
    """That one stage is listed beside the step, with its own seconds, and is no part of their sum."""
    (recipe,) = (REPOSITORY / "recipes" / "servers").glob(f"*-{arm}.yaml")
    assert main(["plan", str(recipe), "--gpu", "h100", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["own_code"]
    assert main(["plan", str(recipe), "--gpu", "h100", "--detail"]) == 0
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if "while servers sample" in line]
    seconds = {stage["name"]: stage["seconds"] for stage in own["stages"]}
    assert shown == f"  {seconds[FETCHED]:8.2f} s  {FETCHED}, while servers sample"
    assert seconds[FETCHED] > 0
    assert own["seconds"] == rounded(sum(seconds.values()) - seconds[FETCHED])


def test_only_servers_answers_are_fetched(capsys):
    assert main(["plan", str(R3), "--gpu", "h100-80", "--detail"]) == 0
    assert "while servers sample" not in capsys.readouterr().out


def test_many_ranks_need_many_open_files(capsys):
    assert main(["plan", str(R3), "--gpu", "h100-80", "--nodes", "256", "--detail"]) == 0
    assert "ulimit -n" in capsys.readouterr().out
