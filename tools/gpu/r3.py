"""R3, TransformerEngine on two ranks: updates of each layout are those of one rank, and a save resumes bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

from tools.gpu.r1 import EPS, LAYOUTS, STEPS, compared
from tools.gpu.run import Problem, Run

PLANTS = ("unmarked", "lost_moments")
MODULE = "tests.parallel.programs.learner"
CONTEXT = {"context": 2}


def main(run: Run) -> None:
    one: dict[str, Any] = {}
    run.part("updates, one rank, for tp2ep2 and others", lambda: one.update(updates(run, 1, {})))
    for layout in LAYOUTS:
        run.part(f"updates, {layout}", partial(several, run, layout, one))
    run.part("saved and resumed, tp2ep2", partial(resumed, run))
    run.part("context", partial(context, run))


def section(parallel: dict[str, int], **learner: Any) -> dict[str, Any]:
    return {"learner": {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel, **learner}}


def updates(run: Run, size: int, parallel: dict[str, int]) -> dict[str, Any]:
    values = {"num_steps": STEPS, "runtime": {"device": run.device}, **section(parallel)}
    job = (f"{MODULE}.train_on_stored_rollouts", values)
    return run.ranks(size, {"job": job}, 120, libraries="te").whole()[0]["job"]


def several(run: Run, layout: str, one: dict[str, Any]) -> dict[str, Any]:
    """Over TransformerEngine's layers, in fp32, within what the order of sums explains."""
    from tests.support.plain_training import float32_limits

    if not one:
        raise Problem("there is no run of one rank to compare with")
    return compared(updates(run, 2, LAYOUTS[layout]), one, float32_limits(STEPS, eps=EPS))


def resumed(run: Run) -> dict[str, Any]:
    """Two updates after a save, and after a load in processes of their own: the same bits."""
    import torch

    values = {"runtime": {"device": run.device}, **section(LAYOUTS["tp2ep2"], dtype="bf16")}
    save = {"folder": str(run.folder / "saves"), "num_steps": 1, **values}
    (run.folder / "saves").mkdir()
    saved = run.ranks(2, {"job": (f"{MODULE}.save_after", save)}, 120, libraries="te").whole()[0]["job"]
    load = {"path": saved["path"], **values}
    loaded = run.ranks(2, {"job": (f"{MODULE}.load_and_continue", load)}, 120, libraries="te").whole()[0]["job"]
    other = [name for name, tensor in saved["weights"].items() if not torch.equal(tensor, loaded["weights"][name])]
    if other or (saved["logprobs"] != loaded["logprobs"]).any():
        raise Problem(
            f"after a load {len(other)} of {len(saved['weights'])} tensors have other bits, first {other[:1]}"
        )
    return {"tensors": len(saved["weights"])}


def context(run: Run) -> dict[str, Any]:
    """The doctor's check of context parallelism: fused attention over sequences that two ranks share, in bf16.

    A rehearsal has no fused attention: ranks share sequences by Megatron's own layers.
    """
    from tools.gpu.r4 import check

    return check(run, "context", 2)
