"""A launch script's commands with variables, arrays and branches filled in; what is not known is said."""

from __future__ import annotations

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import read_script, readable, unresolved_names


def words_of(tmp_path, text, **variables):
    file = tmp_path / "run.sh"
    file.write_text(text)
    script = read_script(file, variables)
    return script.commands[-1], script.notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=3\nrun x=$A y=${A}b", ["run", "x=3", "y=3b"]),
        ("run x=${A:-4} y=${B-5}", ["run", "x=4", "y=5"]),
        ("A=\nrun x=${A:-4} y=${A-5}.", ["run", "x=4", "y=."]),
        ("B=2\nrun x=${A:-${B:-9}}", ["run", "x=2"]),
        ("A=1\nrun ${A:+--on} ${B:+--off}", ["run", "--on"]),
        ("run x=$((1024 * 2 + 1))", ["run", "x=2049"]),
        ("N=8\nM=$((N * 2))\nrun x=$((M / 3))", ["run", "x=5"]),
        ("A=(--n 2 # two\n --m '3 4')\nrun \"${A[@]}\" end", ["run", "--n", "2", "--m", "3 4", "end"]),
        ("A=(x=1)\nA+=(y=2)\nrun ${A[@]}", ["run", "x=1", "y=2"]),
        ('E=()\nrun "${E[@]}" a', ["run", "a"]),
        ("A='b c'\nrun $A \"$A\"", ["run", "b", "c", "b c"]),
        ("F=/d/t.parquet\nrun files=\"['$F']\"", ["run", "files=['/d/t.parquet']"]),
        ("run a \\\n  b \\\n  c 2>&1 | tee log", ["run", "a", "b", "c", "2>&1"]),
        ("# run no\nrun a # b\n", ["run", "a"]),
        ("cat <<EOF\nrun no\nEOF\nrun yes", ["run", "yes"]),
    ],
)
def test_words(tmp_path, text, expected):
    file = tmp_path / "run.sh"
    file.write_text(text)
    commands = read_script(file).commands
    assert next(command for command in commands if command[0] == "run") == expected


def test_branches(tmp_path):
    text = """
B=${BACKEND:-vllm}
if [ "$B" = vllm ]; then
    X=1
elif [ "$B" = sglang ]; then
    X=2
else
    X=3
fi
[ 4 -gt 2 ] && Y=more || Y=less
run $X $Y
"""
    assert words_of(tmp_path, text)[0] == ["run", "1", "more"]
    assert words_of(tmp_path, text, BACKEND="sglang")[0] == ["run", "2", "more"]
    assert words_of(tmp_path, text, BACKEND="other")[0] == ["run", "3", "more"]


def test_what_the_machine_decides_is_said(tmp_path):
    text = 'D=$(probe)\nif [ "$D" = gpu ]; then\n  T=2\nfi\nrun a=$D b=${T} c=$HOST'
    words, notes = words_of(tmp_path, text)
    assert [readable(word) for word in words] == ["run", "a=$(probe)", "b=${T}", "c=${HOST}"]
    assert unresolved_names(words[2]) == ["${T}"]
    assert len(notes) == 1
    assert "branches were left out" in notes[0]
    words, notes = words_of(tmp_path, text.replace("D=$(probe)", "D=${D:-$(probe)}"), D="gpu", HOST="h")
    assert (words, notes) == (["run", "a=gpu", "b=2", "c=h"], [])


def test_a_file_beside_the_script_is_followed(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL_ARGS=(--layers 2)")
    text = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "$D/models/m.sh"\n'
    assert words_of(tmp_path, text + "run ${MODEL_ARGS[@]}") == (["run", "--layers", "2"], [])
    assert "not there" in words_of(tmp_path, "source other.sh\nrun a")[1][0]


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "A=(b", "run ${A", "run $(a"])
def test_what_is_not_closed_is_refused_with_its_line(tmp_path, text):
    (tmp_path / "run.sh").write_text(f"\n{text}")
    with pytest.raises(InputError, match=r"run\.sh:2: .* not closed"):
        read_script(tmp_path / "run.sh")


def test_values_that_double_end_with_a_sentence(tmp_path):
    (tmp_path / "run.sh").write_text("a=x\n" + "a=$a$a\n" * 40)
    with pytest.raises(InputError, match="its variables stand for more than 16 million characters"):
        read_script(tmp_path / "run.sh")
