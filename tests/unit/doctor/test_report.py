"""Reports as data, as text and as a page."""

from __future__ import annotations

import json
import re

import pytest

from megatron_rl.doctor import report
from megatron_rl.doctor.checks import Check, Result, Setting, failed, not_run, passed
from megatron_rl.doctor.report import page
from megatron_rl.errors import InputError

RESULTS = [
    Result(
        Check("one", 5, "Is one <there>?", ""),
        passed("it is", table={"a": {"x": 1.23456}, "b": {"x": 2, "y": "z"}}),
        1.2,
    ),
    Result(
        Check("two", 5, "Is two there?", ""), failed("it is <not>", "Bring it.", share=0.5), 2.0, "Traceback & more"
    ),
    Result(Check("three", 5, "Is three there?", ""), not_run("no GPU"), 0.0),
]


def make(monkeypatch, node: str, results=RESULTS) -> dict:
    monkeypatch.setenv("SLURMD_NODENAME", node)
    return report.make(results, Setting("cpu", 2, "/tmp"), 0.0)


def test_a_report_holds_everything(monkeypatch):
    read_back = json.loads(json.dumps(make(monkeypatch, "n1")))
    (node,) = read_back["nodes"]
    assert (read_back["format"], node["node"], node["device"], node["ranks"]) == (1, "n1", "cpu", 2)
    assert [c["status"] for c in node["checks"]] == ["pass", "fail", "not run"]
    assert node["checks"][1] == {
        "name": "two",
        "question": "Is two there?",
        "status": "fail",
        "reason": "it is <not>",
        "fix": "Bring it.",
        "figures": {"share": 0.5},
        "seconds": 2.0,
        "budget_s": 5,
        "log": "Traceback & more",
    }
    assert [name for name, _ in report.failures(read_back)] == ["n1"]
    assert "torch" in node["versions"]


def test_the_page_loads_nothing_and_says_all(monkeypatch):
    text = page(make(monkeypatch, "n1"))
    assert not re.search(r"(?:src|href)=|url\(|@import", text)
    plain = re.sub(r"<[^>]+>", "", text.split("<body>")[1])
    for words in (
        "1 failed",
        "it is &lt;not&gt;",
        "Bring it.",
        "Traceback &amp; more",
        "no GPU",
        "1.23456",
        "n1",
        "1.2",
    ):
        assert words in plain
    assert text.count("<details open>") == 1  # what failed


def test_nodes_are_merged_and_a_missing_one_fails(monkeypatch, tmp_path):
    files = [tmp_path / name for name in ("n1.json", "n2.json", "n3.json")]
    files[0].write_text(json.dumps(make(monkeypatch, "n1", RESULTS[:1])))
    files[1].write_text(json.dumps(make(monkeypatch, "n2", RESULTS[:1])))
    good = report.merge(files[:2])
    assert [node["node"] for node in good["nodes"]] == ["n1", "n2"]
    assert not report.failures(good)
    merged = report.merge(files, ["n1", "n2", "n3"])
    assert [(name, check["name"]) for name, check in report.failures(merged)] == [("n3", "report")]
    assert "--exclude=n3" in page(merged)
    assert "n3: report: no report of this node" in report.summary(merged)


def test_of_many_nodes_the_page_begins_with_what_failed(monkeypatch):
    nodes = [make(monkeypatch, f"n{i}", RESULTS if i == 7 else RESULTS[:1])["nodes"][0] for i in range(20)]
    overview = page({"format": 1, "nodes": nodes}).split("<h2>")[0]
    assert ("n7" in overview, "n8" in overview, "it is &lt;not&gt;" in overview) == (True, False, True)


def test_what_is_no_report_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match=r"x\.json: not a report"):
        report.merge([tmp_path / "x.json"])


def test_a_line_names_the_fix():
    assert "fix: Bring it." in report.line(RESULTS[1])
    assert "\n" not in report.line(RESULTS[0])
