"""What `lab power` and `lab plan` say before a study is run."""

from __future__ import annotations

import json
import math
import re

import pytest

from megatron_rl.__main__ import main
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab.foresight import (
    cost,
    foresee,
    render_foresight,
    seeds_needed,
    smallest_effect,
    smallest_slope,
)
from megatron_rl.instruments.lab.results import read_results
from tests.support.rounding import rounded
from tests.unit.instruments.lab.test_report import LAB, STUDY, runs

__all__ = ["runs"]  # a fixture


@pytest.fixture
def study(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.format(base=LAB / "base.yaml"))
    return load_study(file)


def test_before_any_run_the_file_says_the_spread(study, tmp_path):
    one, two, later, slope = foresee(study, tmp_path / "runs")
    level = 0.05 / 4  # three primaries and a trend
    assert (one.spread, one.known_from) == (0.02, "the study file")
    assert one.smallest == rounded(smallest_effect(3, level) * 0.02)
    assert one.seeds_for_margin == seeds_needed(0.05 / 0.02, level)
    assert (two.smallest, two.margin) == (one.smallest, one.margin)
    assert (later.spread, later.known_from, later.smallest) == (None, "nothing", None)
    assert slope.smallest == rounded(smallest_slope([0.0, 1.0], 3, level))
    table = list(render_foresight(study.study, [one, two, later, slope]))
    assert table[0] == "made-up: 3 seeds, 4 primaries and trends, level 0.05 (0.013 for the smallest p-value, Holm)"
    rows = table[1].splitlines()
    assert [line.split()[0] for line in rows[2:5]] == ["one", "two", "later"]
    assert "nothing" in rows[4]


def test_with_runs_their_own_spread_counts(runs):
    study, root = runs
    rows = {row.name: row for row in foresee(study, root)}
    # The differences of `one` have no spread of their own beyond rounding; the trend has residuals.
    trend = study.study.trends["reward on rho"]
    assert rows["reward on rho"].known_from == f"{len(read_results(study, root).trend_runs(trend))} runs"
    assert 0 < rows["reward on rho"].smallest < math.inf


def test_power_reckons_with_runs_that_are_packed(capsys):
    packed = LAB.parents[1] / "docs" / "lab" / "runs" / "servers.jsonl.xz"
    assert main(["lab", "power", str(LAB / "servers"), "--out", str(packed)]) == 0
    rows = capsys.readouterr().out.splitlines()[3:6]
    assert [row.split()[0] for row in rows] == ["finish", "abort-and-resume", "keep"]
    assert all(" 5 seeds " in row for row in rows)


def test_a_gate_has_the_full_level(study):
    file = study.path
    rest = file.read_text().replace("  - {arm: one, outcome: reward}\n", "")
    file.write_text(rest + "gate: {arm: one, outcome: reward}\n")
    gate, *_ = foresee(load_study(file), file.parent / "runs")
    assert gate.smallest == rounded(smallest_effect(3, 0.05) * 0.02)


def test_the_cost_of_a_twin_is_that_of_the_plan(capsys):
    file = LAB / "routing" / "scale.yaml"
    costs = {row.arm: row for row in cost(load_study(file), "h100-80", None, None, None)}
    recipe = "recipes/quantized/grpo-qwen3-30b-a3b-4n8g-tp4ep8-bf16.yaml"
    assert main(["plan", recipe, "--gpu", "h100-80", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step_s"]
    assert (costs["bf16"].gpus, costs["bf16"].num_steps, costs["bf16"].num_seeds) == (32, 400, 3)
    assert costs["bf16"].gpu_hours == rounded(400 * step / 3600 * 32 * 3)
    assert costs["fp8"].step_seconds != costs["bf16"].step_seconds
    assert main(["lab", "plan", str(file), "--gpu", "h100-80"]) == 0
    total = sum(row.gpu_hours for row in costs.values())
    assert f"12 runs, {total:,.0f} GPU-hours of h100-80" in capsys.readouterr().out


@pytest.mark.slow
def test_the_costs_in_the_docs_are_those_of_the_plan():
    text = (LAB.parents[1] / "docs" / "lab" / "cluster.md").read_text()
    rows = re.findall(r"\| `recipes/lab/(\w+)/scale\.yaml` \| [^|]+ \| (\d+) \| ([\d,]+) \|", text)
    assert {name for name, *_ in rows} == {path.parent.name for path in LAB.glob("*/scale.yaml")}
    for name, *said in rows:
        costs = cost(load_study(LAB / name / "scale.yaml"), "h100-80", None, None, None)
        totals = [f"{sum(row.num_seeds for row in costs)}", f"{sum(row.gpu_hours for row in costs):,.0f}"]
        assert totals == said, name


def test_options_of_sbatch_want_slurm(capsys):
    assert main(["lab", "run", str(LAB / "floor"), "--sbatch=--nodes=4"]) == 2
    assert "give --slurm with it" in capsys.readouterr().err
