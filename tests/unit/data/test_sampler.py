"""The order of prompts: epochs, weighted mixes, determinism, exact resumption."""

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataConfig
from megatron_rl.data import MixedSampler, PromptSampler, in_another_order, load_tokenizer, load_train, make_sampler
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt
from tests.support.tiny import REPOSITORY

TINY = str(REPOSITORY / "recipes" / "tiny" / "model")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=f"x:{i}", tokens=[1, i], answer=str(i)) for i in range(count)]


def ids(taken: list[Prompt]) -> list[int]:
    return [prompt.tokens[1] for prompt in taken]


def test_file_order_wraps_round():
    sampler = PromptSampler(prompts(5), shuffle=False)
    assert [ids(sampler.take(3)) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert sampler.epoch == 2


def test_the_order_is_decided_by_the_seed():
    def walk(seed: int) -> list[int]:
        return ids(PromptSampler(prompts(30), seed=seed).take(75))

    assert walk(1) == walk(1)
    assert walk(1) != walk(2)


def test_the_seeds_order_stays_the_same_between_versions():
    assert ids(PromptSampler(prompts(8), seed=0).take(8)) == [2, 4, 3, 6, 5, 0, 1, 7]


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


def mix(sizes: dict[str, int], weights: dict[str, float], seed: int = 0) -> MixedSampler:
    prompts = {name: [Prompt(f"{name}:{i}", [1, i], str(i)) for i in range(size)] for name, size in sizes.items()}
    return MixedSampler({name: PromptSampler(part, seed=seed) for name, part in prompts.items()}, weights)


def source(prompt: Prompt) -> str:
    return prompt.id.partition(":")[0]


@settings(max_examples=100)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_every_source_has_its_share_at_every_moment(weights, batches):
    named = {f"s{i}": weight for i, weight in enumerate(weights)}
    sampler, taken = mix(dict.fromkeys(named, 5), named), []
    for size in batches:
        taken += sampler.take(size)
    total = sum(map(Fraction, weights))
    most = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    counts: Counter[str] = Counter()
    for number, prompt in enumerate(taken, start=1):
        counts[source(prompt)] += 1
        for name, weight in named.items():
            assert abs(counts[name] - number * Fraction(weight) / total) <= most, (number, name)


def test_every_source_has_epochs_of_its_own():
    sampler = mix({"large": 30, "small": 4}, {"large": 1, "small": 1})
    taken = sampler.take(60)
    assert Counter(prompt.id for prompt in taken if source(prompt) == "large") == {f"large:{i}": 1 for i in range(30)}
    small = [prompt.id for prompt in taken if source(prompt) == "small"]
    assert all(sorted(small[i : i + 4]) == [f"small:{j}" for j in range(4)] for i in range(0, 28, 4))


@settings(max_examples=40)
@given(batches=st.lists(st.integers(1, 7), min_size=2, max_size=12), stop=st.integers(0, 11))
def test_a_mix_goes_on_where_it_was_interrupted(batches, stop):
    sizes, weights = {"a": 5, "b": 3, "c": 8}, {"a": 0.2, "b": 0.5, "c": 1.1}
    whole, first, second = mix(sizes, weights), mix(sizes, weights), mix(sizes, weights)
    expected = [[p.id for p in whole.take(size)] for size in batches]
    taken = [[p.id for p in first.take(size)] for size in batches[:stop]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert taken + [[p.id for p in second.take(size)] for size in batches[stop:]] == expected


def test_other_weights_hold_from_the_resumption_on():
    sizes = {"a": 50, "b": 50}
    first, second = mix(sizes, {"a": 1, "b": 1}), mix(sizes, {"a": 1, "b": 9})
    before = first.take(20)
    second.load_state_dict(first.state_dict())
    after = second.take(20)
    assert Counter(map(source, after)) == {"a": 2, "b": 18}
    assert not {p.id for p in before} & {p.id for p in after}, "each source goes on in its own order"


def test_a_checkpoint_of_other_sources_is_refused():
    mixed, plain = mix({"a": 2, "b": 2}, {"a": 1, "b": 1}), PromptSampler([Prompt("a:0", [1], "")])
    with pytest.raises(InputError, match="trained on sources a, c with weights, the recipe mixes a, b"):
        mixed.load_state_dict(mix({"a": 2, "c": 2}, {"a": 1, "c": 1}).state_dict())
    with pytest.raises(InputError, match="trained on sources without weights"):
        mixed.load_state_dict(plain.state_dict())
    with pytest.raises(InputError, match="trained on a mix of a, b, and the recipe gives no weights"):
        plain.load_state_dict(mixed.state_dict())


def test_files_are_mixed_by_the_names_of_their_sources(tmp_path):
    for name, answers in (("easy", range(6)), ("hard", range(10, 13))):
        rows = [json.dumps({"problem": f"^{i % 7}=", "answer": str(i)}) for i in answers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    sources = [
        {"path": str(tmp_path / "easy.jsonl"), "weight": 2},
        {"path": str(tmp_path / "hard.jsonl"), "name": "easy:hard", "weight": 1},  # begins as the other's ids do
    ]
    data = DataConfig.model_validate({"train": sources})
    prompts = load_train(data, load_tokenizer(TINY))
    taken = make_sampler(prompts, data).take(9)
    assert sorted(int(p.answer) for p in taken if p.id.startswith("easy:hard:")) == [10, 11, 12]
    assert sorted(int(p.answer) for p in taken if not p.id.startswith("easy:hard:")) == list(range(6))


def test_a_source_of_which_nothing_is_left_is_named(tmp_path):
    for name, count in (("a", 400), ("b", 1)):
        rows = [json.dumps({"problem": f"^{i % 7}=", "answer": str(i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in "ab"]
    data = DataConfig.model_validate({"train": sources, "train_fraction": 0.01})
    with pytest.raises(InputError, match="source 'b' has a weight but no prompts left"):
        make_sampler(load_train(data, load_tokenizer(TINY)), data)
