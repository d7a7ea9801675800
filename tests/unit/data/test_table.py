"""A `PromptSet` is the list of its prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data import PromptSet, table
from megatron_rl.types import Prompt

TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=2), values, max_size=2),
    max_leaves=4,
)
EXTRA = st.dictionaries(st.text(max_size=3), JSON | st.tuples(st.integers()) | st.binary(max_size=2), max_size=2)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
PROMPTS = st.lists(st.builds(Prompt, TEXT, TOKENS, TEXT, TEXT, st.sampled_from("abc"), EXTRA), max_size=9)


@given(PROMPTS, st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_a_set_is_the_list_of_its_prompts(prompts, rows_of_a_batch, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "ROWS_OF_A_BATCH", rows_of_a_batch)
        whole = PromptSet.of(prompts)
    rows = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=5)) if prompts else []
    chosen = whole.choose(np.array(rows, dtype=np.int64), "some")
    for found, expected in ((whole, prompts), (chosen, [prompts[row] for row in rows])):
        assert repr(list(found)) == repr(expected)  # NaN is not equal to itself
        assert repr(found[1:]) == repr(expected[1:])
        assert found.lengths.tolist() == [len(p.tokens) for p in expected]
        assert found.num_different == len({(tuple(p.tokens), p.answer, p.data_source) for p in expected})
        assert found.data_sources == sorted({p.data_source for p in expected})
        limit = data.draw(st.integers(0, 2**31))
        assert repr(found.beyond(limit)) == repr(next((p for p in expected if max(p.tokens) >= limit), None))
        names = [p.id for p in expected[::2]]
        assert found.named([*names, "nowhere" * 3]).keys() == set(names)
        assert (found.fingerprint, found.digest) == (PromptSet.of(expected).fingerprint, PromptSet.of(expected).digest)


def test_places_outside_are_refused():
    prompts = PromptSet.of([Prompt("a", [1], "1")])
    assert prompts[-1].id == "a"
    for place in (1, -2):
        with pytest.raises(IndexError):
            prompts[place]
