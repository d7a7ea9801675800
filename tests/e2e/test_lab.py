"""A study that is run, reported and run again with real engines: what a seed gives once, it gives again bit for bit."""

import json
import os
from pathlib import Path

import pytest
import yaml

from megatron_rl.__main__ import main
from megatron_rl.instruments.lab.archive import first_difference
from megatron_rl.monitor.run_directory import read_metrics
from tests.support.tiny import REPOSITORY

STUDY = {
    "name": "short",
    "title": "A short study",
    "source": "nowhere",
    "claim": "rounded weights are mismatch",
    "setting": "two steps",
    "base": "base.yaml",
    "outcomes": {"rho": {"metric": "mismatch/rho_std", "statistic": "mean"}},
    "arms": {
        "exact": {},
        "int4": {
            "set": {"exact.noise": {"kind": "weights", "bits": "int4"}},
            "control": "exact",
            "differs_in": ["exact.noise"],
            "expect": {"rho": "higher"},
        },
    },
    "figure": [{"title": "all", "arms": ["exact", "int4"]}],
}
BASE = {
    "extends": str(REPOSITORY / "recipes" / "lab" / "base.yaml"),
    "num_steps": 2,
    "batch": {"prompts": 2, "minibatches": 2},
    "rollout": {"num_samples": 4},
    "validation": {"every": 0},
    "checkpoint": {"every": 0},
}


@pytest.mark.slow
def test_a_run_is_repeated_bit_for_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))  # the runs'
    Path("study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    Path("base.yaml").write_text(yaml.safe_dump(BASE))
    runs = Path("runs/lab/short")

    done = main(["lab", "run", "study.yaml", "--seeds", "1", "--jobs", "2", "--other-code"])
    assert done == 0, "".join(file.read_text() for file in runs.glob("*.log"))
    assert json.loads((runs / "registered.json").read_text())["study"]["arms"].keys() == STUDY["arms"].keys()
    metrics = {arm: runs / f"{arm}-seed1" / "metrics.jsonl" for arm in STUDY["arms"]}
    rho = {arm: json.loads(file.read_text().splitlines()[0])["mismatch/rho_std"] for arm, file in metrics.items()}
    assert rho["exact"] == 0.0 < rho["int4"]

    assert main(["lab", "report", "study.yaml"]) == 0
    assert "Fixed before the runs: study" in (runs / "report" / "report.md").read_text()

    again = ["lab", "run", "study.yaml", "--arms", "int4", "--seeds", "1", "--other-code", "--out", "again"]
    assert main(again) == 0
    second = Path("again/int4-seed1/metrics.jsonl")
    assert second.read_text() != metrics["int4"].read_text()  # times
    assert first_difference(read_metrics(metrics["int4"]), read_metrics(second)) is None

    # What a file says of another study is refused before an engine starts.
    Path("study.yaml").write_text(yaml.safe_dump(STUDY | {"seeds": [1, 2]}, sort_keys=False))
    assert main(["lab", "run", "study.yaml", "--seeds", "1"]) == 2
    assert "seeds changed since the first run" in capsys.readouterr().err
