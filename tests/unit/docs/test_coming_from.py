"""docs/coming-from.json is the tables of the code, whose keys recipes have; two pages name metrics that runs write."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from megatron_rl.config import Recipe
from megatron_rl.config.foreign_keys import PROJECTS, READ_FROM, SHORT, rows
from tests.support.tiny import REPOSITORY
from tools.dev.foreign_names import main

DOCS = REPOSITORY / "docs"
SOURCES = "\n".join(path.read_text() for path in (REPOSITORY / "megatron_rl").rglob("*.py"))


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Every section that a field's type allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections(argument)]


def has(model: type[BaseModel], path: list[str]) -> bool:
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    return len(path) == 1 or any(has(section, path[1:]) for section in sections(field.annotation))


def test_our_keys_are_in_the_schema():
    named = {row.ours for row in rows()} - {"-"}
    assert len(named) > 80
    assert [key for key in named if not has(Recipe, key.split("."))] == []
    assert not has(Recipe, ["rollout", "temperatur"])


def test_the_record_of_names_is_written_from_the_tables(tmp_path):
    assert main([str(tmp_path / "written.json")]) == 0
    shipped = (DOCS / "coming-from.json").read_text(encoding="utf-8")
    assert shipped == (tmp_path / "written.json").read_text(encoding="utf-8"), "python -m tools.dev.foreign_names"


def test_the_page_has_rows_of_the_table():
    text = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    lines = text.split("## Keys\n\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) > 20
    for ours, *theirs in (
        [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")] for line in lines[2:]
    ):
        for project, keys in zip(PROJECTS, theirs, strict=True):
            known = {
                key
                for row in rows()
                if f"{row.ours}.".startswith(f"{ours[0]}.")
                for key, _ in row.keys[project]
            }  # fmt: skip
            for key in keys:
                first, dot, rest = key.partition(".")
                assert f"{SHORT[project].get(first, first)}{dot}{rest}" in known, (ours, key)
    for version, commit, _ in READ_FROM.values():
        assert f"{version} (`{commit}`)" in text.split("## Keys")[0].replace("\n", " ")


@pytest.mark.parametrize("page", ["coming-from.json", "reading-a-run.md"])
def test_metrics_are_written_somewhere(page):
    text = (DOCS / page).read_text()
    areas = "actor|critic|response_length|response|rollout_corr|training|mismatch|router"
    areas += "|exact|groups|reward|noise|precision|perf"
    named = set(re.findall(rf"[`\"]((?:{areas})/[\w/]+\w)(?:/…)?(?:`|\": {{)", text))
    assert len(named) > 10
    missing = [name for name in named if f'"{name}' not in SOURCES and f'"{name.split("/")[-1]}' not in SOURCES]
    # Means, maxima and rates are made from a name and an ending.
    missing = [name for name in missing if f'"{name.rsplit("_", 1)[0]}' not in SOURCES and name.split("/")[0] != "perf"]
    assert missing == []
