"""What commands on a stored batch print."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from megatron_rl.instruments.batch.command import print_attribution
from megatron_rl.instruments.batch.rerun import Attribution, Part


def test_the_report_says_that_it_is_not_of_the_collapse(tmp_path, capsys):
    parts = (Part("routing", "the engine's routes replayed", 3.0), Part("remainder", "left over: int4", 1.0))
    attribution = Attribution(4.0, parts, {frozenset(): 4.0}, 10, "exact")
    options = SimpleNamespace(step=3, run=Path("runs/a"), json=tmp_path / "out.json")
    print_attribution(
        options,
        SimpleNamespace(batch=SimpleNamespace(sequences=[]), metrics={}),
        attribution,
    )
    text = capsys.readouterr().out
    assert "remainder" in text
    assert "left over: int4" in text
    assert "of the mismatch, not of the collapse" in text
    assert "megatron-rl run why runs/a" in text
    assert json.loads((tmp_path / "out.json").read_text())["what"]["remainder"] == "left over: int4"
