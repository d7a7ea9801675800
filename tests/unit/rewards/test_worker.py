"""How a worker calls a reward function, and how long it waits for it."""

from __future__ import annotations

import pytest

from megatron_rl.errors import InputError
from megatron_rl.rewards.worker import RewardFunction, Setup


@pytest.mark.parametrize(
    ("source", "is_async", "takes_lists"),
    [
        ("def f(response, answer): ...", False, False),
        ("async def f(solution_str, ground_truth): ...", True, False),
        ("def f(responses, answers): ...", False, True),
        ("async def f(solution_strs, ground_truths, **others): ...", True, True),
        ("class F:\n    async def __call__(self, response, answer): ...\nf = F()", True, False),
    ],
)
def test_the_signature_says_how_a_function_is_called(source, is_async, takes_lists):
    names: dict = {}
    exec(source, names)
    function = RewardFunction.of("f", names["f"])
    assert (function.is_async, function.takes_lists) == (is_async, takes_lists)


def test_a_list_function_with_further_arguments_is_refused():
    with pytest.raises(InputError, match=r"for lists, f\(responses, answers\)"):
        RewardFunction.of("f", lambda responses, answers, weights: [])


def test_the_longest_wait_has_all_attempts_and_pauses():
    assert Setup(1.0, 64, wait_s=10.0, retries=0, retry_wait_s=5.0).longest_wait_s == 10.0
    assert Setup(1.0, 64, wait_s=10.0, retries=4, retry_wait_s=5.0).longest_wait_s == 50.0 + 5 + 10 + 20 + 30
