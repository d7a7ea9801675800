"""Steps of exact generation that are recorded once and repeated: python -m tests.support.repeated_steps. Prints JSON.

Recorded are PyTorch's operations and the kernels' launches, with the tensors that they were given. Repeating runs them
on the same memory and runs nothing else, as a CUDA graph does: what Python has decided or kept in the meantime has no
effect. A process of its own, as tests.support.kernels.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.exact_on_kernels import small_model
from tests.support.kernel_modules import kernels_replaced
from tests.support.te import run_interpreted

LENGTH, STEPS = 7, 6


def run() -> dict[str, Any]:
    """What the program prints, from a process of its own."""
    return json.loads(run_interpreted("tests.support.repeated_steps").splitlines()[-1])


class Recording(TorchDispatchMode):
    """In the place of `exact.turns.captured_on_cuda`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on, self.repeated, self.calls = False, 0, []

    def capture(self, body: Callable[[], None], _memory: list) -> Callable[[], None]:
        self.calls, self.is_on = [], True
        with self:
            body()
        self.is_on, calls = False, self.calls

        def repeat() -> None:
            self.repeated += 1
            for call in calls:
                call()

        return repeat

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return out

    def kernel(self, kernel: Any) -> Any:
        """``kernel``, whose launches are recorded."""
        recording = self

        class Launches:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **kwargs: Any) -> None:
                    with _disable_current_modes():
                        kernel[grid](*args, **kwargs)
                    if recording.is_on:
                        recording.calls.append(lambda: kernel[grid](*args, **kwargs))

                return launch

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                """From within another kernel."""
                return kernel(*args, **kwargs)

        return Launches()


def main() -> dict[str, Any]:
    from megatron_rl.exact import invariant
    from tests.parallel.programs.exact import generator_of, prompts, start

    recording, steps = Recording(), {}
    replaced = kernels_replaced(lambda _, kernel: recording.kernel(kernel))
    with tempfile.TemporaryDirectory() as folder, invariant.forced_kernels(), replaced:
        model, limits = {"path": small_model(Path(folder))}, {"max_response_length": LENGTH, "stop_token_ids": []}
        learner, generator = start("bf16", model=model, rollout=limits)
        for name in ("run", "repeated"):
            generator = generator_of(learner)
            generator.policy.steps = STEPS
            generator.policy.capture = recording.capture if name == "repeated" else None
            groups = generator.rollout(prompts(2), 2, policy_version=0, step=0)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            steps[name] = [(r.tokens.tolist(), r.exact_logprobs.tolist()) for r in rollouts]
    return steps | {"times": recording.repeated}


if __name__ == "__main__":
    print(json.dumps(main()))
