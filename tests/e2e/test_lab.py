"""A study that is run, reported and verified with real engines: what a seed gives once, it gives again bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

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


def lab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_rl", "lab", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)


def test_a_run_is_verified_bit_for_bit(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    study, runs = str(tmp_path / "study.yaml"), tmp_path / "runs" / "lab" / "short"

    done = lab("run", study, "--seeds", "1", "--jobs", "2", "--other-code", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((runs / "registered.json").read_text())["study"]["arms"].keys() == STUDY["arms"].keys()
    metrics = {arm: runs / f"{arm}-seed1" / "metrics.jsonl" for arm in STUDY["arms"]}
    rho = {arm: json.loads(file.read_text().splitlines()[0])["mismatch/rho_std"] for arm, file in metrics.items()}
    assert rho["exact"] == 0.0 < rho["int4"]

    report = lab("report", study, cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "Fixed before the runs: study" in (runs / "report" / "report.md").read_text()

    again = lab("verify", study, "--arm", "int4", "--seed", "1", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, ""), again.stdout + again.stderr
    assert "int4-seed1: every metric of every step is the same, bit for bit" in again.stdout
    assert (runs / "verify" / "1" / "int4-seed1" / "metrics.jsonl").read_text() != metrics["int4"].read_text()  # times

    # What a file says of another study is refused before an engine starts.
    changed = STUDY | {"seeds": [1, 2]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    refused = lab("run", study, "--seeds", "1", cwd=tmp_path)
    assert refused.returncode == 2
    assert "seeds changed since the first run" in refused.stderr
