"""docs/families.md lists every family, what config.json says of it, and what its tests are."""

from __future__ import annotations

import re

import pytest

from megatron_rl.model.architecture import architecture_from
from megatron_rl.model.families import FAMILIES
from tests.support.families import DENSE, MOE, ROUNDED
from tests.support.tiny import REPOSITORY

LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (REPOSITORY / "docs" / "families.md").read_text().splitlines()
    if re.match(r"\| `\w+` \|", line)
]
KINDS, TESTED = LINES[: len(FAMILIES)], LINES[len(FAMILIES) :]


def test_each_family_has_its_lines():
    names = [f"`{name}`" for name in FAMILIES]
    assert [line[0] for line in KINDS] == [line[0] for line in TESTED] == names


@pytest.mark.parametrize("line", KINDS, ids=lambda line: line[0].strip("`"))
def test_a_line_says_what_the_file_says(line):
    name, known, router, shared, biases, norms, turned = line
    family = FAMILIES[name.strip("`")]
    a = architecture_from({"model_type": family.model_type, **family.known[known]})
    assert router == ("none" if not a.is_moe else "sigmoid and bias" if a.sigmoid_router else "softmax")
    assert shared == ("no" if not a.shared_ffn_hidden_size else "with a gate" if a.shared_expert_gate else "yes")
    for cell, value in ((biases, a.qkv_bias), (norms, a.qk_layernorm)):
        wide = a.wide_qk_norm and cell is norms
        assert cell == ("over all heads" if wide else "yes" if value else "no") or cell.strip("`") in family.implemented
    assert turned == ("latent" if a.latent is not None else f"{a.rotary_fraction:g}")


@pytest.mark.parametrize("line", TESTED, ids=lambda line: line[0].strip("`"))
def test_each_y_is_a_test_and_each_refusal_one(line):
    """tests/support/families.py holds the families of the tests that the page names."""
    name, *cells = line
    name = name.strip("`")
    assert name in ("qwen3_moe", *MOE, *DENSE)
    assert cells[:2] + cells[4:6] == ["Y"] * 4
    assert cells[2:4] == (["no experts"] * 2 if name in DENSE else ["Y"] * 2)
    assert cells[6] == ("Y" if name == "qwen3_moe" else "refused" if name in MOE else "not tested")
    assert cells[7] == ("not tested" if name in DENSE else "Y")
    assert cells[8] == ("Y" if name in ("qwen3_moe", *ROUNDED) else "not tested" if name in DENSE else "refused")
