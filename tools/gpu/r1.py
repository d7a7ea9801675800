"""R1, several ranks of NCCL on one GPU: exact mode has no mismatch, and gradients are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tools.gpu.r4 import check
from tools.gpu.run import Job, Problem, Run

PLANTS = ("rounded", "dropped", "other_route")
LAYOUTS = {"tp2ep2": {"tensor": 2, "expert": 2}, "ep2": {"expert": 2}, "dp2": {}}
STEPS = 2
EPS = 1e-3  # Adam divides by the root of a second moment: with a smaller one, rounding of small gradients would show


def main(run: Run) -> None:
    run.part("collectives", partial(check, run, "collectives", 2))
    compare_gradients(run)
    others = () if run.rehearse else ("fp32", "fp16")
    cases = [*((layout, "bf16") for layout in LAYOUTS), *(("tp2ep2", dtype) for dtype in others)]
    jobs, found = {f"exact, {layout}, {dtype}": exact_job(run, layout, dtype) for layout, dtype in cases}, {}
    for layout, dtype in cases:
        run.part(f"exact, {layout}, {dtype}", partial(exact, run, jobs, found, layout, dtype))


def exact_job(run: Run, layout: str, dtype: str) -> Job:
    from tools.dev.exact_runs import arguments

    values = arguments(run.folder, run.tiny_model(), layout, dtype, steps=STEPS, sequences=8)
    return "tests.e2e.programs.exact_runs.train", {"runs": [[*values, "--set", f"runtime.device={run.device}"]]}


def exact(run: Run, jobs: dict[str, Job], found: dict[str, Any], layout: str, dtype: str) -> dict[str, Any]:
    """Two steps of the recipe of exact mode: no sampled token has another probability in the update."""
    from tools.dev.exact_runs import Outcome, run_name

    status = run.of_job(found, 2, jobs, f"exact, {layout}, {dtype}")
    if status != [[0], [0]]:
        raise Problem(f"the run left with status {status}:\n{found['ended'].logs[0]}")
    gates = Outcome.of(run.folder / run_name(layout, dtype)).gates
    if gates != [0.0] * STEPS:
        raise Problem(f"exact/max_abs_prob_diff is {gates}, not 0 in {STEPS} steps")
    return {"exact/max_abs_prob_diff": gates}


def compare_gradients(run: Run, libraries: str = "", **more: Job) -> Callable[[str], Any]:
    """Parts that update on one rank, and on two in each layout. Returns what gives the first rank's result of a job, of
    these or of ``more``, which are made in the same start of two ranks."""
    jobs = {f"gradients, {layout}": updates(run, parallel) for layout, parallel in LAYOUTS.items()}
    one: dict[str, Any] = {}
    found: dict[str, Any] = {}

    def of_two(part: str) -> Any:
        return run.of_job(found, 2, jobs | more, part, libraries=libraries)[0]

    run.part("gradients, one rank", lambda: alone(run, one, libraries))
    for part in jobs:
        run.part(part, partial(gradients, of_two, part, one))
    return of_two


def updates(run: Run, parallel: dict[str, int]) -> Job:
    """Updates in fp32."""
    learner = {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel}
    sections = {"num_steps": STEPS, "runtime": {"device": run.device}, "learner": learner}
    return "tests.parallel.programs.learner.train_on_stored_rollouts", sections


def alone(run: Run, one: dict[str, Any], libraries: str) -> dict[str, Any]:
    one |= run.ranks(1, {"train": updates(run, {})}, 120, libraries=libraries).whole()[0]["train"]
    return {"grad_norm": [step["actor/grad_norm"] for step in one["metrics"]]}


def gradients(of_two: Callable[[str], Any], part: str, one: dict[str, Any]) -> dict[str, Any]:
    """Log-probs, gradient norms and weights after two updates, within what the order of fp32's sums explains."""
    from tests.support.plain_training import float32_limits

    if not one:
        raise Problem("there is no run of one rank to compare with")
    return compared(of_two(part), one, float32_limits(STEPS, eps=EPS))


def compared(several: dict[str, Any], one: dict[str, Any], limits: Any) -> dict[str, Any]:
    """Largest differences and their limits. Raises `Problem` where one is beyond it."""
    found = {
        f"log-probs {when}": (np.abs(np.concatenate(several[when]) - np.concatenate(one[when])).max(), limits.logprobs)
        for when in ("before", "after")
    }
    for step, (got, want) in enumerate(zip(several["metrics"], one["metrics"], strict=True)):
        norm = abs(got["actor/grad_norm"] - want["actor/grad_norm"])
        found[f"gradient norm of update {step}"] = norm, limits.of_metric("actor/grad_norm", step)
    pairs = ((several["weights"][name], weight) for name, weight in one["weights"].items())
    found["weights"] = max(float((a - b).abs().max()) for a, b in pairs), limits.weights
    figures = {name: {"difference": float(value), "limit": float(limit)} for name, (value, limit) in found.items()}
    if wrong := [name for name, (value, limit) in found.items() if not value <= limit]:
        raise Problem(f"{', '.join(wrong)} beyond the limit: {figures}")
    return figures
