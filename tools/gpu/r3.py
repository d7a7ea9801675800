"""R3, TransformerEngine on two ranks: updates of each layout are those of one rank, and a save resumes bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

from tools.gpu.r1 import EPS, LAYOUTS, compare_gradients
from tools.gpu.r4 import check
from tools.gpu.run import Problem, Run

PLANTS = ("unmarked", "lost_moments")


def main(run: Run) -> None:
    compare_gradients(run, "te")
    run.part("saved and resumed", partial(resumed, run))
    # Fused attention in bf16; in a rehearsal Megatron's own layers.
    run.part("context", partial(check, run, "context", 2))


def resumed(run: Run) -> dict[str, Any]:
    """Two updates after a save, and after a load in processes of their own: the same bits."""
    import torch

    learner = {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": LAYOUTS["tp2ep2"], "dtype": "bf16"}
    (run.folder / "saves").mkdir()

    def first_rank(program: str, **values: Any) -> dict[str, Any]:
        values |= {"runtime": {"device": run.device}, "learner": learner}
        job = (f"tests.parallel.programs.learner.{program}", values)
        return run.ranks(2, {"job": job}, 120, libraries="te").whole()[0]["job"]

    saved = first_rank("save_after", folder=str(run.folder / "saves"), num_steps=1)
    loaded = first_rank("load_and_continue", path=saved["path"])
    other = [name for name, tensor in saved["weights"].items() if not torch.equal(tensor, loaded["weights"][name])]
    if other or (saved["logprobs"] != loaded["logprobs"]).any():
        raise Problem(
            f"after a load {len(other)} of {len(saved['weights'])} tensors have other bits, first {other[:1]}"
        )
    return {"tensors": len(saved["weights"])}
