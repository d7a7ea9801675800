"""The digit-sum task: answers, demonstrations and the reward; and the files that ship."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.rewarder import modsum_reward
from tests.support.rounding import standard_errors
from tools.dev.make_tiny_checkpoint import (
    ModsumProblem,
    build_tokenizer,
    make_demonstration,
    make_problem,
    make_splits,
)

TINY = Path(__file__).parents[3] / "recipes" / "tiny"


def test_the_worked_example():
    problem = ModsumProblem(digits=(2, 4, 1, 3))
    assert (problem.text, problem.answer) == ("^2413=", "0")
    demonstration = make_demonstration(random.Random(0), problem, think_prob=1.0, slip_prob=0.0)
    assert demonstration == "22411230#0"
    assert make_demonstration(random.Random(0), problem, think_prob=0.0, slip_prob=1.0) == "#0"


@given(st.integers(0, 2**32))
def test_without_slips_every_demonstration_is_rewarded(seed):
    rng = random.Random(seed)
    problem = make_problem(rng)
    assert modsum_reward(make_demonstration(rng, problem, think_prob=0.5, slip_prob=0.0), problem.answer) == 1.0


def test_slips_make_as_many_wrong_answers_as_their_probability_says():
    rng = random.Random(0)
    problem = ModsumProblem(digits=(1, 2))  # one slip is possible, and always changes the answer
    wrong = sum(
        1 - modsum_reward(make_demonstration(rng, problem, think_prob=1.0, slip_prob=0.25), problem.answer)
        for _ in range(4000)
    )
    assert abs(wrong / 4000 - 0.25) < standard_errors(math.sqrt(0.25 * 0.75), 4000)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("#3", 1.0),
        ("12#3", 1.0),
        ("#1#3", 1.0),
        ("3", 0.0),
        ("", 0.0),
        ("#", 0.0),
        ("#33", 0.0),
        ("#3 ", 0.0),
        ("#4", 0.0),
    ],
)
def test_only_the_text_after_the_last_mark_counts(response, reward):
    assert modsum_reward(response, "3") == reward


@given(st.text(), st.text())
def test_the_reward_is_total(response, answer):
    assert modsum_reward(response, answer) in (0.0, 1.0)


def read_rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TINY / "data" / f"{split}.jsonl").read_text().splitlines()]


def test_shipped_problems_are_right_and_held_out_ones_are_not_trained_on():
    train, validation = read_rows("train"), read_rows("validation")
    assert (len(train), len(validation)) == (2048, 256)
    for row in train + validation:
        assert row["answer"] == str(sum(int(digit) for digit in row["problem"][1:-1]) % 5)
    assert len({row["problem"] for row in train + validation}) == 2048 + 256
    assert len({row["id"] for row in train + validation}) == 2048 + 256


def test_shipped_problems_are_what_the_tool_makes():
    train, validation = make_splits(2048, 256, seed=0)
    assert [problem.text for problem in train] == [row["problem"] for row in read_rows("train")]
    assert [problem.text for problem in validation] == [row["problem"] for row in read_rows("validation")]


def test_shipped_checkpoint_is_small_and_its_tokenizer_inverts():
    from transformers import AutoTokenizer

    assert sum(file.stat().st_size for file in (TINY / "model").iterdir()) <= 6 * 1024**2
    shipped = AutoTokenizer.from_pretrained(TINY / "model")
    text = "^2413= 22 #0\nAz~!"
    for tokenizer in (shipped, build_tokenizer()):
        tokens = tokenizer.encode(text)
        assert tokens[0] == tokenizer.bos_token_id
        assert len(tokens) == 1 + len(text)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert shipped.get_vocab() == build_tokenizer().get_vocab()
