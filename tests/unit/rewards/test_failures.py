"""Reward functions that fail: refused before a run where one call shows it, else counted, shown once, and limited."""

from __future__ import annotations

import pytest

from megatron_rl.config.data import RewardConfig
from megatron_rl.config.monitor import AlarmRule
from megatron_rl.errors import InputError
from megatron_rl.monitor.alarms import BUILT_IN, Alarms
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.failures import Failure, RewardFault, merge, refuse_too_many
from megatron_rl.types import Prompt
from tests.unit.rewards.test_rewarder import group

FUNCTIONS = """
import sys

def anything(response, answer):
    return eval(response)

def first_bug(response, answer):
    return 1 / (response != "7")

def leaves(response, answer):
    sys.exit(3)

def three(response, answer, third): ...
def one(response): ...
def wants_more(solution_str, ground_truth, weight): ...
def verl(solution_str, ground_truth, **others):
    return {"score": sorted(others) == ["data_source", "extra_info"]}
"""
PROMPT = Prompt("p:0", [1], "7", data_source="s")


@pytest.fixture
def rewarder(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)

    def rewarder(function: str) -> Rewarder:
        return Rewarder(RewardConfig(name=f"{path}:{function}", num_workers=1), 100)

    return rewarder


@pytest.mark.parametrize("function", ["three", "one", "wants_more"])
def test_a_signature_that_does_not_fit_is_refused_before_a_call(rewarder, function):
    with rewarder(function) as made, pytest.raises(InputError) as refused:
        made.try_on([PROMPT])
    assert f"mine.py:{function}: takes (" in str(refused.value)
    assert "f(data_source, solution_str, ground_truth, extra_info)" in str(refused.value)


@pytest.mark.parametrize(
    ("function", "last_line"),
    [("first_bug", "ZeroDivisionError: division by zero"), ("leaves", "SystemExit: 3")],
)
def test_a_function_that_raises_on_a_right_answer_is_refused_with_its_traceback(rewarder, function, last_line):
    with rewarder(function) as made, pytest.raises(InputError) as refused:
        made.try_on([PROMPT])
    text = str(refused.value)
    assert "the reward of prompt p:0 failed and counts as 0; the response was '7'" in text
    assert f"in {function}\n" in text
    assert f"\n{last_line}\n" in text


def test_workers_that_do_not_start_are_a_fault(rewarder, monkeypatch):
    monkeypatch.setattr("megatron_rl.rewards.pool._PROGRAM", "raise SystemExit(9)")
    with rewarder("verl") as made, pytest.raises(RewardFault, match=r"mine.py:verl: a reward worker did not start"):
        made.try_on([PROMPT])


def test_a_trial_shows_the_reward_of_a_right_answer(rewarder):
    with rewarder("verl") as made:
        trial = made.try_on([PROMPT, PROMPT])
    assert (trial.prompt, trial.response, trial.reward) == (PROMPT, "7", 1.0)
    for name, response in (("math", r"\boxed{7}"), ("modsum", "#7"), ("exact", "7")):
        with Rewarder(RewardConfig(name=name), 100) as made:
            trial = made.try_on([PROMPT])
        assert (trial.response, trial.reward) == (response, 1.0)


def test_what_is_no_number_is_an_error(rewarder):
    results = ["None", "{}", "'1'", "[1.0]", "{'score': None}", "float('nan')", "{'score': 1}", "True", "2.5"]
    with rewarder("anything") as made:
        scored = group("x", *results)
        metrics = made.score([scored])
        failures = made.failures
    assert scored.rewards == [0.0] * 6 + [1.0, 1.0, 2.5]
    assert metrics["reward/errors"] == 6
    # Four of a wrong type, one mapping without `score`, one NaN: an example of each.
    assert [failure.count for failure in failures] == [4, 1, 1]
    assert "rewards/worker.py" not in "".join(failure.detail for failure in failures), "only the user's own frames"
    texts = "\n".join(failure.text for failure in failures)
    assert "returned None (NoneType); expected a number, a bool or a mapping with `score`" in texts
    assert "a mapping without `score`; its keys are []" in texts
    assert "the reward was nan" in texts


def test_kinds_are_told_apart_by_exception_and_line():
    def failure(prompt: str, line: int, error: str) -> Failure:
        return Failure("error", 1, prompt, "r", f'Traceback:\n  File "a.py", line {line}, in f\n    x\n{error}')

    merged = merge([failure("a", 1, "E: 1"), failure("b", 1, "E: 2"), failure("c", 2, "E: 1"), failure("d", 1, "F: 1")])
    assert [(f.prompt, f.count) for f in merged] == [("a", 2), ("c", 1), ("d", 1)]


def test_more_than_the_share_ends_the_run_and_the_share_itself_does_not():
    failures = [Failure("error", 5, "p:1", "r", "Traceback\nValueError: no digits")]
    refuse_too_many(5, 10, 0.5, failures)
    refuse_too_many(0, 0, 0.0, [])
    with pytest.raises(RewardFault, match=r"6 of 10 .*max_error_frac allows \(0.5\).*prompt p:1 failed.*no digits$"):
        refuse_too_many(6, 10, 0.5, failures)
    with pytest.raises(RewardFault):
        refuse_too_many(1, 10, 0.0, failures)


def test_every_run_has_an_alarm_on_reward_errors():
    alarms = Alarms([], BUILT_IN)
    assert alarms.observe(0, {"reward/errors": 0.0}) == []
    assert alarms.metrics([]) == {}
    (event,) = alarms.observe(1, {"reward/errors": 1.0})
    assert event.message.startswith("alarm reward-errors at step 1: reward/errors = 1 > 0")
    assert alarms.metrics([event]) == {"alarm/reward-errors": 1.0}
    own = AlarmRule(name="reward-errors", metric="reward/errors", above=5, then=["stop"])
    assert Alarms([own], BUILT_IN).observe(0, {"reward/errors": 1.0}) == []
