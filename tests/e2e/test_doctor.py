"""`megatron-rl doctor` on a CPU: what applies passes on real ranks and engines, and fails where one is broken.

The whole command, each check in interpreters of its own, is slow. For it stand the command with the checks of the
machine, and the checks of learner and engine in forked ranks; for parity and mismatch, tests/e2e/test_parity.py and
test_precision.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.doctor.checks import CHECKS, CPU_RANKS, Setting, find
from tests.parallel.gloo import run_ranks
from tests.support import planted
from tests.support.patience import PATIENCE_S
from tools.gpu.r4 import FAULTS

GPU_ONLY = {check.name for check in CHECKS if check.gpu_only} | {"driver"}
OF_THE_MACHINE = ["gpu-memory", "shared-folder", "nodes"]
IN_FORKED_RANKS = ["experts", "context", "checkpoint", "engine", "refit"]


def doctor(folder: Path, *arguments: str) -> dict:
    """The report of the command, with the page that it wrote, its status and what it printed."""
    command = [sys.executable, "-m", "megatron_rl", "doctor", "--shared", str(folder / "runs"), "--minutes", "60"]
    command += ["--json", str(folder / "report.json"), "--page", str(folder / "report.html"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    report = json.loads((folder / "report.json").read_text())
    return report | {"page": (folder / "report.html").read_text(), "status": done.returncode, "said": done.stdout}


def test_the_checks_of_the_machine_pass(tmp_path):
    report = doctor(tmp_path, "--only", ",".join(OF_THE_MACHINE))
    (node,) = report["nodes"]
    statuses = {check["name"]: check["status"] for check in node["checks"]}
    assert statuses == {name: "not run" if name in GPU_ONLY else "pass" for name in OF_THE_MACHINE}, report["said"]
    assert report["status"] == 0
    assert "nothing failed" in report["page"]


@pytest.mark.parametrize("name", IN_FORKED_RANKS)
def test_a_check_of_learner_or_engine_passes(name, tmp_path):
    setting = Setting("cpu", CPU_RANKS, str(tmp_path), scratch=str(tmp_path))
    ranks = CPU_RANKS if find(name).ranks == "node" else 1
    outcomes = run_ranks(
        "tests.parallel.programs.doctor", "healthy", ranks, init_process_group=False, name=name, setting=setting
    )
    assert [outcome.status for outcome in outcomes] == ["pass"] * ranks, outcomes
    if name == "refit":
        figures = outcomes[0].figures
        assert figures["|mu - old|"] > 10 * figures["|mu - new|"]


@pytest.mark.slow
def test_all_that_applies_passes(tmp_path):
    report = doctor(tmp_path)
    (node,) = report["nodes"]
    statuses = {check["name"]: check["status"] for check in node["checks"]}
    assert statuses == {c.name: "not run" if c.name in GPU_ONLY else "pass" for c in CHECKS}, report["said"]
    assert report["status"] == 0
    assert all(check["reason"] for check in node["checks"])
    assert "nothing failed" in report["page"]


@pytest.mark.parametrize("program", FAULTS)
def test_a_planted_fault_is_told(program, tmp_path):
    ranks, check = FAULTS[program]
    setting = Setting("cpu", ranks, str(tmp_path), scratch=str(tmp_path))
    outcome = run_ranks("tests.parallel.programs.doctor", program, ranks, init_process_group=False, setting=setting)[0]
    told = planted.rows()[check, program.replace("_", " ")]
    assert (outcome.status, told in outcome.reason) == ("fail", True), outcome
