"""What a run prints: a line for a step, and how it writes times and curves."""

import math
from io import StringIO

from rich.console import Console

from megatron_rl.instruments.watch.terminal import sparkline
from megatron_rl.monitor.terminal import TerminalSink, format_duration


def test_terminal_lines(tmp_path):
    screen = StringIO()
    sink = TerminalSink(tmp_path / "log.txt", False, 10, Console(file=screen, width=250, soft_wrap=True))
    sink.write(0, {"critic/rewards/mean": 0.5, "actor/lr": 7e-5, "perf/time/step": 2.0, "perf/time/generate": 1.25})
    line = screen.getvalue().splitlines()[1]
    assert line.split() == ["0", "0.500", "7.00e-05", "2.00", "0:18", "generate", "1.25"]
    assert line.strip() in (tmp_path / "log.txt").read_text()


def test_formats():
    assert [format_duration(s) for s in (0, 61, 3600, 36061)] == ["0:00", "1:01", "1:00:00", "10:01:01"]
    assert sparkline([0.0, 0.5, math.nan, 1.0]) == "▁▅ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
