"""Reward functions that wait: many responses at a time, lists, retries, limits, and responses without a score."""

from __future__ import annotations

import gc
import math

import pytest

from megatron_rl.config.data import RewardConfig
from megatron_rl.monitor.samples import summarise
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards import pool as pool_module
from megatron_rl.rewards.pool import WorkerPool
from megatron_rl.rewards.rewarder import RewardFault, refuse_too_many
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response

FUNCTIONS = """
import asyncio, os, signal, time

running = most = 0
calls = {}
everyone = asyncio.Event()

async def meet(response, answer):
    \"\"\"Return, once `answer` calls are under way, the most that ever were.\"\"\"
    global running, most
    running += 1
    most = max(most, running)
    if running >= int(answer):
        everyone.set()
    await everyone.wait()
    await asyncio.sleep(0)
    running -= 1
    return most

async def fails_first(response, answer):
    calls[response] = calls.get(response, 0) + 1
    if calls[response] <= int(answer):
        raise ConnectionError(f"call {calls[response]}")
    return calls[response]

async def counts(response, answer):
    calls[response] = calls.get(response, 0) + 1
    return calls[response]

async def mixed(response, answer):
    if response == "forever":
        await asyncio.sleep(600)
    if response == "blocks":
        time.sleep(600)
    if response == "dies" and not os.path.exists(answer):
        await asyncio.sleep(0.1)
        open(answer, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "dies each time":
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "raises":
        raise ValueError("no")
    await asyncio.sleep(0.3)
    return 1.0

def lists(responses, answers):
    return [len(responses) + float(a) if r != "none" else None for r, a in zip(responses, answers)]

async def plural(data_sources, solution_strs, ground_truths, extra_infos):
    await asyncio.sleep(0)
    return [{"score": extra["half"] / 2} for extra in extra_infos]

def short(responses, answers):
    calls["short"] = calls.get("short", 0) + 1
    return [1.0] * (len(responses) - 1) if calls["short"] == 1 else [float(calls["short"])] * len(responses)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("waiting") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def run(file):
    """Outcomes of a function for pairs of response and answer, from a pool with these options."""
    pools = []

    def of(function, *pairs, num_workers=1, **options):
        limits = {"timeout_s": 5, "memory_limit_mib": 512, "wait_s": 60.0, "retry_wait_s": 0.0} | options
        name = f"{file}:{function}"
        pools.append(WorkerPool(num_workers, algebra=False, functions=[name], **limits))
        extra = {"data_source": "s", "extra_info": {"half": 1}}
        tasks = [{"kind": name, "solution_str": r, "ground_truth": a, **extra} for r, a in pairs]
        return pools[-1].run(tasks)

    yield of
    for pool in pools:
        pool.close()


def test_as_many_calls_are_under_way_as_concurrency_allows(run):
    outcomes = run("meet", *[(str(i), "8") for i in range(30)], concurrency=8)
    assert {outcome.value for outcome in outcomes} == {8.0}, "each waits for seven others, and there is never a ninth"


def test_concurrency_is_shared_by_the_workers(run):
    outcomes = run("meet", *[(str(i), "4") for i in range(16)], concurrency=8, num_workers=2)
    assert {outcome.value for outcome in outcomes} == {4.0}


def test_calls_that_fail_are_made_again_and_counted(run):
    outcomes = run("fails_first", ("a", "2"), ("b", "0"), ("c", "3"), concurrency=4, retries=2)
    assert [(o.value, o.failure, o.retries) for o in outcomes] == [(3.0, "", 2), (1.0, "", 0), (0.0, "error", 2)]
    assert "ConnectionError: call 3" in outcomes[2].detail


def test_a_call_that_takes_too_long_costs_itself_alone(run):
    outcomes = run("mixed", ("forever", ""), ("x", ""), ("raises", ""), concurrency=4, wait_s=1.0)
    assert [(o.value, o.failure) for o in outcomes] == [(0.0, "limit"), (1.0, ""), (0.0, "error")]


def test_a_worker_whose_loop_is_blocked_is_replaced_and_the_others_calls_are_made_again(run, monkeypatch):
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.5)
    # The blocking call comes last, so that the other one is under way and older when the worker is given up.
    outcomes = run("mixed", ("blocks", ""), ("x", ""), concurrency=2, wait_s=0.6)
    assert outcomes[0].failure == "limit"
    assert outcomes[1].failure in ("", "limit")  # sent at the same moment: late together, or made again


@pytest.mark.parametrize(("response", "failure"), [("dies", ""), ("dies each time", "crash")])
def test_calls_that_were_under_way_with_a_crash_are_made_again_once(run, tmp_path, response, failure):
    mark = str(tmp_path / "died")
    outcomes = run("mixed", ("x", mark), (response, mark), ("y", mark), concurrency=4)
    assert outcomes[1].failure == failure
    if not failure:
        assert [outcome.value for outcome in outcomes] == [1.0] * 3


def test_a_function_with_plural_arguments_gets_lists(run):
    outcomes = run("lists", ("a", "0"), ("none", "1"), ("c", "2"), concurrency=2)
    assert [(o.value, o.failure) for o in outcomes] == [(2.0, ""), (0.0, "error"), (3.0, "")], "calls of two and one"
    assert "NoneType" in outcomes[1].detail
    assert [o.value for o in run("plural", *[("a", "0")] * 3, concurrency=3)] == [0.5] * 3


def test_a_list_of_another_length_is_a_failed_call(run):
    outcomes = run("short", ("a", ""), ("b", ""), concurrency=2, retries=1)
    assert [(o.value, o.retries) for o in outcomes] == [(2.0, 1), (2.0, 0)]


# ---------------------------------------------------------------- Rewarder
def group(name: str, *texts: str) -> Group:
    rollouts = [any_response(f"{name}/{i}", 2, text=text) for i, text in enumerate(texts)]
    return Group(Prompt(name, [1], "0", data_source="s"), rollouts)


@pytest.fixture
def rewarder(file):
    made = []

    def of(function, **options):
        made.append(Rewarder(RewardConfig(name=f"{file}:{function}", num_workers=1, retries=0, **options), 100))
        return made[-1]

    yield of
    for each in made:
        each.close()


def test_what_was_begun_is_not_scored_again(rewarder):
    own, later = rewarder("counts"), group("p", "a", "b", "c")
    own.begin(later.prompt, later.rollouts[:2])
    own.score([later])
    assert later.rewards == [1.0, 1.0, 1.0]
    own.score([later])
    assert later.rewards == [2.0, 2.0, 2.0]


def test_responses_that_are_dropped_are_forgotten(rewarder):
    own, dropped = rewarder("counts"), group("p", "a", "b")
    own.begin(dropped.prompt, dropped.rollouts)
    assert len(own._begun) == 2
    del dropped
    gc.collect()
    assert own._begun == {}


def test_built_in_rewards_are_not_begun():
    with Rewarder(RewardConfig(name="math", num_workers=1), 100) as own:
        later = group("p", "1")
        own.begin(later.prompt, later.rollouts)
        assert (own.has_functions, own._begun) == (False, {})


def test_a_response_without_a_score_is_masked_or_zero(rewarder):
    masked, zero = group("p", "x", "raises"), group("p", "x", "raises")
    own = rewarder("mixed")
    scores = own.score([masked])
    assert [(r.masked, r.unscored) for r in masked.rollouts] == [(False, False), (True, True)]
    assert (masked.rewards, scores.metrics["reward/unscored_frac"]) == ([1.0], 0.5)
    metrics = rewarder("mixed", on_error="zero").score([zero]).metrics
    assert (zero.rewards, metrics["reward/unscored_frac"], metrics["reward/errors"]) == ([1.0, 0.0], 0.0, 1.0)
    assert "ValueError: no" in scores.failures[0].detail


def test_the_first_failure_ends_a_run_where_the_recipe_says_so(rewarder):
    own, failed = rewarder("mixed", on_error="end"), group("p", "x", "raises")
    scores = own.score([failed])
    with pytest.raises(RewardFault, match=r"1 of 2 responses.*reward\.on_error: end"):
        refuse_too_many(scores.num_failed, scores.num_scored, 0.0, scores.failures)


# ---------------------------------------------------------------- what becomes of a response without a score
def scored(name: str, *rewards: float | None) -> Group:
    made = group(name, *["t"] * len(rewards))
    for rollout, reward in zip(made.rollouts, rewards, strict=True):
        rollout.reward = rollout.raw_reward = reward or 0.0
        rollout.masked = rollout.unscored = reward is None
    return made


def test_validation_is_over_what_is_known():
    groups = [scored("a", 1.0, None), scored("b", 0.0, 0.0), scored("c", None, None)]
    figures = summarise(groups)
    assert (figures["val/s/avg@2"], figures["val/s/pass@1"], figures["val/s/pass@2"]) == (0.5, 0.5, 0.0)
    assert not any(math.isnan(value) for value in summarise(groups[2:]).values())
