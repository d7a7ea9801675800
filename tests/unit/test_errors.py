"""What a message may hold: no character that controls a terminal, no text without an end."""

from __future__ import annotations

import pytest

from megatron_rl.errors import message_text, printable, shown


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b", r"\x9b"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\ud800", r"\ud800"),
        ("é…", "é…"),
    ],
)
def test_what_controls_a_terminal_is_written_as_an_escape(text, written):
    assert printable(text) == written


def test_a_very_long_message_says_how_much_was_cut():
    assert message_text(ValueError("x" * 20_000)) == "x" * 20_000
    assert message_text(ValueError("x" * 20_007)) == "x" * 20_000 + " … (7 characters more)"


def test_a_value_is_one_line_of_at_most_so_many_characters():
    assert shown("a\nb") == r"'a\nb'"
    assert shown(ValueError("two\n  lines")) == "two lines"
    assert shown(7) == "7"
    assert shown("x" * 500, most=10) == "'xxxxxx..."
    assert len(shown(ValueError("x" * 500))) == 300
    assert len(shown([["x" * 500] * 500] * 500)) <= 300
