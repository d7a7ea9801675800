"""Every file, module and test that README, docs and the headers of recipes name is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "slurm" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADERS = sorted((ROOT / "recipes").rglob("*.yaml"))
FOLDERS = "megatron_rl|docs|recipes|tools|tests|patches|slurm"
FULL = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*{{}},-]*[\w/*}}]")
SHORT = re.compile(r"(?<![\w./-])[a-z_]+(?:/[a-z_]+)*/[\w-]+\.(?:py|yaml|sbatch|sh|json)\b")
HISTORY = ("no longer", "by hand, ", "today's code", "used to be", "in an earlier version", "was changed to")
ELSEWHERE = ("plots/", "servers/<", "checkpoints/", "my/")  # of a run, a user
ELSEWHERE += ("verl/", "slime/", "nemo_rl/", "vllm/", "megatron/core/")  # of another project
ELSEWHERE += ("torch/", "triton/", "transformer_engine/", "nvidia/", "flashinfer/")  # of a package


@cache
def repository() -> tuple[str, ...]:
    """Paths of all files in the folders that documents speak of."""
    roots = (ROOT / folder for folder in FOLDERS.split("|"))
    return tuple(str(path.relative_to(ROOT)) for root in roots for path in root.rglob("*") if path.is_file())


def text_of(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml":
        return "\n".join(line for line in text.splitlines() if line.startswith("#"))
    return text


def is_placeholder(path: str) -> bool:
    """Paths with a part to fill in: STUDY, RECIPE, NAME."""
    return re.search(r"(?:^|[/.])[A-Z]{2,}(?:$|[/.])", path) is not None and "README" not in path


def named_paths(text: str) -> set[str]:
    """Paths from the root of the repository, ``{a,b}`` written out."""
    paths = set()
    for name in FULL.findall(text):
        group = re.match(r"(.*)\{([^}]*)\}(.*)$", name)
        names = [group[1] + part + group[3] for part in group[2].split(",")] if group else [name]
        paths.update(names)
    return {name for name in paths if not is_placeholder(name)}


def exists(name: str) -> bool:
    if "*" in name:
        return any(ROOT.glob(name.rstrip("/")))
    return (ROOT / name).exists()


def where(file: Path) -> str:
    return str(file.relative_to(ROOT))


def anchors(file: Path) -> set[str]:
    """What a heading is called in a link: lower case, punctuation left out, blanks as hyphens."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", DOCUMENTS, ids=where)
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(file)):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            page = file.parent / path if path else file
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), target


def test_the_readme_leads_to_every_document():
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", text_of(ROOT / "README.md")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == linked


def test_functions_are_found_from_the_readme():
    """The examples of CONTRIBUTING.md: a row of the README's map, a file of its folder, a function of the file."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Finding a function")[1].split("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "`" in line]
    examples = [row for row in rows if len(row) == 4]
    assert len({file.partition("/")[0] for _, _, file, _ in examples}) == len(examples) >= 3
    for _, place, file, name in examples:
        (row,) = re.findall(rf"^\| {re.escape(place)} \| (.*) \|$", text_of(ROOT / "README.md"), re.MULTILINE)
        assert f"`{file.partition('/')[0]}/`" in row
        body = ast.parse((ROOT / "megatron_rl" / file).read_text(encoding="utf-8")).body
        for part in name.split("."):
            node = next(node for node in body if getattr(node, "name", None) == part)
            body = node.body


def test_paths_exist():
    named = {(name, where(file)) for file in [*DOCUMENTS, *HEADERS] for name in named_paths(text_of(file))}
    assert len(named) > 80, "nothing was looked at"
    assert not {(name, file) for name, file in named if not exists(name)}


def test_shortened_paths_are_ends_of_paths():
    named = {(name, where(file)) for file in DOCUMENTS for name in SHORT.findall(text_of(file))}
    named = {(name, file) for name, file in named if not name.startswith(ELSEWHERE) and not is_placeholder(name)}
    assert len(named) > 30, "nothing was looked at"
    ends = {
        "/".join(parts[-k:]) for parts in (path.split("/") for path in repository()) for k in range(1, len(parts) + 1)
    }
    assert not {(name, file) for name, file in named if name not in ends}


def test_modules_that_developers_start_exist():
    pattern = r"(?:-m |`)(tools\.[a-z_]+(?:\.[a-z_]+)*)"
    named = {(name, where(f)) for f in [*DOCUMENTS, *HEADERS] for name in re.findall(pattern, text_of(f))}
    assert named, "nothing was looked at"
    module = {name: name.replace(".", "/") for name, _ in named}
    forms = (".py", "/__main__.py")
    assert not {(name, f) for name, f in named if not any((ROOT / (module[name] + form)).exists() for form in forms)}


def test_tests_that_documents_cite_exist():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    defined = set(re.findall(r"^\s*(?:async )?def (test_\w+)", sources, re.MULTILINE))
    for file in DOCUMENTS:
        for name, rest in re.findall(r"`(test_[a-z0-9_]+)(…)?`", text_of(file)):
            assert name in defined or (rest and any(known.startswith(name) for known in defined)), (name, where(file))


@pytest.mark.parametrize("file", DOCUMENTS, ids=where)
def test_documents_say_what_is(file):
    """History is for commit messages, and runs for the JSON beside a document."""
    text = text_of(file).lower()
    assert [phrase for phrase in HISTORY if phrase in text] == []


def test_documents_stay_short():
    """As `wc -w` counts README and docs: a new page pays with words of others."""
    pages = [file for file in DOCUMENTS if "slurm" not in file.parts]
    assert sum(len(text_of(file).split()) for file in pages) <= 25_960
