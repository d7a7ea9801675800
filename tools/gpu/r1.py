"""R1, several ranks of NCCL on one GPU: exact mode has no mismatch, and gradients are those of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tools.gpu.r4 import check
from tools.gpu.run import Problem, Run

PLANTS = ("rounded", "dropped", "other_route")
LAYOUTS = {"tp2ep2": {"tensor": 2, "expert": 2}, "ep2": {"expert": 2}, "dp2": {}}
STEPS = 2
EPS = 1e-3  # Adam divides by the root of a second moment: with a smaller one, rounding of small gradients would show


def main(run: Run) -> None:
    run.part("collectives", partial(check, run, "collectives", 2))
    one: dict[str, Any] = {}
    run.part("gradients, one rank", lambda: alone(run, one))
    for layout in LAYOUTS:
        run.part(f"gradients, {layout}", partial(gradients, run, layout, one))
    others = () if run.rehearse else ("fp32", "fp16")
    for layout, dtype in [*((layout, "bf16") for layout in LAYOUTS), *(("tp2ep2", dtype) for dtype in others)]:
        run.part(f"exact, {layout}, {dtype}", partial(exact, run, layout, dtype))


def exact(run: Run, layout: str, dtype: str) -> dict[str, Any]:
    """Two steps of the recipe of exact mode: no sampled token has another probability in the update."""
    from tools.dev.exact_runs import Outcome, arguments, run_name

    values = arguments(run.folder, run.tiny_model(), layout, dtype, steps=STEPS, sequences=8)
    values += ["--set", f"runtime.device={run.device}"]
    job = ("tests.e2e.programs.exact_runs.train", {"runs": [values]})
    ended = run.ranks(2, {"train": job}, 180)
    found = [results["train"] for results in ended.whole()]
    if found != [[0], [0]]:
        raise Problem(f"the run left with status {found}:\n{ended.logs[0]}")
    gates = Outcome.of(run.folder / run_name(layout, dtype)).gates
    if gates != [0.0] * STEPS:
        raise Problem(f"exact/max_abs_prob_diff is {gates}, not 0 in {STEPS} steps")
    return {"exact/max_abs_prob_diff": gates}


def train(run: Run, size: int, parallel: dict[str, int], libraries: str) -> dict[str, Any]:
    """What the first rank returns, in fp32."""
    learner = {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel}
    sections = {"num_steps": STEPS, "runtime": {"device": run.device}, "learner": learner}
    job = ("tests.parallel.programs.learner.train_on_stored_rollouts", sections)
    return run.ranks(size, {"train": job}, 120, libraries=libraries).whole()[0]["train"]


def alone(run: Run, one: dict[str, Any], libraries: str = "") -> dict[str, Any]:
    one |= train(run, 1, {}, libraries)
    return {"grad_norm": [step["actor/grad_norm"] for step in one["metrics"]]}


def gradients(run: Run, layout: str, one: dict[str, Any], libraries: str = "") -> dict[str, Any]:
    """Log-probs, gradient norms and weights after two updates, within what the order of fp32's sums explains."""
    from tests.support.plain_training import float32_limits

    if not one:
        raise Problem("there is no run of one rank to compare with")
    limits, several = float32_limits(STEPS, eps=EPS), train(run, 2, LAYOUTS[layout], libraries)
    return compared(several, one, limits)


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
