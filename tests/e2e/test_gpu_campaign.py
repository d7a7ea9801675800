"""The campaign on one GPU, rehearsed: gloo for NCCL, engines on a CPU. Green as it is, red with each fault."""

import json
from pathlib import Path

import pytest

from tests.support import te
from tests.support.slow import slow_but
from tests.support.zygote import run_command
from tools.gpu.__main__ import NAMES, script_of

GREEN, RED = 0, 1
CASES = [  # script, fault, a pattern of the parts that are run, the part that it turns red
    ("r1", "", "", ""),
    ("r1", "", "exact, tp2ep2", ""),
    ("r1", "other_route", "exact, tp2ep2", "exact, tp2ep2, bf16"),
    ("r1", "rounded", "one rank|gradients, tp2ep2", "gradients, tp2ep2"),
    ("r1", "dropped", "one rank|gradients, dp2", "gradients, dp2"),
    ("r2", "", "", ""),
    ("r2", "patience", "hung", "a rank is hung"),
    ("r2", "dropped_broadcast", "weights$", "weights"),
    ("r2", "rounded_weights", "weights$", "weights"),
    ("r3", "", "", ""),
    ("r3", "unmarked", "one rank|gradients, tp2ep2", "gradients, tp2ep2"),
    ("r3", "lost_moments", "saved", "saved and resumed"),
    ("r4", "", "", ""),
    ("r4", "deaf", "planted", "planted lost_moments"),
    ("r4", "lost_moments", "checkpoint", "checkpoint, 2 ranks"),
    ("r5", "", "", ""),
    ("r5", "shifted_routes", "routes", "routes, fp32"),
    ("r5", "stale_engine", "new weights", "new weights, fp32"),
    ("r6", "", "", ""),
    ("r6", "slow", "update", "update"),
    ("r6", "wrong_plan", "update|plan", "plan"),
    ("r8", "", "", ""),
    ("r8", "rounded_engine", "pre-training|16|curves", "curves"),
    ("r9", "", "", ""),
    ("r9", "old_weights", "updates", "updates in flight, keep"),
]
QUICK = [("r1", "", "exact, tp2ep2", ""), ("r1", "other_route", "exact, tp2ep2", "exact, tp2ep2, bf16")]


def test_each_fault_of_each_script_has_a_case():
    wanted = {(name, fault) for name in NAMES for fault in ("", *script_of(name).PLANTS)}
    assert {case[:2] for case in CASES} == wanted


@pytest.mark.parametrize(("name", "fault", "only", "red"), slow_but(QUICK, CASES))
def test_a_script_is_green_and_its_fault_red(name, fault, only, red, tmp_path: Path):
    if name == "r3" and te.MISSING:
        pytest.skip(te.MISSING)
    # What a rehearsal lasts on a busy machine says nothing of the time on a GPU.
    options = ["--rehearse", "--out", str(tmp_path / "out.json"), "--only", only, "--seconds", "880"]
    done = run_command("tools.gpu", [name, *options, *(["--plant", fault] if fault else [])], tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    states = {name: part["state"] for name, part in found["parts"].items()}
    assert done.returncode == (RED if fault else GREEN), done.stdout[-3000:] + done.stderr[-2000:]
    assert states, "no part was run"
    assert set(states.values()) <= {"green", "red"}
    assert ([part for part, state in states.items() if state == "red"] == []) == (not fault)
    assert not fault or states[red] == "red"
    assert found["verdict"] == done.stdout.splitlines()[-1]
    assert "rehearsal on a CPU, no GPU ran" in found["verdict"]
