"""The command `plot`: a picture and a page of finished runs, any label, and records that are none."""

from __future__ import annotations

import pytest

from megatron_rl.__main__ import main
from tests.support.finished_run import write_run


def test_plot_draws_runs_over_each_other(tmp_path, capsys):
    runs = [write_run(tmp_path / f"{name}-seed{s}", s, name == "bad") for name in ("bad", "good") for s in (0, 1)]
    out = tmp_path / "out"
    assert main(["plot", *map(str, runs), "--out", str(out), "--title", "a <title>"]) == 0
    assert "bad: 2 run(s), 300 steps" in capsys.readouterr().out
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_pattern_over_a_studys_folder_names_notes_beside_its_runs(tmp_path, capsys):
    run = write_run(tmp_path / "arm-seed0", 0, collapses=False)
    note = tmp_path / "arm-seed0.exit.json"
    note.write_text('{"status": 0}')
    assert main(["plot", str(run), str(note), "--out", str(tmp_path / "out")]) == 0
    assert "arm: 1 run(s)" in capsys.readouterr().out


LABELS = ["$x_{$", "$", r"\frac{", "_hidden", "a$b$c", "<b>&", "x" * 300]


def test_any_label_can_be_drawn(tmp_path, capsys):
    run = write_run(tmp_path / "run", 0, collapses=False)
    out = tmp_path / "out"
    assert main(["plot", *(f"{label}={run}" for label in LABELS), "--out", str(out), "--title", LABELS[0]]) == 0
    assert (out / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[1, 2]", "a list, not an object"),
        (b"7", "a int, not an object"),
        (b'{"x": 1.0}', "no step"),
        (b'{"step": "one"}', "'step' is not a number"),
        (b'{"step": 1, "x": [1]}', "'x' is not a number"),
        (b'{"step": 1, "x": null}', "'x' is not a number"),
        (b'\xff\xfe{"step": 1}', "can't decode byte"),
        (b"[" * 100_000, "recursion"),
        (b'{"step": 1, "x": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_a_record_that_is_none_is_named_with_its_line(line, said, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "metrics.jsonl, line 2: not valid JSON of a step (" in error
    assert said in error
