"""A small script or configuration that stands for gigabytes, or nests without end, is answered with a sentence."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import MAX_EXPANDED, read_script
from megatron_rl.instruments.translate.sources import resolved

DOUBLING = ["a=$a$a", 'a="${a}${a}"', "a+=$a", "a=${a:-x}${a:-y}", 'A=("${A[@]}" "${A[@]}")', "A+=($A[@] ${A[@]})"]
SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)


def read(tmp_path, text: str):
    (tmp_path / "run.sh").write_text(text)
    return read_script(tmp_path / "run.sh")


@SAME_FOLDER
@given(st.lists(st.sampled_from(DOUBLING), min_size=1, max_size=60), st.integers(1, 50))
def test_values_that_double_end_with_a_sentence(tmp_path, lines, length):
    text = "\n".join([f"a={'x' * length}", "A=(x y)", *lines, "python train.py $a"])
    try:
        script = read(tmp_path, text)
    except InputError as error:
        assert "its variables stand for more than 16 million characters" in str(error)  # noqa: PT017
    else:
        assert sum(len(word) for words in script.commands for word in words) <= MAX_EXPANDED


@pytest.mark.parametrize(
    "text",
    [
        "a=x\n" + "a=$a$a\n" * 40,
        "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
        f"a={'x' * 500_000}\n" + "b=$a$a$a$a\n" * 40,
        f"a={'x' * 500_000}\n" + "a+=y\n" * 100_000,
    ],
)
def test_bombs(tmp_path, text):
    with pytest.raises(InputError, match="its variables stand for more than 16 million characters"):
        read(tmp_path, text)


@pytest.mark.parametrize("piece", ["${b:-", "$(", '"$(', "((", "if true; then\n", "{ "])
def test_deep_nesting(tmp_path, piece):
    try:
        read(tmp_path, "a=" + piece * 5000 + "x" + {"${b:-": "}", "$(": ")", '"$(': ')"'}.get(piece, "") * 5000 + "\n")
    except InputError as error:
        assert "nest too deep" in str(error) or "is not closed" in str(error)  # noqa: PT017


def test_expressions_files_and_words(tmp_path):
    many = "+".join("x" * 50)
    script = read(tmp_path, f"x='{many}'\necho $((x))\ny={'z' * 900_000}\necho ${{y%a*b}} end\n")
    assert script.commands[0][0] == "echo"
    assert script.commands[1][-1] == "end"
    with pytest.raises(InputError, match="sources more than 100 files"):
        read(tmp_path, "source run.sh\n" * 50)


@pytest.mark.parametrize("text", ["${a0}${a0}", "${oc.env:X}${.a0}"])
def test_references_that_double(text):
    values = {"a0": "x" * 1000} | {f"a{i}": f"${{a{i - 1}}}" * 4 for i in range(1, 15)}
    with pytest.raises(InputError, match="its references stand for more than 16 million characters"):
        resolved(values | {"b": text}, {})
