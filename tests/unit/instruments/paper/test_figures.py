"""`plot --paper`: a file for each figure, seeds as a band, and a sentence for what a run did not record."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import EXIT_BAD_INPUT
from megatron_rl.instruments.paper import figures as paper_figures
from megatron_rl.instruments.paper.figures import PAPERS, draw_paper
from megatron_rl.monitor.plots import Curves, group_runs
from megatron_rl.objective import compute_objective
from tests.support.rounding import rounded
from tests.unit.objective.batches import padded, random_batch

DETAIL = ObjectiveConfig.model_validate({"mismatch_detail": True})


def record(step: int, seed: int, config: ObjectiveConfig) -> dict[str, float]:
    """A line of metrics.jsonl: the objective's own metrics of a random batch, and made-up ones of the other parts."""
    inputs, _ = padded(random_batch(10 * step + seed, num_sequences=30))
    rest = ("critic/rewards/mean", "val/aime/avg@32", "response_length/mean", "actor/entropy", "actor/lr")
    rest += ("actor/grad_norm", "noise/grad_norm_ema", "router/agree_frac")
    return {"step": step, **compute_objective(inputs, config).metrics, **dict.fromkeys(rest, 0.1 * (step + seed + 1))}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one arm with the details, one run without them."""
    root = tmp_path_factory.mktemp("runs")
    for name, seed, config in (("gspo-seed0", 0, DETAIL), ("gspo-seed1", 1, DETAIL), ("plain", 2, ObjectiveConfig())):
        (root / name).mkdir()
        lines = [json.dumps(record(step, seed, config)) for step in range(4)]
        (root / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_of_a_paper_is_drawn(runs, paper, tmp_path, capsys, monkeypatch):
    """All are put together; rendering, which takes a second each, is another test's."""
    monkeypatch.setattr(paper_figures.Figure, "savefig", lambda figure, path, **_: path.touch())
    arguments = ["plot", "--paper", paper, str(runs / "gspo-seed0"), str(runs / "gspo-seed1"), str(runs / "plain")]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {f"{paper}-{figure.name}.png" for figure in PAPERS[paper]}, "and no tokens, without stored batches"
    told = capsys.readouterr().out
    assert "gspo has no" not in told
    assert ("plain has no mismatch/" in told) == (paper != "router-replay")


def test_a_figure_without_any_metric_is_not_drawn(runs, tmp_path, capsys):
    arguments = ["plot", "--paper", "fp16", str(runs / "plain"), "--out", str(tmp_path)]
    assert main([*arguments, "--figure", "fig02", "--figure", "fig06"]) == 0
    (png,) = tmp_path.iterdir()
    assert png.name == "fp16-fig06.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("objective.mismatch_detail: true records it") == 2
    assert main([*arguments, "--figure", "fig02"]) == EXIT_BAD_INPUT
    assert main([*arguments, "--figure", "fig99"]) == EXIT_BAD_INPUT
    assert "fp16 has fig01, fig02" in capsys.readouterr().err


def test_seeds_are_a_mean_and_a_band_and_bins_are_in_order(runs, monkeypatch):
    kept = []
    monkeypatch.setattr(paper_figures.Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    groups = group_runs([str(runs / "gspo-seed0"), str(runs / "gspo-seed1")])
    draw_paper("hacking", groups, runs, ["fig04", "fig07", "fig06"])
    dynamics, surrogate, by_probability = kept
    reward = dynamics.axes[0]
    assert reward.lines[0].get_ydata() == rounded(0.1 * (np.arange(4) + 1.5))
    (band,) = reward.collections
    assert band.get_paths()[0].get_extents().y0 == rounded(0.1)
    assert surrogate.axes[0].get_legend_handles_labels()[1][0].startswith("gspo: PCC ")
    labels = [label.get_text() for label in by_probability.axes[0].get_xticklabels()]
    assert labels == ["0-0.01", "0.01-0.1", "0.1-0.5", "0.5-0.9", "0.9-1"]


def test_no_figure_can_be_drawn_of_an_empty_run(tmp_path):
    assert draw_paper("hacking", [Curves("empty", [[{"step": 0}]])], tmp_path)[0] == []
