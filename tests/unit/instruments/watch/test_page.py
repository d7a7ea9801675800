"""The page: what it holds of a run, when it is written again, and a model's text that stays text."""

from __future__ import annotations

import html
import re
from types import SimpleNamespace

import pytest

from megatron_rl.__main__ import main
from megatron_rl.instruments.watch import page
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.run.control import RunLock
from tests.support.written_run import BANDS, EVIL, WrittenRun


@pytest.fixture
def written(tmp_path) -> WrittenRun:
    written = WrittenRun(tmp_path / "<b>run")
    for step in range(12):
        written.step(step, alarm=step == 7)
        written.sample(step, EVIL)
    return written


@pytest.fixture
def run(written) -> WatchedRun:
    run = WatchedRun(written.directory.root.name, written.directory.root)
    run.refresh()
    return run


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def test_the_overview_has_state_alarms_curves_mismatch_routes_and_texts(run):
    markup = page.overview([run])
    said = text_of(markup)
    assert "step 7: mismatch mismatch/rho_std = 1.02 > 0.5 for 1 steps; then: warn" in said
    assert "11 of 30" in said
    for title in ("reward", "mismatch: std of rho", "gradient norm", "mean rho by po"):
        assert title in said
    for band, label in enumerate(BANDS):
        assert f"<td>{label}</td><td>10</td><td>{1 + 0.01 * (band - 2):.4g}</td>" in markup
    assert "would route otherwise" in said
    assert said.count("response: ") == page.SAMPLES
    assert "12 steps" in said, "the page of `run why`"
    assert "step     4  mismatch-contract" in said
    assert not re.search(r"<script|<img|<b>|onerror=\"|\x1b|\u202e|(src|href)=[\"'](/|http)", markup), "text stays text"


def test_runs_that_have_not_begun(tmp_path):
    run = WatchedRun("run", tmp_path)
    run.refresh()
    said = text_of(page.overview([run]))
    for hint in ("waiting", "mismatch/rho_count", "routing.telemetry", "monitor.samples.every", "no such file"):
        assert hint in said
    (tmp_path / "metrics.jsonl").write_text("no json\n{}\n")
    assert "line 1: not valid JSON" in text_of(page.overview([run]))


def test_the_page_is_written_again_for_what_is_new_until_the_run_ends(written, tmp_path, monkeypatch):
    """Which `--once` does not wait for; a page of a run that goes on loads itself again."""
    file, sizes = tmp_path / "watch.html", []

    def sleep(seconds: float) -> None:
        sizes.append((file.stat().st_mtime_ns, b'http-equiv="refresh"' in file.read_bytes()))
        if len(sizes) == 2:
            written.step(12, reward=0.0625)
        if len(sizes) == 3:
            written.directory.done.write_text("1")

    monkeypatch.setattr(page, "time", SimpleNamespace(sleep=sleep))
    held = RunLock(written.directory.lock)
    with held:
        held.acquire()
        page.keep_page([WatchedRun("run", written.directory.root)], file, once=False)
    assert sizes[0] == sizes[1] < sizes[2]
    assert [again for _, again in sizes] == [True] * 3
    assert b'http-equiv="refresh"' not in file.read_bytes()
    assert b"0.0625" in file.read_bytes()
    assert main(["watch", str(written.directory.root), "--page", str(tmp_path / "once.html"), "--once"]) == 0
    assert (tmp_path / "once.html").read_bytes().startswith(b"<!doctype html>")
