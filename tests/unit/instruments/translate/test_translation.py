"""What a translation makes of values: numbers written as text, dotted keys, a line, and a name with its size."""

from __future__ import annotations

import pytest

from megatron_rl.instruments.translate.translation import flattened, number, run_name, shown


@pytest.mark.parametrize(
    ("value", "is_read_as"),
    [
        ("1e-6", 1e-6),
        ("12", 12),
        (" -3 ", -3),
        ("1.0", 1.0),
        (7, 7),
        (True, None),
        ("True", None),
        (None, None),
        ([], None),
    ],
)
def test_a_number_may_be_written_as_text(value, is_read_as):
    assert number(value) == is_read_as
    assert type(number(value)) is type(is_read_as)


def test_sections_become_dotted_keys():
    assert flattened({"a": {"b": 1, "c": {"d": [2]}}, "e": None, "f": {}}) == {"a.b": 1, "a.c.d": [2], "e": None}


def test_a_value_is_shown_on_one_line_of_100_characters():
    assert shown({"a": [1, None]}) == '{"a": [1, null]}'
    assert shown("two\n  lines") == "two lines"
    assert shown("x" * 100) == "x" * 100
    assert shown("x" * 101) == "x" * 97 + "..."


@pytest.mark.parametrize(
    ("text", "name"), [("My run: v2", "My-run-v2-4n8g"), ("..", "run-4n8g"), ("x" * 200, "x" * 160 + "-4n8g")]
)
def test_a_name_ends_with_the_size_of_the_job(text, name):
    assert run_name(text, 4, 8) == name
