"""`megatron-rl doctor` on a CPU: what applies passes on real ranks and engines, and fails where one is broken.

The whole command, each check in interpreters of its own, is slow. For it stand the command with the checks of the
machine, and the checks of learner and engine in forked ranks; for parity and mismatch, tests/e2e/test_parity.py and
test_precision.py.
"""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    return doctor(tmp_path_factory.mktemp("doctor"))


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
def test_all_that_applies_passes(report):
    (node,) = report["nodes"]
    statuses = {check["name"]: check["status"] for check in node["checks"]}
    assert statuses == {c.name: "not run" if c.name in GPU_ONLY else "pass" for c in CHECKS}, report["said"]
    assert report["status"] == 0
    assert all(check["reason"] for check in node["checks"])
    assert "nothing failed" in report["page"]


@pytest.mark.slow
def test_figures_of_the_engines(report):
    figures = {check["name"]: check["figures"] for check in report["nodes"][0]["checks"]}
    pairs = figures["mismatch"]["log-probs"]
    rounding = [pairs[f"{dtype}/{dtype}"]["|mu - po|"] for dtype in ("bf16", "fp16", "fp32")]
    assert rounding == sorted(rounding, reverse=True)
    assert figures["refit"]["|mu - old|"] > 10 * figures["refit"]["|mu - new|"]
    assert set(figures["experts"]["grad_norm"]) == {"TP1·EP1·DP2", "TP2·EP2·DP1"}
    assert set(figures["context"]["grad_norm"]) == {"CP1·DP2", "CP2·DP1"}
    assert figures["collectives"]["GiB/s"]["ranks 0-1"]["all_reduce"] > 0


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("unmarked_experts", "expert weights are not marked"),
        ("lost_keys", "under CP2·DP1"),
        ("lost_moments", "loading a checkpoint changes the weights after the next update"),
    ],
)
def test_a_broken_learner_fails(program, told, tmp_path):
    setting = Setting("cpu", 2, str(tmp_path), scratch=str(tmp_path))
    outcome = run_ranks("tests.parallel.programs.doctor", program, 2, init_process_group=False, setting=setting)[0]
    assert (outcome.status, told in outcome.reason) == ("fail", True), outcome


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("stale_engine", "from the learner's new weights"),
        ("corrupted_update", "corrupts weights on updates"),
    ],
)
def test_a_broken_update_of_the_engine_fails(program, told, tmp_path):
    setting = Setting("cpu", 1, str(tmp_path), scratch=str(tmp_path))
    outcome = run_ranks("tests.parallel.programs.doctor", program, 1, init_process_group=False, setting=setting)[0]
    assert (outcome.status, told in outcome.reason) == ("fail", True), outcome


def test_an_engine_that_says_other_log_probs_fails(tmp_path):
    setting = Setting("cpu", 1, str(tmp_path), scratch=str(tmp_path))
    outcome = run_ranks(
        "tests.parallel.programs.doctor", "other_logprobs", 1, init_process_group=False, setting=setting
    )
    assert (outcome[0].status, "bf16/bf16: the engine's log-probs are" in outcome[0].reason) == ("fail", True), outcome


def test_the_runners_check_on_the_runner_that_a_cpu_has(tmp_path):
    setting = Setting("cpu", 1, str(tmp_path), scratch=str(tmp_path))
    outcome = run_ranks("tests.parallel.programs.doctor", "first_runner", 1, init_process_group=False, setting=setting)[
        0
    ]
    assert (outcome.status, outcome.reason.startswith("model runner 1 starts")) == ("pass", True), outcome
