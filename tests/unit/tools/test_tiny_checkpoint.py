"""The lab's task is what the tool makes, and the tool makes the same bits again."""

import argparse
import json
import random
from pathlib import Path

import pytest
import torch

from tools.dev.make_tiny_checkpoint import (
    build_model,
    build_tiny_config,
    build_tokenizer,
    make_demonstration,
    make_splits,
    warm_up,
)

TASK = Path(__file__).parents[3] / "recipes" / "lab" / "task"
DIGITS = (14, 22)


@pytest.fixture(scope="module")
def splits():
    return make_splits(2048, 128, 0, DIGITS)


def test_the_labs_problems_are_what_the_tool_makes(splits):
    for name, problems in zip(("train", "validation"), splits, strict=True):
        rows = [json.loads(line) for line in (TASK / "data" / f"{name}.jsonl").read_text().splitlines()]
        assert [(row["problem"], row["answer"]) for row in rows] == [(p.text, p.answer) for p in problems]


def test_a_response_that_thinks_fits_the_recipes_limits(splits):
    tokenizer, rng = build_tokenizer(), random.Random(0)
    problems = [problem for split in splits for problem in split]
    responses = [make_demonstration(rng, problem, think_prob=1.0, slip_prob=0.1) for problem in problems]
    lengths = {len(tokenizer.encode(response, add_special_tokens=False)) + 1 for response in responses}  # and <eos>
    assert (min(lengths), max(lengths)) == (31, 47)
    assert max(len(tokenizer.encode(problem.text)) for problem in problems) <= 32


def test_the_warm_up_gives_the_same_bits_again(splits):
    args = argparse.Namespace(seed=0, lr=2e-3, steps=2, batch_size=4, digits=DIGITS, think_prob=0.8, slip_prob=0.045)
    weights = []
    for _ in range(2):
        model = build_model(build_tiny_config(size="nano"), 0)
        warm_up(model, build_tokenizer(), {problem.text for problem in splits[1]}, args)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    fresh = build_model(build_tiny_config(size="nano"), 0).state_dict()
    assert not all(torch.equal(weights[0][name], fresh[name]) for name in fresh)
