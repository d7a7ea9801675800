"""A small model through exact mode's Triton kernels, in Triton's interpreter: python -m tests.support.exact_on_kernels.

Prints JSON. A process of its own, as tests.support.kernels. One layer of the tiny model, because a program instance
takes 30 ms.
"""

import functools
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.support.te import run_interpreted

DTYPES = ("fp32", "bf16", "fp16")
LAYERS = 1
KERNELS = (
    "product",
    "rms_norm",
    "rotate",
    "route",
    "experts",
    "trained_experts",
    "combine",
    "add_rows",
    "token_statistics",
    "packed_attention",
    "paged_attention",
)


@functools.cache
def run(dtype: str) -> dict[str, Any]:
    """What the program prints, from a process of its own."""
    return json.loads(run_interpreted("tests.support.exact_on_kernels", dtype).splitlines()[-1])


def small_model(folder: Path) -> str:
    """The tiny model's first layer, with its embedding, head and tokenizer."""
    from safetensors.torch import load_file, save_file

    from tests.support.tiny import MODEL

    for file in MODEL.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_text(file.read_text())
    config = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(MODEL / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if "layers." not in name or "layers.0." in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def main(dtype: str) -> dict[str, Any]:
    """Responses, an update's gate and its gradients, on kernels; the gradients once more by the CPU's functions."""
    from megatron_rl.exact import invariant, kernel_ops
    from tests.parallel.programs.exact import batch_of, prompts, start

    calls: dict[str, int] = {}

    def counted(name: str) -> Any:
        function = getattr(kernel_ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        return patch.object(kernel_ops, name, call)

    def gradients() -> list[torch.Tensor]:
        learner.accumulate(batch, everything, everything)
        return [p.main_grad.detach().double() for p in learner.module.parameters()]

    with tempfile.TemporaryDirectory() as folder, ExitStack() as on_kernels:
        on_kernels.enter_context(patch.object(invariant, "_forced", True))
        for name in KERNELS:
            on_kernels.enter_context(counted(name))
        model, limits = {"path": small_model(Path(folder))}, {"max_response_length": 3, "num_samples": 2}
        learner, generator = start(dtype, model=model, rollout=limits)
        groups = generator.rollout(prompts(2), 2, policy_version=0, step=0)
        for group in groups:
            for rollout in group.rollouts:
                rollout.reward = float(rollout.sample)
        batch, everything = batch_of(learner, groups), list(range(4))
        computed = gradients()
        metrics = learner.update(batch_of(learner, groups))
        before = dict(calls)
        on_kernels.close()
        with torch.no_grad():  # back to the weights before the update
            learner.weights.load(model["path"])
        expected = gradients()
    return {
        "gate": metrics["exact/max_abs_prob_diff"],
        "rho_std": metrics["mismatch/rho_std"],
        "calls": calls,
        "calls after": calls != before,
        "error": max(
            float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(computed, expected, strict=True)
        ),
        "nonzero": sum(bool(x.any()) for x in computed),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
