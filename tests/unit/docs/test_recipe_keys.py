"""Every key of a recipe stands in a shipped recipe or in a document, so that a reader can meet it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from megatron_rl.config.explain import sections_of
from megatron_rl.config.recipe import Recipe
from megatron_rl.config.yaml12 import parse

ROOT = Path(__file__).parents[3]
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
Path_ = tuple[str, ...]


def fields(section: type[BaseModel], above: Path_ = ()) -> Iterator[tuple[type[BaseModel], str, Path_]]:
    """Defining section, name and path of each key without keys below it. Items of a list have the list's path."""
    for key, field in section.model_fields.items():
        below = sections_of(field.annotation)
        for part in below:
            yield from fields(part, (*above, key))
        if not below:
            owner = next(base for base in reversed(section.__mro__) if key in getattr(base, "model_fields", {}))
            yield owner, key, (*above, key)


PATHS: dict[tuple[type[BaseModel], str], list[Path_]] = {}
for owner, name, path in fields(Recipe):
    PATHS.setdefault((owner, name), []).append(path)  # one section may stand in several places, as a data source does
SECTIONS_WITH = Counter(name for _, name in PATHS)


def in_values(value: object, above: Path_ = ()) -> Iterator[Path_]:
    """Paths of all keys of a recipe."""
    for item in value if isinstance(value, list) else ():
        yield from in_values(item, above)
    for key, below in value.items() if isinstance(value, dict) else ():
        yield (*above, str(key))
        yield from in_values(below, (*above, str(key)))


@cache
def in_recipes() -> frozenset[Path_]:
    files = sorted((ROOT / "recipes").rglob("*.yaml"))
    return frozenset(path for file in files for path in in_values(parse(file.read_text(encoding="utf-8"))[0]))


@cache
def code_in_documents() -> list[frozenset[str]]:
    """The words of each code mark and of each line of a code block."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code = [code for page in pages for code in CODE.findall(page.read_text(encoding="utf-8"))]
    return [frozenset(re.findall(r"\w+", line)) for text in code for line in text.splitlines()]


def is_in_documents(path: Path_) -> bool:
    """Whether code in a document names the key together with its section, or alone where no other section has it."""
    words = set(path[-1:] if SECTIONS_WITH[path[-1]] == 1 else path[-2:])
    return any(words <= line for line in code_in_documents())


@pytest.mark.parametrize(("owner", "name"), PATHS, ids=[".".join(paths[0]) for paths in PATHS.values()])
def test_each_key_stands_in_a_recipe_or_in_a_document(owner, name):
    places = PATHS[owner, name]
    assert any(path in in_recipes() or is_in_documents(path) for path in places), (
        f"{' and '.join(map('.'.join, places))}: in no recipe and in no document; use the key in a recipe, or name it "
        "in a document"
    )
