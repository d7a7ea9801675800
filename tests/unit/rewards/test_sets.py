"""Sets of real numbers are equal if the same points belong to both, however they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.compare import same
from megatron_rl.rewards.tree import Algebra
from tests.support.answers import SMALL

ENDS = st.integers(-3, 3)
PIECES = st.lists(st.tuples(ENDS, ENDS, st.sampled_from("(["), st.sampled_from(")]")), min_size=1, max_size=3)


def belongs(at: float, pieces: list[tuple[int, int, str, str]]) -> bool:
    return any(
        (low < at or (low == at and left == "[")) and (at < high or (high == at and right == "]"))
        for low, high, left, right in pieces
    )


def written(pieces: list[tuple[int, int, str, str]], as_inequality: bool) -> str:
    if not as_inequality:
        return r"\cup".join(f"{left}{low},{high}{right}" for low, high, left, right in pieces)
    signs = {"(": "<", "[": r"\le", ")": "<", "]": r"\le"}
    return r"\text{ or }".join(f"{low}{signs[left]} x{signs[right]} {high}" for low, high, left, right in pieces)


@SMALL
@given(one=PIECES, other=PIECES, spellings=st.tuples(st.booleans(), st.booleans()))
def test_unions_are_equal_where_their_points_are(one, other, spellings):
    one, other = ([piece for piece in pieces if piece[0] < piece[1]] for pieces in (one, other))
    if one and other:
        equal = all(belongs(at / 4, one) == belongs(at / 4, other) for at in range(-16, 17))
        assert same(written(one, spellings[0]), written(other, spellings[1]), Algebra()) == equal


@pytest.mark.parametrize("inside", ["x-1", "2x-3", "1-3x", "x"])
@pytest.mark.parametrize("sign", ["<", r"\le", ">", r"\ge"])
def test_a_distance_is_an_interval(inside, sign):
    scale, shift = {"x-1": (1, 1), "2x-3": (2, 3), "1-3x": (3, 1), "x": (1, 0)}[inside]
    low, high = rf"\frac{{{shift - 5}}}{{{scale}}}", rf"\frac{{{shift + 5}}}{{{scale}}}"
    closed = sign in (r"\le", r"\ge")
    if sign in ("<", r"\le"):
        gold, other = ([f"[{low},{high}]", f"({low},{high})"])[:: 1 if closed else -1]
    else:
        outer = [rf"(-\infty,{low}]\cup[{high},\infty)", rf"(-\infty,{low})\cup({high},\infty)"]
        gold, other = outer[:: 1 if closed else -1]
    assert same(f"|{inside}|{sign} 5", gold, Algebra())
    assert not same(f"|{inside}|{sign} 5", other, Algebra())
