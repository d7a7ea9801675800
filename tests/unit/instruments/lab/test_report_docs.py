"""docs/lab is what the kept runs say: pages of finished studies, nothing of unfinished ones."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass

import pytest

from megatron_rl.__main__ import main
from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab.archive import pack, read_packed, unpack
from megatron_rl.instruments.lab.foresight import foresee
from megatron_rl.instruments.lab.report import render
from megatron_rl.instruments.lab.runner import register
from tests.support.rounding import printed
from tests.unit.instruments.lab.test_archive import made
from tests.unit.instruments.lab.test_study import LAB
from tools.dev.lab_docs import fill, render_page, write_docs

DOCS = LAB.parents[1] / "docs"
STUDIES = [load_study(file) for file in sorted(LAB.glob("*/study.yaml"))]
MARKS = "before\n<!-- lab: {name} -->\nto be replaced\n<!-- /lab: {name} -->\nafter\n"


@pytest.fixture(scope="module")
def kept():
    """Each study of the repository with what its packed runs say; None without such a file."""
    files = {loaded.study.name: DOCS / "lab" / "runs" / f"{loaded.study.name}.jsonl.xz" for loaded in STUDIES}
    return [(one, read_packed(one, file) if (file := files[one.study.name]).is_file() else None) for one in STUDIES]


@pytest.mark.slow
def test_every_page_has_the_tables_of_its_runs(kept):
    complete = {one.study.name: results for one, results in kept if results is not None and results.complete}
    for name, results in complete.items():
        text = (DOCS / "lab" / f"{name}.md").read_text()
        assert render_page(results) in text, f"docs/lab/{name}.md is not of its runs: `python -m tools.dev.lab_docs`"
        assert results.as_json() == (DOCS / "lab" / f"{name}.json").read_text()
        assert (DOCS / "images" / f"lab-{name}.png").is_file()
    no_study = {"families"}
    assert {page.stem for page in (DOCS / "lab").glob("*.json")} - no_study == complete.keys()


NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?!\w)")
RANGE = re.compile(rf"{NUMBER.pattern}\s+to\s+[+−]?{NUMBER.pattern}")


@dataclass
class Figures:
    """What a study's runs say, unrounded."""

    decided: list[float]  # differences of the decisions, and what their arms have on average
    other: list[float]  # the same of what is described alone; p-values; what the seeds see; settings
    ends: list[float]  # of intervals, and of what the seeds see


@pytest.fixture(scope="module")
def figures(kept, tmp_path_factory):
    numbers = {}
    for loaded, results in kept:
        if results is None:
            continue
        study, folder = loaded.study, tmp_path_factory.mktemp(loaded.study.name)
        unpack(DOCS / "lab" / "runs" / f"{study.name}.jsonl.xz", folder)
        decisions = results.decisions()
        effects = [decision.effect for decision in decisions]
        others = [
            effect for arm in study.arms for outcome in study.outcomes if (effect := results.effect(arm, outcome))
        ]
        means = {
            (arm, outcome): statistics.fmean(values.values())
            for arm, outcomes in results.outcomes.items()
            for outcome, values in outcomes.items()
            if values
        }
        pairs = {(arm, one.outcome) for one in decisions for arm in (one.name, one.against)} & means.keys()
        foreseen = [value for row in foresee(loaded, folder) for value in (row.spread, row.smallest) if value]
        settings = [how.margin for how in study.outcomes.values() if how.margin]
        settings += map(float, NUMBER.findall(str([arm.set for arm in study.arms.values()])))
        numbers[study.name] = Figures(
            decided=[effect.mean for effect in effects] + [means[pair] for pair in pairs],
            other=[
                *(effect.mean for effect in others),
                *means.values(),
                *(decision.p_holm for decision in decisions),
                *foreseen,
                *settings,
            ],
            ends=[end for effect in effects + others for end in (effect.alike_lower, effect.alike_upper)] + foreseen,
        )
    return numbers


def not_found(words, known):
    """The numbers with a decimal point in ``words`` that none of ``known`` rounds to, whatever its sign."""
    numbers = NUMBER.findall(words)
    return [n for n in numbers if not any(abs(value) == printed(float(n), len(n.partition(".")[2])) for value in known)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.name.split(".")[0] for file in (DOCS / "lab" / "runs").iterdir()))
def test_numbers_in_the_words_of_a_page_are_those_of_its_runs(name, figures):
    words = (DOCS / "lab" / f"{name}.md").read_text().partition("<!-- lab:")[0]
    linked = re.findall(r"\]\((\w+)\.md\)", words)
    own = [figures[study] for study in (name, *linked) if study in figures]
    assert not_found(RANGE.sub("", words), [value for one in own for value in one.decided + one.other]) == []
    assert not_found(" ".join(RANGE.findall(words)), [value for one in own for value in one.ends]) == []


@pytest.mark.slow
def test_numbers_of_a_study_s_row_are_those_of_its_runs(figures):
    answer = (DOCS / "lab.md").read_text().partition("## How to run")[0]
    rows = re.findall(r"\| \[\w+\]\(lab/(\w+)\.md\)([^\n]*)", answer)
    assert {name for name, _ in rows} == figures.keys()
    for name, words in rows:
        assert not_found(words, figures[name].decided) == [], name


@pytest.mark.slow
def test_numbers_of_the_readme_are_those_of_the_runs(figures):
    words = (DOCS.parent / "README.md").read_text().partition("## Status")[0]
    words = re.sub(r"```.*?```", "", words, flags=re.DOTALL)  # the output of a command
    assert len(NUMBER.findall(words)) >= 3
    assert not_found(words, [value for one in figures.values() for value in one.decided]) == []


@pytest.mark.slow
def test_the_spread_of_the_study_clock_is_that_of_length_decay_s_runs(tmp_path):
    file = DOCS / "lab" / "runs" / "length_decay.jsonl.xz"
    unpack(file, tmp_path)
    rows = {(row.name, row.outcome): row for row in foresee(load_study(LAB / "length_decay"), tmp_path)}
    clock = load_study(LAB / "clock").study
    assert clock.outcomes["reward"].spread == round(rows["mean-rate", "reward"].spread, 2)
    assert rows["mean-rate", "reward"].known_from == "8 seeds"


def test_the_answer_is_short():
    assert len((DOCS / "lab.md").read_text().split()) <= 700


@pytest.fixture
def docs(tmp_path):
    """A documentation with pages for two studies and nothing in them yet."""
    folder = tmp_path / "docs"
    (folder / "lab" / "runs").mkdir(parents=True)
    for name in ("servers", "floor"):
        (folder / "lab" / f"{name}.md").write_text(MARKS.format(name=name))
    return folder


def packed(study, docs, root, jobs):
    for number, job in enumerate(jobs):
        made(study, job, root, seed=number)
    register(study, root)
    pack(study, root, docs / "lab" / "runs" / f"{study.study.name}.jsonl.xz")


def test_a_finished_study_gets_its_page_and_an_unfinished_one_nothing(docs, tmp_path, capsys):
    servers, floor, hacking = (load_study(LAB / name) for name in ("servers", "floor", "hacking"))
    packed(servers, docs, tmp_path / "servers", servers.jobs(tmp_path / "servers"))
    packed(floor, docs, tmp_path / "floor", floor.jobs(tmp_path / "floor", seeds=[0]))
    written = write_docs([servers, floor, hacking], docs)
    assert [path.relative_to(docs).as_posix() for path in written] == [
        "lab/servers.md",
        "images/lab-servers.png",
        "lab/servers.json",
    ]
    page = (docs / "lab" / "servers.md").read_text()
    assert page.startswith(
        "before\n<!-- lab: servers -->\n![curves of the study](../images/lab-servers.png)\n\n4 arms, "
    )
    assert page.endswith("\n<!-- /lab: servers -->\nafter\n")
    assert "to be replaced" not in page
    assert (docs / "lab" / "floor.md").read_text() == MARKS.format(name="floor")
    assert json.loads((docs / "lab" / "servers.json").read_text())["arms"].keys() == servers.study.arms.keys()
    assert (docs / "images" / "lab-servers.png").stat().st_size < 200_000
    file = docs / "lab" / "runs" / "servers.jsonl.xz"
    results = read_packed(servers, file)
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    for row, decision in zip(rows, results.decisions(), strict=True):
        arm, control = (
            f"{name} {statistics.fmean(results.outcomes[name][decision.outcome].values()):.3g}"
            for name in (decision.name, decision.against)
        )
        assert row.startswith(f"| {arm} against {control} | {decision.outcome} | {decision.expected} | ")
        assert row.endswith(f" | {decision.verdict} |")
    write_docs([servers, floor, hacking], docs)
    assert (docs / "lab" / "servers.md").read_text() == page
    # The command on the page prints what the page leaves out.
    capsys.readouterr()
    assert main(["lab", "report", str(LAB / "servers"), "--out", str(file)]) == 0
    assert capsys.readouterr().out == render(results)


def test_a_page_without_marks_is_refused(docs):
    for page in (docs / "nowhere.md", docs / "lab" / "floor.md"):
        with pytest.raises(InputError, match=rf"{page.name}: lacks the lines <!-- lab: other --> and .*; the tables"):
            fill(page, "other", "text")
