"""Which groups a step learns from: filtered by which reward, sampled in rounds of which size."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron_rl import train
from megatron_rl.batch import group_metrics, keep_informative
from megatron_rl.rewards.rewarder import Scores
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response
from tests.support.tiny import tiny_recipe

SCORES = [
    f"reward/{name}"
    for name in ("timeouts", "worker_failures", "errors", "retries", "unjudged", "masked_frac", "unscored_frac")
]


def group(name: str, raw: list[float], shaped: list[float] | None = None) -> Group:
    rollouts = [
        any_response(f"{name}/{i}", reward=shown, raw_reward=value)
        for i, (value, shown) in enumerate(zip(raw, shaped or raw, strict=True))
    ]
    return Group(Prompt(name, [1], "0"), rollouts)


def test_an_all_wrong_group_with_a_punished_response_is_informative_by_reward_alone():
    groups = [group("punished", [0.0, 0.0], [0.0, -0.5]), group("mixed", [0.0, 1.0])]
    assert [g.prompt.id for g in keep_informative(groups)] == ["punished", "mixed"]
    assert [g.prompt.id for g in keep_informative(groups, "raw_reward")] == ["mixed"]
    assert group_metrics(groups)["groups/informative_frac"] == 1.0
    assert group_metrics(groups, "raw_reward")["groups/informative_frac"] == 0.5


@pytest.fixture
def sampled():
    """Sizes of the rounds, and the ids of the groups kept, of one step; every third group has a signal."""

    def run(**batch):
        recipe, rounds, count = tiny_recipe(batch=batch), [], iter(range(1000))

        def sample(num_prompts, **_):
            rounds.append(num_prompts)
            numbers = [next(count) for _ in range(num_prompts)]
            return [group(str(n), [0.0, float(n % 3 == 0)]) for n in numbers]

        monitor = SimpleNamespace(phase=lambda name: nullcontext(SimpleNamespace(tokens=0)))
        run = SimpleNamespace(
            recipe=recipe,
            monitor=monitor,
            ahead=SimpleNamespace(sample=sample),
            reward=lambda groups, step: Scores(dict.fromkeys(SCORES, float(len(groups))), [], len(groups)),
            refuse_failures=lambda scores, step: None,
            prompts=SimpleNamespace(observe=lambda rates: None),
            learner=SimpleNamespace(num_updates=0),
        )
        kept, metrics = train.sample(run, 0)
        return rounds, [g.prompt.id for g in kept], metrics

    return run


def test_without_a_generation_size_a_round_samples_what_is_missing(sampled):
    rounds, kept, metrics = sampled(prompts=4, filter_groups=True, max_generations=10)
    assert rounds == [4, 2, 2, 1, 1]
    assert kept == ["0", "3", "6", "9"]
    assert metrics["groups/sampled"] == metrics["reward/retries"] == 10


def test_rounds_of_generation_prompts_are_cut_to_the_batch(sampled):
    rounds, kept, metrics = sampled(prompts=4, filter_groups=True, max_generations=10, generation_prompts=8)
    assert rounds == [8, 8]
    assert kept == ["0", "3", "6", "9"], "six have a signal; the first four are learned from"
    assert metrics["groups/sampled"] == 16


def test_rounds_end_at_max_generations(sampled):
    rounds, kept, _ = sampled(prompts=6, filter_groups=True, max_generations=2, generation_prompts=6)
    assert (rounds, kept) == ([6, 6], ["0", "3", "6", "9"])
