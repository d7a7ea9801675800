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
from tests.support.patience import PATIENCE_S

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


@pytest.mark.parametrize(
    ("program", "ranks", "status", "told"),
    [
        ("unmarked_experts", 2, "fail", "expert weights are not marked"),
        ("lost_keys", 2, "fail", "under CP2·DP1"),
        ("lost_moments", 2, "fail", "loading a checkpoint changes the weights after the next update"),
        ("stale_engine", 1, "fail", "from the learner's new weights"),
        ("corrupted_update", 1, "fail", "corrupts weights on updates"),
        ("other_logprobs", 1, "fail", "bf16/bf16: the engine's log-probs are"),
        ("first_runner", 1, "pass", "model runner 1 starts"),
    ],
)
def test_what_is_broken_fails_and_the_other_runner_passes(program, ranks, status, told, tmp_path):
    setting = Setting("cpu", ranks, str(tmp_path), scratch=str(tmp_path))
    outcome = run_ranks("tests.parallel.programs.doctor", program, ranks, init_process_group=False, setting=setting)[0]
    assert (outcome.status, told in outcome.reason) == (status, True), outcome
