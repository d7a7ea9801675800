"""Every key of a recipe stands in a shipped recipe or a document, so that a reader can meet it; and a test sets it.

`python -m tests.unit.docs.test_recipe_keys` prints the files of tests that set each key.
"""

from __future__ import annotations

import json
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
    code += json.loads((ROOT / "docs" / "coming-from.json").read_text(encoding="utf-8"))["keys"]
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


OWN_FILE = Path(__file__).relative_to(ROOT)


@cache
def text_of_each_test() -> dict[str, str]:
    """Text of each file of tests that can set a key."""
    files = sorted(path for path in (ROOT / "tests").rglob("*.py") if path.relative_to(ROOT) != OWN_FILE)
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


@cache
def words_in(file: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text_of_each_test()[file]))


@cache
def files_that_assign(name: str) -> list[str]:
    """Files with `name:`, `name=`, a quoted `name` before a colon, or `["name"] =`."""
    assigned = re.compile(rf"\b{name}\b['\"]?\]?\s*[:=](?!=)")
    return [file for file, text in text_of_each_test().items() if name in words_in(file) and assigned.search(text)]


def files_that_set(owner: type[BaseModel], name: str) -> list[str]:
    """Files of tests that assign the key and name its section, by its key or by its class."""
    around = {owner.__name__} | {path[-2] for path in PATHS[owner, name] if len(path) > 1}
    alone = any(len(path) == 1 for path in PATHS[owner, name]) or SECTIONS_WITH[name] == 1
    return [file for file in files_that_assign(name) if alone or around & words_in(file)]


@pytest.mark.parametrize(("owner", "name"), PATHS, ids=[".".join(paths[0]) for paths in PATHS.values()])
def test_each_key_is_set_by_a_test(owner, name):
    assert files_that_set(owner, name), (
        f"{' and '.join(map('.'.join, PATHS[owner, name]))}: no test sets the key; write one that shows its effect"
    )


if __name__ == "__main__":
    for (section, key), its_paths in PATHS.items():
        print(f"{'.'.join(its_paths[0])}: {', '.join(files_that_set(section, key))}")
