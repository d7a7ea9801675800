"""What the terminal shows of runs, wide and narrow, with records and without."""

from __future__ import annotations

import io
import math
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_rl.__main__ import main
from megatron_rl.errors import printable
from megatron_rl.instruments.watch import terminal
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.instruments.watch.terminal import frame, thinned, watch
from tests.support.written_run import WrittenRun


def shown(runs: list[WatchedRun], width: int) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the console
    console.print(frame(runs, width))
    return console.export_text()


@pytest.mark.parametrize("width", [60, 78, 120, 200])
def test_two_runs_side_by_side(tmp_path, width):
    for name in ("left", "right"):
        written = WrittenRun(tmp_path / name)
        for step in range(90):
            written.step(step, alarm=name == "right" and step in (3, 40))
    text = shown([WatchedRun(name, tmp_path / name) for name in ("left", "right")], width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    assert {"left", "right", "mismatch:", "gradient"} <= set(words)
    assert "right, step 40: mismatch mismatch/rho_std = 1.02" in " ".join(words)
    assert " ".join(words).count("what may have caused it: megatron-rl run why") == 1  # of the run with an alarm
    assert "…" not in text, "a number is cut"


def test_nothing_recorded_says_what_records_it(tmp_path):
    text = " ".join(shown([WatchedRun("empty", tmp_path)], 200).split())
    assert "no step is recorded yet" in text


def test_the_command_prints_once_where_nobody_looks(tmp_path, capsys):
    WrittenRun(tmp_path / "run").step(0)
    assert main(["watch", f"arm={tmp_path / 'run'}"]) == 0
    assert "arm" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "typo")]) == 2


def test_a_terminal_is_drawn_anew_until_it_is_interrupted(tmp_path, monkeypatch):
    written = WrittenRun(tmp_path / "run")
    written.step(0)
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        written.step(len(sleeps), reward=0.123456)
        if len(sleeps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "time", SimpleNamespace(sleep=sleep))  # of this module alone: other threads sleep too
    console = Console(width=120, height=60, force_terminal=True, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the console
    run = WatchedRun("run", tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        watch([run], False, console)
    assert sleeps == [2.0] * 3
    assert run.last_step == 2


@given(st.text(alphabet=st.characters(), max_size=30))
def test_no_text_of_a_file_controls_the_terminal(text):
    """Whichever part of a frame shows it: one place escapes them all."""
    table = Table(title=text, box=None)
    table.add_row(text, Text(text, style="bold red"))
    for content in (Text(text), table, Panel(Text(text), title=Text(text))):
        out = io.StringIO()
        Console(file=out, force_terminal=True, color_system=None, width=60, markup=False).print(
            terminal.Printable(content)
        )
        assert printable(out.getvalue()) == out.getvalue()


def test_points_are_means_of_neighbours():
    assert thinned([1.0, 2.0, 3.0], 5) == [1.0, 2.0, 3.0]
    shown_points = thinned([1.0, 3.0, math.nan, 5.0, math.nan, math.inf], 3)
    assert shown_points[:2] == [2.0, 5.0]
    assert math.isnan(shown_points[2])
