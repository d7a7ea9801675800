"""A curriculum by measured difficulty: what an epoch visits, unbiased weights, the file of rates, exact resumption."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch import build_batch
from megatron_rl.config.data import CurriculumConfig, DataConfig
from megatron_rl.data import PromptSampler, PromptSet, make_sampler
from megatron_rl.data.sampler import CurriculumSampler, read_success_rates
from megatron_rl.errors import InputError
from megatron_rl.run.lookahead import Begun
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response
from tests.support.tiny import tiny_recipe

MEASURED = {"easy_threshold": 0.9, "hard_threshold": 0.1}


def prompts(count: int, source: str = "x") -> list[Prompt]:
    return [Prompt(f"{source}:{i}", [1, i], str(i)) for i in range(count)]


def sampler(count: int, *, rates: list[float] | None = None, seed: int = 0, **config) -> CurriculumSampler:
    known = np.full(count, np.nan) if rates is None else np.array(rates)
    return CurriculumSampler(prompts(count), CurriculumConfig(**MEASURED | config), known, seed=seed)


def rows(taken: list[Prompt]) -> list[int]:
    return [prompt.tokens[1] for prompt in taken]


def test_what_is_not_measured_comes_in_the_order_without_a_curriculum():
    plain = PromptSampler(prompts(20), seed=4)
    assert sampler(20, seed=4, easy_fraction=0.1).take(33) == plain.take(33)


def test_an_epoch_visits_the_share_of_the_easy_and_of_the_hard_and_all_others_once():
    rates = [1.0] * 10 + [0.0] * 20 + [0.5] * 7 + [math.nan] * 3
    walk = sampler(40, rates=rates, easy_fraction=0.25, hard_fraction=0.5)
    epochs = [rows(walk.take(3 + 10 + 7 + 3)) for _ in range(6)]
    for epoch in epochs:
        assert max(Counter(epoch).values()) == 1
        kinds = Counter("easy" if row < 10 else "hard" if row < 30 else "other" for row in epoch)
        assert kinds == {"easy": 3, "hard": 10, "other": 10}, "a share is rounded up"
    assert walk.epoch == 5, "the sixth epoch is taken to its last prompt"
    assert len({row for epoch in epochs for row in epoch if row < 10}) > 3, "each epoch draws others"


def test_rates_of_a_file_count_in_the_first_epoch(tmp_path):
    rates = [1.0] * 6 + [0.5] * 4
    file = tmp_path / "x.prompts.jsonl"
    lines = [json.dumps({"prompt_id": f"x:{row}", "success_rate": rate}) for row, rate in enumerate(rates)]
    file.write_text("\n".join(lines))
    sections = {"train": [{"path": "x.jsonl", "name": "x"}], "curriculum": {"easy_fraction": 0.5}}
    visits = []
    for rates_file in (None, str(file)):
        sections["curriculum"]["success_rates"] = rates_file
        walk = make_sampler(PromptSet.of(prompts(10)), DataConfig.model_validate(sections))
        walk.take(8)
        visits.append(walk.epoch)
    assert visits == [0, 1], "three of the six easy prompts and the four others are an epoch"


def test_the_visits_of_a_kind_are_spread_over_the_epoch():
    rates = [1.0] * 500 + [0.5] * 500
    epoch = np.array(rows(sampler(1000, rates=rates, easy_fraction=0.5).take(750)))
    first = int((epoch[:375] < 500).sum())
    # 250 easy visits among 750 places: hypergeometric with mean 125 and variance 375·(1/3)·(2/3)·375/749; 6 sigma
    assert abs(first - 125) < 6 * math.sqrt(375 * (1 / 3) * (2 / 3) * 375 / 749)


def test_what_was_measured_counts_from_the_next_epoch_on():
    walk = sampler(10, easy_fraction=0.1, hard_fraction=0.1)
    walk.observe({prompt.id: 1.0 for prompt in walk.take(4)})
    walk.observe({prompt.id: 0.5 for prompt in walk.take(6)})
    assert walk.metrics() == {
        "curriculum/normal": 6,
        "curriculum/easy": 4,
        "curriculum/hard": 0,
        "curriculum/unmeasured": 0,
    }
    assert len(set(rows(walk.take(7)))) == 7
    walk.take(1)
    assert walk.epoch == 2, "an epoch has the six and one of the four"


def test_prompts_that_were_not_taken_are_not_measured():
    walk = sampler(5)
    walk.observe({"x:0": 1.0, "other:1": 0.0})
    assert walk.metrics()["curriculum/unmeasured"] == 5


def test_easy_first_sorts_the_epoch_by_falling_rate_and_what_is_not_measured_is_last():
    rates = [0.2, math.nan, 0.8, 0.8, 0.5, math.nan]
    assert [rates[row] for row in rows(sampler(6, rates=rates, order="easy_first").take(4))] == [0.8, 0.8, 0.5, 0.2]


@pytest.mark.parametrize("seed", range(3))
def test_unbiased_weights_give_every_kind_its_share_of_all_prompts(seed):
    rates = [1.0] * 30 + [0.0] * 50 + [0.5] * 20
    walk = sampler(100, rates=rates, easy_fraction=0.1, hard_fraction=0.5, unbiased=True, seed=seed)
    epoch = walk.take(3 + 25 + 20)
    total: Counter[str] = Counter()
    for prompt in epoch:
        total["easy" if prompt.tokens[1] < 30 else "hard" if prompt.tokens[1] < 80 else "normal"] += prompt.weight
    shares = {kind: weight / len(epoch) for kind, weight in total.items()}
    # a sum of fewer than 100 products, each rounded at most four times
    assert shares == pytest.approx({"easy": 0.3, "hard": 0.5, "normal": 0.2}, rel=100 * 4 * 2.0**-53, abs=0)


def test_without_unbiased_every_weight_is_one():
    walk = sampler(10, rates=[1.0] * 5 + [0.5] * 5, easy_fraction=0.2)
    assert {prompt.weight for prompt in walk.take(6)} == {1.0}


def test_a_weight_multiplies_the_groups_advantages():
    def group(name: str, weight: float) -> Group:
        responses = [any_response(f"{name}/{i}", 2, reward=i) for i in range(2)]
        return Group(Prompt(name, [1], "0", weight=weight), responses)

    recipe = tiny_recipe()
    plain, weighted = (
        build_batch(0, [group("a", w), group("b", 1.0)], recipe.batch, recipe.objective).sequences for w in (1.0, 3.0)
    )
    assert [s.advantage for s in weighted] == [s.advantage * w for s, w in zip(plain, (3.0, 3.0, 1.0, 1.0))]
    assert any(s.advantage for s in plain)


def test_weights_of_what_was_begun_are_restored():
    begun = Begun(3, [replace(prompt, weight=weight) for prompt, weight in zip(prompts(2), (2.5, 1.0))])
    state = json.loads(json.dumps(begun.state_dict()))
    assert Begun.of(state, {prompt.id: prompt for prompt in prompts(2)}) == begun
    assert "weights" not in Begun(3, prompts(2)).state_dict()


@settings(max_examples=100)
@given(
    count=st.integers(1, 12),
    batches=st.lists(st.integers(1, 7), min_size=2, max_size=14),
    stop=st.integers(0, 14),
    fraction=st.sampled_from([0.1, 0.5, 1.0]),
    config=st.sampled_from([{}, {"order": "easy_first"}, {"unbiased": True}]),
)
def test_resumption_is_exact_wherever_it_stops(count, batches, stop, fraction, config):
    def rate(prompt: Prompt, number: int) -> float:
        return (prompt.tokens[1] * 7 + number) % 5 / 4

    def walk(numbers, one: CurriculumSampler) -> list[list[Prompt]]:
        visits = []
        for number in numbers:
            visits.append(one.take(batches[number]))
            if number:  # measured one batch late, as where batches run ahead
                one.observe({prompt.id: rate(prompt, number) for prompt in visits[-2 if len(visits) > 1 else -1]})
        return visits

    def make() -> CurriculumSampler:
        return sampler(count, easy_fraction=fraction, hard_fraction=fraction, **config)

    stop = min(stop, len(batches))
    whole, first, second = make(), make(), make()
    before = walk(range(stop), whole)
    assert walk(range(stop), first) == before
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert walk(range(stop, len(batches)), second) == walk(range(stop, len(batches)), whole)
    assert second.state_dict() == whole.state_dict()


def test_a_checkpoint_of_another_curriculum_is_refused():
    state = sampler(5).state_dict()
    for other in (PromptSampler(prompts(5)), sampler(5, easy_fraction=0.5)):
        with pytest.raises(InputError, match=r"data\.curriculum: the checkpoint was trained with .*easy_threshold"):
            other.load_state_dict(state)
    with pytest.raises(InputError, match=r"trained with None"):
        sampler(5).load_state_dict(PromptSampler(prompts(5)).state_dict())


def test_a_checkpoint_from_before_curricula_is_read():
    state = PromptSampler(prompts(5)).state_dict()
    del state["curriculum"]
    PromptSampler(prompts(5)).load_state_dict(state)


def test_every_source_of_a_mix_has_its_own_walk():
    sources = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 1}]
    data = DataConfig.model_validate({"train": sources, "curriculum": {"easy_fraction": 0.1}})
    mixed = make_sampler(PromptSet.of(prompts(6, "a") + prompts(6, "b")), data)
    mixed.observe({prompt.id: 1.0 for prompt in mixed.take(6)})
    assert mixed.metrics()["curriculum/easy"] == 6
    other = make_sampler(PromptSet.of(prompts(6, "a") + prompts(6, "b")), data)
    other.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    assert other.take(9) == mixed.take(9)


def test_rates_of_a_file_are_found_by_id(tmp_path):
    file = tmp_path / "rates.jsonl"
    lines = [("x:3", 1.0), ("x:1", 0.25), ("unknown:1", 0.5)]
    file.write_text("".join(json.dumps({"prompt_id": i, "success_rate": r}) + "\n" for i, r in lines))
    known = PromptSet.of(prompts(5))
    assert np.array_equal(
        read_success_rates(file, known), np.array([np.nan, 0.25, np.nan, 1.0, np.nan], np.float32), equal_nan=True
    )
    chosen = known.choose(np.array([4, 3]), "two")
    assert np.array_equal(read_success_rates(file, chosen), np.array([np.nan, 1.0], np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt_id": "x:1", "success_rate": 2}', r"line 1: ValueError\('success_rate 2 is outside"),
        ('{"prompt_id": "x:1"}', "line 1: KeyError"),
        ("{", "line 1: JSONDecodeError"),
        ("[]", "line 1: TypeError"),
        ('{"prompt_id": "y:1", "success_rate": 1}', "names no prompt of data.train: it has 'y:1', the data 'x:0'"),
        ("", "names no prompt"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, says):
    file = tmp_path / "rates.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=says):
        read_success_rates(file, PromptSet.of(prompts(3)))


def test_a_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_success_rates(tmp_path / "none", PromptSet.of(prompts(3)))
