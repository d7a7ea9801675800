"""Every section, paper and metric that the repository cites is defined in docs/algorithms.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "algorithms.md"
PLACEHOLDERS = {"RUN", "RECIPE", "PATCH", "TILE"}  # usage lines of programs, subjects of patches, shapes
PARTS = {"Eq", "Eqs", "App", "Table", "Fig", "Figs", "Alg", "Algorithm"}  # of a paper, after its key
CITATION = re.compile(r"(?<![\w\])\"'`\[])\[([^\[\]]{2,160})\](?!\()")
ARXIV = re.compile(r"(?<![\d.])(\d{2}(?:0[1-9]|1[0-2])\.\d{5})(?!\d)")


def files() -> Iterator[Path]:
    for pattern in (
        "megatron_rl/**/*.py",
        "tools/**/*.py",
        "tests/unit/objective/*.py",
        "recipes/**/*.yaml",
        "patches/**/*.patch",
    ):
        yield from sorted(ROOT.glob(pattern))
    yield ROOT / "README.md"
    yield from sorted(ROOT.glob("docs/**/*.md"))


@cache
def prose(file: Path) -> str:
    """What a person wrote for people: docstrings and comments of code, comments of recipes, whole documents."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
        texts = [node.value for node in strings if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return "\n".join([*texts, *re.findall(r"(?:^|\s)# (.*)", text)])
    if file.suffix == ".yaml":
        lines = [line for line in text.splitlines() if "#" in line or line.startswith(("claim:", "source:"))]
        return "\n".join(line.partition("#")[2] or line for line in lines)
    if file.suffix == ".patch":
        return text.partition("\n---")[0]
    return text


def cited_keys(text: str) -> set[str]:
    """Keys in brackets: of ``[OH §2; LD Eqs 7-8]`` OH and LD."""
    keys = set()
    for match in CITATION.finditer(text):
        parts = re.split(r"[;,]\s*", match[1])
        if any(re.fullmatch(r"[A-Za-z]|[a-z_\d]+|[.…]+", part) for part in parts):
            continue  # a shape: [B, T], [LAYERS, K]
        for part in parts:
            word = re.match(r"[A-Z][A-Za-z0-9]+\b", part)
            if word and word[0] not in PARTS and re.match(r"(?: (?:§|et al|[A-Z]).*)?$", part[word.end() :], re.DOTALL):
                keys.add(word[0])
    return {key for key in keys if key not in PLACEHOLDERS and not key.isnumeric()}


def bibliography() -> dict[str, str]:
    section = PAGE.read_text(encoding="utf-8").split("\n## Bibliography\n")[1]
    rows = re.findall(r"\[([^\]]+)\]\((https://\S+)\)", section)
    assert len(rows) == len(dict(rows)), "a key stands twice"
    return dict(rows)


def test_cited_keys_are_found():
    assert cited_keys("std [OH §2; LD Eqs 7-8 for x], [FP16 Eq 8, LD App. C] and [DAPO]") == {
        "OH",
        "LD",
        "FP16",
        "DAPO",
    }
    assert cited_keys("[B, T] tokens, [LAYERS, K], [a link](x.md), `[FP]`, [LD Algorithm 1]") == {"LD"}


def test_every_cited_paper_is_in_the_bibliography():
    known = bibliography()
    cited = {(key, str(file.relative_to(ROOT))) for file in files() for key in cited_keys(prose(file))}
    assert {key for key, _ in cited} >= {"FP16", "OH", "LD", "VX", "R3", "GSPO", "DAPO", "FP"}, "nothing was looked at"
    assert not {pair for pair in cited if pair[0] not in known}


def test_every_arxiv_number_is_in_the_bibliography():
    known = set(ARXIV.findall("\n".join(bibliography().values())))
    cited = {(number, str(file.relative_to(ROOT))) for file in files() for number in ARXIV.findall(prose(file))}
    assert len({number for number, _ in cited}) > 10, "nothing was looked at"
    assert not {pair for pair in cited if pair[0] not in known}


def test_every_cited_section_exists():
    sections = set(re.findall(r"^## (\d+)\. ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    cited = {
        (number, str(file.relative_to(ROOT)))
        for file in files()
        for rest in re.findall(r"algorithms\.md((?:[^.)]|\.(?=\S)){0,100})", prose(file))
        for number in re.findall(r"§(\d+)", rest)
    }
    assert len({file for _, file in cited}) > 5, "nothing was looked at"
    assert not {pair for pair in cited if pair[0] not in sections}


def _expand(name: str) -> list[str]:
    match = re.match(r"(.*)\{([^}]+)\}(.*)$", name)
    return [match[1] + part + match[3] for part in match[2].split(",")] if match else [name]


def test_every_metric_that_code_names_is_defined():
    page = PAGE.read_text(encoding="utf-8").split("## 11.")[1].split("## Bib")[0]
    names = {name for term in re.findall(r"`([a-z_]+/[^`]+)`", page) for name in _expand(term)}
    areas = {name.partition("/")[0] for name in names}
    missing = set()
    for file in ROOT.glob("megatron_rl/**/*.py"):
        for name in re.findall(r"\"([a-z_]+/[A-Za-z0-9_]*[A-Za-z0-9])\"", file.read_text(encoding="utf-8")):
            area = name.partition("/")[0]
            if area in areas and not names & {name, f"{area}/*"}:
                missing.add((name, str(file.relative_to(ROOT))))
    assert len(names) > 40, "nothing was looked at"
    assert not missing


@pytest.mark.parametrize("folder", ["recipes", "megatron_rl", "docs"])
def test_nothing_points_to_a_text_that_is_not_here(folder):
    for file in files():
        if file.is_relative_to(ROOT / folder):
            assert not re.search(r"project's\s+(?:#\s+)?specification|\.\./shared", prose(file)), file
