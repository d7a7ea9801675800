"""The sampler's walk: epochs, determinism, exact resumption."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data import PromptSampler, in_another_order
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=f"x:{i}", tokens=[1, i], answer=str(i)) for i in range(count)]


def ids(taken: list[Prompt]) -> list[int]:
    return [prompt.tokens[1] for prompt in taken]


def test_file_order_wraps_round():
    sampler = PromptSampler(prompts(5), shuffle=False)
    assert [ids(sampler.take(3)) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert sampler.epoch == 2


def test_every_epoch_visits_every_prompt_once_in_another_order():
    sampler = PromptSampler(prompts(50), seed=3)
    epochs = [ids(sampler.take(50)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != list(range(50))


def test_the_order_is_decided_by_the_seed():
    def walk(seed: int) -> list[int]:
        return ids(PromptSampler(prompts(30), seed=seed).take(75))

    assert walk(1) == walk(1)
    assert walk(1) != walk(2)


def test_the_seeds_order_stays_the_same_between_versions():
    assert ids(PromptSampler(prompts(8), seed=0).take(8)) == [2, 4, 3, 6, 5, 0, 1, 7]


def test_a_batch_larger_than_the_dataset_goes_round():
    sampler = PromptSampler(prompts(3), seed=1)
    taken = ids(sampler.take(10))
    assert [sorted(taken[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert sorted(taken[9:] + ids(sampler.take(2))) == [0, 1, 2]


@settings(max_examples=200)
@given(
    count=st.integers(1, 12),
    sizes=st.lists(st.integers(0, 15), max_size=12),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    interrupted=st.integers(0, 12),
)
def test_any_walk_is_fair_and_resumes_exactly(count, sizes, seed, shuffle, interrupted):
    sampler = PromptSampler(prompts(count), seed=seed, shuffle=shuffle)
    batches, state = [], None
    for number, size in enumerate(sizes):
        if number == interrupted:
            state = json.loads(json.dumps(sampler.state_dict()))  # what a checkpoint keeps
        batches.append(ids(sampler.take(size)))
        if size <= count:
            assert len(set(batches[-1])) == size  # no prompt twice in one batch
    walk = [index for batch in batches for index in batch]
    for start in range(0, len(walk) - count + 1, count):
        assert sorted(walk[start : start + count]) == list(range(count))
    counts = Counter(walk)
    assert max(counts.values(), default=0) - min(counts.get(i, 0) for i in range(count)) <= 1
    if state is not None:
        resumed = PromptSampler(prompts(count), seed=seed, shuffle=shuffle)
        resumed.load_state_dict(state)
        assert [ids(resumed.take(size)) for size in sizes[interrupted:]] == batches[interrupted:]


def test_another_dataset_or_order_cannot_be_resumed():
    state = PromptSampler(prompts(5), seed=1).state_dict()
    with pytest.raises(InputError, match=r"another dataset: 5 prompts with fingerprint .*, now 6 with"):
        PromptSampler(prompts(6), seed=1).load_state_dict(state)
    changed = prompts(5)
    changed[2] = Prompt(id="x:2", tokens=[1, 2], answer="other")
    with pytest.raises(InputError, match="another dataset"):
        PromptSampler(changed, seed=1).load_state_dict(state)
    with pytest.raises(InputError, match=r"data\.seed: the checkpoint was trained with 1, the recipe says 2"):
        PromptSampler(prompts(5), seed=2).load_state_dict(state)
    with pytest.raises(InputError, match=r"data\.shuffle"):
        PromptSampler(prompts(5), seed=1, shuffle=False).load_state_dict(state)


def test_a_new_run_may_go_on_in_another_order_from_the_same_place():
    before = PromptSampler(prompts(20), seed=1)
    before.take(26)
    state = before.state_dict()
    other = PromptSampler(prompts(20), seed=2)
    other.take(26)
    resumed = PromptSampler(prompts(20), seed=2)
    resumed.load_state_dict(in_another_order(state, 2) | {"delayed": other.state_dict()["delayed"]})
    assert ids(resumed.take(14)) == ids(other.take(14)) != ids(before.take(14))
    assert state["seed"] == 1, "the checkpoint's own state stays"
    mixed = {"sources": {"a": state, "b": state}, "weights": {"a": 1, "b": 2}}
    changed = in_another_order(mixed, 2)
    assert [part["seed"] for part in changed["sources"].values()] == [2, 2]
    assert changed["weights"] == mixed["weights"]


def test_no_prompts_no_sampler():
    with pytest.raises(InputError, match="empty"):
        PromptSampler([])
