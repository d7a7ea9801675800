"""A file that another process writes, cuts and replaces is read on without a line lost, doubled or made up."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.instruments.watch import run as run_module
from megatron_rl.instruments.watch.run import LineFollower


def read(follower: LineFollower, known: list[bytes], max_bytes: int = 2**20) -> list[bytes]:
    """What a reader holds once nothing is left to read."""
    while True:
        kept, new = follower.poll(max_bytes)
        del known[kept:]
        known += new
        if not follower.is_behind:
            return known


def whole_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]


def test_a_line_is_given_once_it_is_whole(tmp_path):
    file = tmp_path / "metrics.jsonl"
    follower = LineFollower(file)
    assert follower.poll() == (0, [])
    file.write_bytes(b"one\ntw")
    assert follower.poll() == (0, [b"one"])
    assert follower.poll() == (1, [])
    with file.open("ab") as writer:
        writer.write(b"o\n")
    assert follower.poll() == (1, [b"two"])


def test_a_cut_file_that_has_grown_beyond_its_old_size_is_noticed(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"a1\nb1\nc1\n")
    follower = LineFollower(file)
    follower.poll()
    os.truncate(file, 3)
    with file.open("ab") as writer:
        writer.write(b"b2\nc2\nd2\n")
    assert follower.poll() == (1, [b"b2", b"c2", b"d2"])


def test_a_file_that_goes_away_has_no_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"a\n")
    follower = LineFollower(file)
    follower.poll()
    file.unlink()
    assert follower.poll() == (0, [])
    file.write_bytes(b"b\n")
    assert follower.poll() == (0, [b"b"])


text = st.lists(st.sampled_from(["line", "\n", "part", "x" * 9])).map("".join)
changes = st.one_of(
    st.tuples(st.just("append"), text),
    st.tuples(st.just("cut"), st.floats(0, 1), st.just("")),
    st.tuples(st.just("cut and append"), st.floats(0, 1), text),
    st.tuples(st.just("replace"), text),
)


@settings(max_examples=200)
@given(st.lists(changes, max_size=12), st.sampled_from([1, 3, 2**20]))
def test_a_reader_holds_the_whole_lines_of_the_file_after_any_change(tmp_path_factory, steps, max_bytes):
    file = tmp_path_factory.mktemp("lines") / "file"
    file.touch()
    follower, known = LineFollower(file), []
    for number, (kind, *values) in enumerate(steps, start=1):
        data = values[-1].replace("\n", f" {number}\n").encode()  # as steps and times, no line comes again later
        if kind.startswith("cut"):
            os.truncate(file, int(values[0] * file.stat().st_size))
        if kind == "replace":
            other = file.with_name("other")
            other.write_bytes(data)
            os.replace(other, file)
        else:
            with file.open("ab") as writer:
                writer.write(data)
        os.utime(file, ns=(number, number))  # two changes within one tick of the clock would look alike
        assert read(follower, known, max_bytes) == whole_lines(file.read_bytes())


def test_reading_on_costs_the_new_lines_and_the_last_one(tmp_path, monkeypatch):
    """Hundreds of megabytes are read once."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"x" * 99 + b"\n" + b"y" * 999_999 + b"\n")
    follower = LineFollower(file)
    known = read(follower, [], max_bytes=1000)  # a line longer than that comes whole
    assert [len(line) for line in known] == [99, 999_999]
    with file.open("ab") as writer:
        writer.writelines(b"z" * 99 + b"\n" for _ in range(3))
    got = []
    pread = os.pread
    monkeypatch.setattr(run_module.os, "pread", lambda *arguments: got.append(pread(*arguments)) or got[-1])
    assert follower.poll() == (2, [b"z" * 99] * 3)
    assert sum(map(len, got)) == 1_000_000 + 300
    got.clear()
    follower.poll()
    assert got == []


@pytest.mark.parametrize("lines_before", [1, 2, 1000])
def test_a_cut_is_found_by_bisection(tmp_path, monkeypatch, lines_before):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(b"%09d\n" % i for i in range(lines_before)))
    follower = LineFollower(file)
    follower.poll()
    os.truncate(file, lines_before // 2 * 10)
    calls = []
    pread = os.pread
    monkeypatch.setattr(run_module.os, "pread", lambda *arguments: calls.append(arguments) or pread(*arguments))
    assert follower.poll() == (lines_before // 2, [])
    assert len(calls) <= 1 + lines_before.bit_length() + 1
