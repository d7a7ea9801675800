"""What every section of a recipe shares: nothing is converted, and short ways of writing stand for the full ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import ValidationError

from megatron_rl.config.base import AnyPath, OffCount, Section, Short, ShortList, is_function_path


class Part(Section):
    name: str | None
    size: int = 1


class Whole(Section):
    part: Annotated[Part, Short("name", or_null=True)] = Part(name="usual")
    parts: Annotated[list[Part], ShortList("name")] = []
    share: float = 0.5
    on: bool = False
    path: AnyPath = Path()
    every: OffCount = 3


def test_a_short_form_stands_for_the_full_one():
    assert Whole(part="a").part == Part(name="a") == Whole(part={"name": "a"}).part
    assert Whole(part=None).part == Part(name=None)


def test_a_list_may_be_written_as_one_item_or_null():
    a, b = Part(name="a"), Part(name="b", size=2)
    assert Whole(parts="a").parts == [a]
    assert Whole(parts={"name": "b", "size": 2}).parts == [b]
    assert Whole(parts=["a", {"name": "b", "size": 2}]).parts == [a, b]
    assert Whole(parts=None).parts == []


@pytest.mark.parametrize(
    "keys",
    [{"share": "0.5"}, {"share": float("nan")}, {"on": 1}, {"share": True}, {"unknown": 1}, {"part": {"nam": "a"}}],
)
def test_nothing_is_converted_and_no_key_is_passed_over(keys):
    with pytest.raises(ValidationError):
        Whole(**keys)


def test_null_is_a_count_of_0():
    assert (Whole(every=None).every, Whole().every) == (0, 3)
    with pytest.raises(ValidationError):
        Whole(every=-1)


def test_a_path_is_written_as_text():
    assert Whole(path="a/b").path == Path("a/b")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("my/reward.py:score", True),
        ("reward.py:_score1", True),
        ("reward.py", False),
        ("reward:score", False),
        ("reward.py:1score", False),
        (".py:score", False),
        (7, False),
    ],
)
def test_a_function_is_a_file_and_a_name(text, is_one):
    assert is_function_path(text) == is_one
