"""docs/algorithms.md defines every name that an objective may have, with the schema's defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from megatron_rl.config.objective import Correction
from megatron_rl.config.policy_terms import PolicyTerm
from megatron_rl.objective.advantages import ADVANTAGES
from megatron_rl.objective.aggregation import AGGREGATIONS

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?")


def rows(section: int) -> dict[str, str]:
    """First cell, a name in code marks, → the whole row, of the tables of a section."""
    text = PAGE.split(f"## {section}. ")[1].split("\n## ")[0]
    return {row[1]: row[0] for row in re.finditer(r"^\| `([^`]+)` \|.*$", text, re.MULTILINE)}


def members(union) -> dict[str, type]:
    """`name` or `mode` → section class, of a discriminated union."""
    classes = get_args(get_args(union)[0])
    return {(cls.model_fields.get("name") or cls.model_fields["mode"]).default: cls for cls in classes}


@pytest.mark.parametrize(("section", "names"), [(1, set(ADVANTAGES)), (4, set(AGGREGATIONS))])
def test_every_name_is_defined(section, names):
    assert set(rows(section)) == names


@pytest.mark.parametrize(("section", "union"), [(2, PolicyTerm), (3, Correction)])
def test_every_term_and_correction_is_defined_with_its_defaults(section, union):
    defined = rows(section)
    assert set(defined) | {"function"} == set(members(union))  # docs/add-an-objective.md has this one
    for name, cls in members(union).items():
        printed = {float(number) for number in NUMBER.findall(defined.get(name, ""))}
        defaults = {f.default for f in cls.model_fields.values() if isinstance(f.default, float)}
        assert defaults <= printed, f"{name}: the row lacks {defaults - printed}"
