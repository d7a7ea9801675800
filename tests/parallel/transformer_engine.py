"""What the tests of TransformerEngine's layers share: jobs of rank programs, starts, comparisons of results."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint import conversion
from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import largest_difference
from tests.parallel.programs.lora import LORA, OPTIMIZER
from tests.support.plain_training import adapters, float32_limits
from tests.support.tiny import MODEL
from tests.support.zygote import Zygote

EPS = 1e-3  # as in test_learner_layouts.py: updates are as exact as gradients
STEPS = 3
WEIGHTS = MODEL / "model.safetensors"
Job = tuple[str, dict]


def learner(parallel: dict | None = None, **overrides) -> dict:
    return {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel or {}, **overrides}


def replayed(routes: list, **section) -> Job:
    return "replay.gradients", {"mode": "r3", "routes": routes, **section}


def lora(model: str, **section) -> Job:
    return "lora.train", {"model": model, "num_steps": 2, **section}


def save_after(folder: Path, section: dict) -> Job:
    return "learner.save_after", {"folder": str(folder), "num_steps": 1, "learner": section}


def load(path: str, section: dict) -> Job:
    return "learner.load_and_continue", {"path": path, "learner": section}


def convert(weights: Path, folder: Path, parallel: dict | None = None) -> Job:
    """A learner takes the weights in Megatron's format below ``weights`` and saves them under its own layout."""
    section = {"dtype": "fp32", "parallel": parallel or {}}
    model, source = str(MODEL), str(weights / "megatron")
    return "convert.load_and_save", {"model": model, "weights": source, "folder": str(folder), "learner": section}


def over_te(helper: Zygote, jobs: dict[int, dict[str, Job]]) -> Jobs:
    """Over TransformerEngine's layers; ``helper`` has their imports."""
    return Jobs(jobs, runner="tests.parallel.programs.transformer_engine", helper=helper)


def over_local(jobs: dict[str, Job]) -> Jobs:
    """Over Megatron's own layers on one rank."""
    return Jobs({1: jobs}, module="tests.parallel.programs")


def other_weights(folder: Path) -> Path:
    """The tiny model with other weights below ``folder``: hf/, and converted to Megatron's format in megatron/."""
    shutil.copytree(MODEL, folder / "hf")
    draw = torch.Generator().manual_seed(0)
    moved = {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in load_file(WEIGHTS).items()}
    save_file(moved, folder / "hf" / WEIGHTS.name, metadata={"format": "pt"})
    conversion.to_megatron(folder / "hf", folder / "megatron")
    return folder


def same_continuation(got: dict, want: dict) -> None:
    assert got["num_updates"] == want["num_updates"] == 3
    limits = float32_limits(STEPS, eps=EPS)  # one before the checkpoint, two after it
    assert np.abs(got["logprobs"] - want["logprobs"]).max() <= limits.logprobs
    assert largest_difference(got["weights"], want["weights"]) <= limits.weights
    for step, (ours, theirs) in enumerate(zip(got["metrics"], want["metrics"], strict=True), 1):
        assert abs(ours["actor/grad_norm"] - theirs["actor/grad_norm"]) <= limits.gradients[step]


def same_weights(checkpoint: str, wanted: Path, folder: Path) -> None:
    """A checkpoint of a run, converted to Hugging Face's format in ``folder``, holds the weights in ``wanted``."""
    conversion.to_hf(Path(checkpoint), folder, MODEL)
    expected = load_file(wanted / "hf" / WEIGHTS.name)
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


def worst(result: dict, reference: dict) -> float:
    pairs = [(result["gradients"][name], gradient) for name, gradient in reference["gradients"].items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 0)


def same_adapters(got: dict, want: dict, model: str) -> None:
    mutate = adapters(LORA["rank"], LORA["alpha"] / LORA["rank"])
    limits = float32_limits(2, **OPTIMIZER, path=model, mutate=mutate)
    for step, (ours, theirs) in enumerate(zip(got["metrics"], want["metrics"], strict=True)):
        assert abs(ours["actor/grad_norm"] - theirs["actor/grad_norm"]) <= limits.gradients[step]
    assert np.abs(got["after"] - want["after"]).max() <= limits.logprobs
