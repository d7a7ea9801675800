"""What files of other projects set: inheritance, references, and files that are something else."""

from __future__ import annotations

import re

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.sources import read_nemo_rl, read_slime, read_verl
from megatron_rl.instruments.translate.translation import number


def test_references_and_what_the_machine_decides(tmp_path):
    (tmp_path / "a.yaml").write_text("x: {one: 2, two: '${.one}', text: 'a-${x.one}', three: '${mul:${x.two},3}'}\n")
    lines = ["defaults: [a.yaml]", "y: ['${x.three}', '${oc.env:TOKEN}', '${oc.env:N,4}', '${none}', '${z}']"]
    (tmp_path / "b.yaml").write_text("\n".join([*lines, "z: '${z}'", "grpo: {a: 1}"]))
    source = read_nemo_rl(tmp_path / "b.yaml", {"TOKEN": "t"})
    assert {key: value for key, value in source.values.items() if key[0] == "x"} == {
        "x.one": 2, "x.two": 2, "x.text": "a-2", "x.three": 6
    }  # fmt: skip
    known, unknown = source.values["y"][:3], source.values["y"][3:]
    assert known == [6, "t", "4"]
    assert "\ue000${none}\ue001" in unknown[0]
    assert "\ue000" in unknown[1]  # it refers to itself
    assert source.notes == ["read with what it inherits from: a.yaml"]
    (tmp_path / "c.yaml").write_text("defaults: a.yaml\nx: {_override_: true, four: 4}\ngrpo: {enabled: false, b: 1}\n")
    source = read_nemo_rl(tmp_path / "c.yaml", {})
    assert source.values == {"x.four": 4, "grpo.enabled": False, "grpo.b": 1}
    assert source.off == {"grpo.enabled", "grpo.b"}


def test_verls_configuration_fills_its_references_in(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {a: 4, b: '${data.a}', c: '${other}'}\ndefaults: [x]\n")
    values = read_verl(tmp_path / "c.yaml", {}).values
    assert values == {"data.a": 4, "data.b": 4, "data.c": "\ue000${other}\ue001", "defaults": ["x"]}


@pytest.mark.parametrize(
    ("read", "name", "text", "said"),
    [
        (read_nemo_rl, "run.yaml", "defaults: gone.yaml\ngrpo: {}\n", "gone.yaml: cannot be read as YAML"),
        (read_nemo_rl, "run.yaml", "defaults: run.yaml\ngrpo: {}\n", "it inherits from itself"),
        (read_nemo_rl, "run.yaml", "sft: {a: 1}\n", "no section grpo"),
        (read_nemo_rl, "run.yaml", "- 1\n", "expected a mapping"),
        (read_nemo_rl, "run.sh", "x", "configurations are .yaml files"),
        (read_slime, "run.sh", "python other.py --lr 1\n", "no command that starts slime"),
        (read_slime, "run.sh", "python train.py --learning-rate 1\n", "has no arguments of slime"),
        (read_slime, "run.sh", "python train.py --hf-checkpoint m --loss-type sft_loss\n", "--loss-type sft_loss"),
        (read_verl, "run.sh", "python train.py --lr 1\n", "no command with overrides of verl"),
        (read_verl, "run.yaml", "grpo: {}\n", "none of verl's sections"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, read, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        read(tmp_path / name, {})


@pytest.mark.parametrize(
    ("value", "is_read_as"),
    [("1e-6", 1e-6), ("12", 12), (" -3 ", -3), ("1.0", 1.0), (True, None), ("True", None), ([], None)],
)
def test_a_number_may_be_written_as_text(value, is_read_as):
    assert number(value) == is_read_as
    assert type(number(value)) is type(is_read_as)
