"""`Rewarder`: which reward scores which prompt, shaping, metrics, mistakes of the configuration, and failures."""

from __future__ import annotations

import pytest

from megatron_rl.config.data import RewardConfig
from megatron_rl.config.monitor import AlarmRule
from megatron_rl.errors import InputError
from megatron_rl.monitor.alarms import BUILT_IN, Alarms
from megatron_rl.rewards import Rewarder, check_reward, overlong_penalty
from megatron_rl.rewards.rewarder import Failure, RewardFault, merge, refuse_too_many
from megatron_rl.types import Group, Prompt, Rollout
from tests.support.groups import any_response
from tests.support.rounding import rounded

CUSTOM = """
def judge(response, answer):
    if response == "bug":
        raise ZeroDivisionError("here")
    if response == "loop":
        while True: pass
    return len(response) / 10

def verl_style(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(extra_info["bonus"]) + (data_source == "gsm" and solution_str == ground_truth)}

CONSTANT = 3
"""
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


def rollout(text: str, length: int = 5, finish_reason: str = "stop") -> Rollout:
    return any_response("p/0", length, finish_reason, text=text)


def group(answer: str, *texts: str, source: str = "s", **extra) -> Group:
    return Group(Prompt("p", [1], answer, data_source=source, extra=extra), [rollout(text) for text in texts])


def score(config: dict, groups: list[Group], max_response_length: int = 100) -> dict[str, float]:
    with Rewarder(RewardConfig.model_validate({"num_workers": 1} | config), max_response_length) as rewarder:
        return rewarder.score(groups).metrics


@pytest.mark.parametrize("accepts", [False, True])
def test_an_answer_with_a_product_left_to_do_counts_where_the_recipe_says_so(accepts):
    groups = [group("408", r"\boxed{12\cdot 34}", r"\boxed{408}")]
    score({"name": "math", "accept_unevaluated": accepts}, groups)
    assert groups[0].rewards == [float(accepts), 1.0]


def test_math_over_groups_with_repeated_answers():
    groups = [
        group(r"2\sqrt{2}", r"\boxed{\sqrt{8}}", r"\boxed{\sqrt{8}}", r"\boxed{3}", ""),
        group("5", r"\boxed{5}", r"\boxed{\frac{10}{2}}", r"\boxed{\sqrt{8}}"),
    ]
    metrics = score({"name": "math"}, groups)
    assert [group.rewards for group in groups] == [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert metrics["reward/timeouts"] == metrics["reward/worker_failures"] == metrics["reward/errors"] == 0


def test_cheap_rewards_start_no_process(monkeypatch):
    monkeypatch.setattr("megatron_rl.rewards.rewarder.WorkerPool", lambda *_, **__: pytest.fail("a pool was started"))
    groups = [group("3", "22#3", "#2", "3", source="toy"), group("yes", " yes\n", "yes!", source="words")]
    score({"name": "by_source", "by_source": {"toy": "modsum", "words": "exact"}}, groups)
    assert [group.rewards for group in groups] == [[1.0, 0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        (r"\boxed{2^{100000}-1}", "1"),
        ("The answer is 10^{7000}-1", "5"),
        (r"\boxed{x\equiv 2^{100000}\pmod{7}}", r"x\equiv 4\pmod{7}"),
        (r"\boxed{2^{100000}:3}", "1:2"),
        (r"\boxed{5!}", "2^{100000}-1"),
    ],
)
def test_a_number_too_large_to_write_down_is_wrong(response, gold):
    groups = [group(gold, response, r"\boxed{" + gold + "}")]
    score({"name": "math", "on_error": "end"}, groups)
    assert groups[0].rewards == [0.0, 1.0]


@pytest.mark.parametrize("place", ["trainer", "worker"])
def test_what_a_built_in_reward_cannot_judge_is_0_and_counted_and_ends_no_run(place, monkeypatch):
    if place == "trainer":
        monkeypatch.setattr("megatron_rl.rewards.rewarder.math_verdict", lambda *_: 1 / 0)
    else:  # a task that the worker fails at
        task = {"kind": "math", "candidate": 1, "gold": 5}
        monkeypatch.setattr("megatron_rl.rewards.rewarder.math_verdict", lambda *_: task)
    groups = [group("5", r"\boxed{5}", "")]
    with Rewarder(RewardConfig(name="math", num_workers=1, on_error="end"), 100) as rewarder:
        scores = rewarder.score(groups)
        assert rewarder.try_on([groups[0].prompt]).reward == 0.0
    assert groups[0].rewards == [0.0, 0.0]
    assert not groups[0].rollouts[0].masked
    assert (scores.metrics["reward/unjudged"], scores.num_failed) == (2, 0)
    assert scores.failures[0].key[0] == "unjudged"


@pytest.mark.parametrize(
    ("prompt_end", "response", "reward"),
    [
        ("<think>\n", r"Perhaps \boxed{6}? No, let me", 0.0),
        ("<think>\n", r"Perhaps 5. </think> It is \boxed{6}.", 1.0),
        ("<think>\n\n</think>\n\n", r"\boxed{6}", 1.0),
        ("Think between <think> and </think>.", r"\boxed{6}", 1.0),
        ("Begin with <think>!", r"\boxed{6}", 1.0),
        ("[THINK]", r"\boxed{6}", 0.0),
    ],
)
def test_thinking_that_the_prompt_opened_holds_no_answer(prompt_end, response, reward):
    scored = Group(Prompt("p", [1], "6", f"user: 1+5? assistant: {prompt_end}"), [rollout(response)])
    score({"name": "math"}, [scored])
    assert scored.rewards == [reward]


def test_a_source_without_an_entry_is_named():
    config = {"name": "by_source", "by_source": {"toy": "modsum"}}
    with pytest.raises(InputError, match=r"by_source: no entry for data source 'other'.*\['toy'\]"):
        check_reward(RewardConfig.model_validate(config), 100, ["toy", "other"])
    with pytest.raises(InputError, match="'other'"):
        score(config, [group("3", "#3", source="other")])


def test_custom_functions_and_their_failures(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    groups = [group("x", "abc", "bug", "loop", "abcd", "bug")]
    metrics = score({"name": f"{path}:judge", "timeout_s": 0.3, "on_error": "zero"}, groups)
    assert groups[0].rewards == rounded([0.3, 0.0, 0.0, 0.4, 0.0])
    assert (metrics["reward/errors"], metrics["reward/timeouts"], metrics["reward/unscored_frac"]) == (2, 1, 0)

    groups = [group("42", "42", "41", source="gsm", bonus=0.5)]
    score({"name": f"{path}:verl_style"}, groups)
    assert groups[0].rewards == [1.5, 0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{path}:jugde", "defines no function 'jugde'.*did you mean judge"),
        ("{path}x.py:judge", "there is no file"),
        ("no_such_module_here.rewards:judge", "no module 'no_such_module_here.rewards'"),
        ("{broken}:judge", "not valid Python"),
    ],
)
def test_a_custom_function_is_checked_without_running_it(tmp_path, name, message):
    path, broken = tmp_path / "mine.py", tmp_path / "broken.py"
    path.write_text(CUSTOM + "\nraise SystemExit('this file must not run')\n")
    broken.write_text("def judge(:\n")
    check_reward(RewardConfig(name=f"{path}:judge"), 100)
    with pytest.raises(InputError, match=message):
        check_reward(RewardConfig(name=name.format(path=path, broken=broken)), 100)


@pytest.mark.parametrize(
    "defines",
    [
        "async def judge(response, answer):\n    return 1.0\n",
        "try:\n    import nothing\nexcept ImportError:\n    def judge(response, answer):\n        return 1.0\n",
        "import operator as judge\n",
        "from operator import eq as judge\n",
        "from operator import *\n",
        "judge = lambda response, answer: 1.0\n",
    ],
)
def test_a_function_may_be_defined_in_many_ways(tmp_path, defines):
    (tmp_path / "mine.py").write_text(defines)
    check_reward(RewardConfig(name=f"{tmp_path}/mine.py:judge"), 100)


@pytest.mark.parametrize("content", [b"def judge(: pass", b"\xff", b"\0", b"(" * 100_000])
def test_a_file_that_is_no_python_is_named(tmp_path, content):
    (tmp_path / "mine.py").write_bytes(content)
    with pytest.raises(InputError, match=r"mine\.py is not valid Python"):
        check_reward(RewardConfig(name=f"{tmp_path}/mine.py:judge"), 100)


def test_overlong_punishment_follows_the_formula():
    """L = 100, buffer 20, penalty 0.5: nothing up to 80, then linear, the whole penalty at 100."""
    lengths = [10, 80, 81, 90, 100]
    assert [overlong_penalty(n, 100, 20, 0.5) for n in lengths] == rounded([0, 0, -0.025, -0.25, -0.5])
    groups = [Group(Prompt("p", [1], "3"), [rollout("#3", n) for n in lengths])]
    score({"name": "modsum", "overlong": {"buffer": 20, "penalty": 0.5}}, groups)
    assert groups[0].rewards == rounded([1, 1, 0.975, 0.75, 0.5])
    assert [r.raw_reward for r in groups[0].rollouts] == [1.0] * 5


@pytest.mark.parametrize("mask", [True, False])
def test_truncated_responses_are_masked_on_request(mask):
    groups = [Group(Prompt("p", [1], "3"), [rollout("#3"), rollout("#3", finish_reason="length")])]
    metrics = score({"name": "modsum", "mask_truncated": mask}, groups)
    assert [r.masked for r in groups[0].rollouts] == [False, mask]
    assert groups[0].rewards == [1.0, 1.0]  # still part of the baseline
    assert metrics["reward/masked_frac"] == (0.5 if mask else 0.0)


def test_scoring_after_close_is_an_error():
    rewarder = Rewarder(RewardConfig(name="math", num_workers=1), 100)
    rewarder.close()
    rewarder.close()
    with pytest.raises(RuntimeError, match="closed"):
        rewarder.score([group(r"\sqrt2", r"\boxed{\sqrt[4]{4}}")])


def test_no_groups():
    assert not any(score({"name": "modsum"}, []).values())


def test_a_buffer_longer_than_the_response_is_refused():
    config = RewardConfig.model_validate({"overlong": {"buffer": 200}})
    with pytest.raises(
        InputError, match=r"reward\.overlong\.buffer: 200 is more than the maximum response length \(100"
    ):
        check_reward(config, 100)


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
    assert "the reward of prompt p:0 failed; the response was '7'" in text
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
        scores = made.score([scored])
    metrics, failures = scores.metrics, scores.failures
    assert [rollout.raw_reward for rollout in scored.rollouts] == [0.0] * 6 + [1.0, 1.0, 2.5]
    assert scored.rewards == [1.0, 1.0, 2.5]
    assert metrics["reward/unscored_frac"] == metrics["reward/masked_frac"] == 6 / 9
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
