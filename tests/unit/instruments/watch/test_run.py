"""A watched run: its records are those of metrics.jsonl whatever happens to the file, and its state is told."""

from __future__ import annotations

import os

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch import run as watched
from megatron_rl.instruments.watch.run import WatchedRun, open_runs
from megatron_rl.monitor.run_directory import encode_line, read_metrics
from megatron_rl.run.control import RunLock
from tests.support.written_run import WrittenRun


def run_of(folder, *lines: str | bytes) -> WatchedRun:
    data = b"".join((line.encode() if isinstance(line, str) else line).rstrip(b"\n") + b"\n" for line in lines)
    (folder / "metrics.jsonl").write_bytes(data)
    run = WatchedRun("run", folder)
    run.refresh()
    return run


def test_records_are_those_of_the_file(tmp_path):
    written = WrittenRun(tmp_path)
    for step in range(5):
        written.step(step, odd=float("inf"), **({"val/reward/mean": 0.5} if step % 2 == 0 else {}))
    run = WatchedRun("run", tmp_path)
    run.refresh()
    assert run.records == read_metrics(tmp_path)
    assert run.last_step == 4
    assert run.latest("val/reward/mean") == 0.5
    assert run.latest("none") is None


@pytest.mark.parametrize("line", ["", "{", "[]", '{"step": 1, "a": "x"}', '{"a": 1}', b"\xff"])
def test_a_line_that_is_no_record_is_counted_and_left_out(tmp_path, line):
    run = run_of(tmp_path, encode_line(0, {"a": 1}), line, encode_line(1, {"a": 2}))
    assert run.broken_lines == 1
    assert [record["a"] for record in run.records] == [1, 2]


def test_a_step_that_is_recorded_again_replaces_it_and_all_later(tmp_path):
    lines = [encode_line(step, {"a": step}) for step in range(4)]
    run = run_of(tmp_path, *lines, encode_line(2, {"a": 20}))
    assert [record["a"] for record in run.records] == [0, 1, 20]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))  # its second line goes, and the first one stands
    run.refresh()
    assert [record["a"] for record in run.records] == [0, 1, 2]


def test_what_is_left_is_told_without_the_pause_between_two_lives(tmp_path):
    written = WrittenRun(tmp_path, num_steps=10)
    times = [0, 2, 4, 6, 1000, 1002, 1004]
    run = run_of(tmp_path, *(f'{{"step": {step}, "time": {at}}}' for step, at in enumerate(times)))
    assert run.eta_s() is None  # nobody holds the run
    with RunLock(written.directory.lock) as lock:
        lock.acquire()
        run.refresh()
        assert run.eta_s() == 3 * 2


def test_who_holds_the_run_is_alive_silent_or_gone(tmp_path, monkeypatch):
    written = WrittenRun(tmp_path)
    run = WatchedRun("run", tmp_path)
    run.refresh()
    assert run.status() == "waiting"
    written.step(0)
    with RunLock(written.directory.lock) as lock:
        lock.acquire()
        run.refresh()
        assert run.status() == "running"
        monkeypatch.setattr(watched, "SILENT_S", 0.0)
        assert run.status() == "silent"
    run.refresh()
    assert run.status() == "ended"
    written.directory.done.write_text("1")
    assert run.status() == "done"


@pytest.mark.parametrize(
    ("rewards", "alarm", "status"),
    [([0.8] * 10, None, "done"), ([0.8] * 12, 7, "alarmed"), ([0.8] * 10 + [0.1] * 10, None, "collapsed")],
)
def test_a_run_that_ended_badly_is_no_plain_done(tmp_path, rewards, alarm, status):
    written, run = WrittenRun(tmp_path), WatchedRun("run", tmp_path)
    for step, reward in enumerate(rewards):
        written.step(step, reward=reward, alarm=step == alarm)
    written.directory.done.write_text("done\n")
    run.refresh()
    assert run.status() == status
    assert [event.step for event in run.alarms()] == ([] if alarm is None else [alarm])


def test_labels_differ(tmp_path):
    for name in ("a/run", "b/run", "c/run"):
        (tmp_path / name).mkdir(parents=True)
    folders = [str(tmp_path / name) for name in ("a/run", "b/run", "b/run", "b/run")]
    labels = [run.label for run in open_runs([*folders, f"base={folders[0]}", f"base={folders[1]}"])]
    assert labels == ["run", "b/run", "b/run (2)", "b/run (3)", "base", "base (2)"]
    with pytest.raises(InputError, match="no such folder; expected a run directory"):
        open_runs([str(tmp_path / "typo")])
    (loop := tmp_path / "loop").symlink_to(loop)
    with pytest.raises(InputError, match=r"loop: .*expected a run directory"):
        open_runs([str(loop)])


def test_folders_and_pipes_in_place_of_files_are_no_lines(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    os.mkfifo(tmp_path / "log.txt")
    run = WatchedRun("run", tmp_path)
    run.refresh()
    assert run.status() == "waiting"
