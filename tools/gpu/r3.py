"""R3, TransformerEngine on two ranks: updates of each layout are those of one rank, and a save resumes bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tools.gpu.r1 import EPS, LAYOUTS, compare_gradients
from tools.gpu.r4 import check
from tools.gpu.run import Job, Problem, Run

PLANTS = ("unmarked", "lost_moments")


SAVED = "saved and resumed"


def main(run: Run) -> None:
    (run.folder / "saves").mkdir()
    save = job(run, "save_after", folder=str(run.folder / "saves"), num_steps=1)
    of_two = compare_gradients(run, "te", **{SAVED: save})
    run.part(SAVED, partial(resumed, run, of_two))
    # Fused attention in bf16; in a rehearsal Megatron's own layers.
    run.part("context", partial(check, run, "context", 2))


def job(run: Run, program: str, **values: Any) -> Job:
    learner = {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": LAYOUTS["tp2ep2"], "dtype": "bf16"}
    values |= {"runtime": {"device": run.device}, "learner": learner}
    return f"tests.parallel.programs.learner.{program}", values


def resumed(run: Run, of_two: Callable[[str], Any]) -> dict[str, Any]:
    """Two updates after a save, and after a load in processes of their own: the same bits."""
    import torch

    saved = of_two(SAVED)
    load = {"load": job(run, "load_and_continue", path=saved["path"])}
    loaded = run.ranks(2, load, 120, libraries="te").whole()[0]["load"]
    other = [name for name, tensor in saved["weights"].items() if not torch.equal(tensor, loaded["weights"][name])]
    if other or (saved["logprobs"] != loaded["logprobs"]).any():
        raise Problem(
            f"after a load {len(other)} of {len(saved['weights'])} tensors have other bits, first {other[:1]}"
        )
    return {"tensors": len(saved["weights"])}
