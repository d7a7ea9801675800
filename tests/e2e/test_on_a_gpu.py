"""On a GPU: the kernels of exact mode, whole runs of both engines, and the doctor's checks of one rank."""

import json
import subprocess
import sys

import pytest
import torch

from tests.support.kernels import assert_sound
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CHECKS = "driver,fp32,attention,experts,checkpoint,engine,mismatch,parity,refit,memory"
SAMPLED = ("critic/rewards/mean", "response_length/mean", "actor/entropy", "hacking/J")


def output(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def metrics(tmp_path, recipe: str, **values: object) -> list[dict[str, float]]:
    """Of two steps of a tiny recipe."""
    keys = {"runtime.device": "cuda", "num_steps": 2, "run_root": tmp_path, "rollout.kv_cache_gib": 1} | values
    output("megatron_rl", "train", recipe, *(word for key in keys for word in ("--set", f"{key}={keys[key]}")))
    (file,) = tmp_path.glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    return [step for step in steps if "critic/rewards/mean" in step]


def test_a_row_has_the_same_bits_in_every_batch_and_the_right_values():
    kernels = json.loads(output("tests.support.kernels", "40", "3", "cuda").splitlines()[-1])
    for name, by_type in kernels.items():
        assert_sound(by_type, name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_exact_mode_has_no_mismatch_and_a_graph_samples_what_kernels_sample(dtype, tmp_path):
    types = {"rollout.dtype": dtype, "learner.dtype": dtype}
    runs = [
        metrics(tmp_path / name, "recipes/tiny/exact.yaml", **types, **{"rollout.enforce_eager": name})
        for name in ("false", "true")
    ]
    for step in (*runs[0], *runs[1]):
        assert (step["exact/max_abs_prob_diff"], step["mismatch/rho_std"]) == (0.0, 0.0)
    assert [[step[key] for key in SAMPLED] for step in runs[0]] == [[step[key] for key in SAMPLED] for step in runs[1]]


def test_a_run_with_vllm(tmp_path):
    types = {"rollout.dtype": "bf16", "learner.dtype": "bf16", "rollout.gpu_memory_utilization": 0.3}
    steps = metrics(tmp_path, "recipes/tiny/grpo.yaml", **types)
    # Rounding of bf16 (2^-9) in both engines, of logits below 16 in size.
    assert all(0 < step["mismatch/rho_std"] < 16 * 2 * 2.0**-9 for step in steps)


def test_no_check_of_the_doctor_fails(tmp_path):
    output("megatron_rl", "doctor", "--only", CHECKS, "--minutes", "14", "--json", str(tmp_path / "doctor.json"))
    (node,) = json.loads((tmp_path / "doctor.json").read_text())["nodes"]
    assert {check["name"]: check["status"] for check in node["checks"]} == dict.fromkeys(CHECKS.split(","), "pass")
