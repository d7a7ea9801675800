"""Cases of `tools.bench.compare`: calls of a commit's package, without its `tools` or `tests`.

A case makes its inputs and returns the action of a round. An action returns None where its processor time counts, or a
number that is the same on every machine. The number must not grow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

Action = Callable[[], float | None]


def made_up_batch(number: int, prompt: int, longest: int, step: int = 0) -> Any:
    """``number`` sequences of the tiny vocabulary, their lengths spread evenly up to ``longest``."""
    from megatron_rl.types import Batch, Rollout

    random = np.random.default_rng(step)
    sequences = []
    for i in range(number):
        response = 1 + (i * 7919) % longest
        logprobs = random.normal(-1.0, 0.5, response).clip(max=-0.01).astype(np.float32)
        sequences.append(
            Rollout(
                id=f"train:{i // 8}/{i % 8}",
                prompt=random.integers(3, 98, prompt),
                tokens=random.integers(3, 98, response, np.int32),
                inference_logprobs=logprobs,
                old_logprobs=logprobs,
                advantage=float(random.normal()),
                reward=float(i % 2),
                policy_versions=np.zeros(response, dtype=np.int32),
            )
        )
    return Batch(step=step, sequences=sequences, minibatches=[list(range(number))])


def objective() -> Action:
    """Loss, its gradient and every metric of 2^18 packed tokens."""
    from megatron_rl.config import ObjectiveConfig
    from megatron_rl.objective import ObjectiveInputs, compute_denominators, compute_objective

    config, generator, rows, length = ObjectiveConfig(), torch.Generator().manual_seed(0), 64, 4096
    old = -torch.rand(rows * length, generator=generator) * 3 - 1e-3
    current = (old + 0.1 * torch.randn(len(old), generator=generator)).requires_grad_()
    inference, mask = old + 0.02 * torch.randn(len(old), generator=generator), torch.ones(len(old), dtype=torch.bool)
    offsets, advantages = torch.arange(rows + 1) * length, torch.randn(rows, generator=generator)
    inputs = ObjectiveInputs(current, old, inference, advantages, mask, cu_seqlens=offsets)

    def action() -> None:
        result = compute_objective(inputs, config, compute_denominators(inputs, config))
        torch.autograd.grad(result.loss, current)
        _ = result.metrics

    return action


def update() -> Action:
    """One update of the tiny model on 64 sequences."""
    import megatron_rl
    from megatron_rl.config import load_recipe
    from megatron_rl.learner.learner import Learner

    recipe = Path(megatron_rl.__file__).parents[1] / "recipes" / "tiny" / "grpo.yaml"
    learner = Learner(load_recipe(str(recipe), ["runtime.device=cpu"]))
    batch = made_up_batch(64, 12, 24)

    def action() -> None:
        learner.update(batch)

    return action


def checksums() -> Action:
    """Checksums of the routes of 8192 tokens in 48 layers with 8 of 128 experts."""
    from megatron_rl.routing import route_checksums

    random = np.random.default_rng(0)
    routes = random.integers(0, 128, (8191, 48, 8)).astype(np.uint8)
    tokens = random.integers(0, 150_000, 8192)

    def action() -> None:
        route_checksums("train:1/0", tokens, routes)

    return action


def dealing() -> Action:
    """2048 sequences of up to 32k tokens over 32 ranks."""
    from megatron_rl.learner.packing import deal

    lengths = _long_tail()

    def action() -> None:
        deal(lengths, 32, 32768)

    return action


def microbatches() -> Action:
    """Microbatches that these sequences take, on all ranks together."""
    from megatron_rl.learner.packing import deal

    return lambda: float(sum(len(rank) for rank in deal(_long_tail(), 32, 32768)))


def _long_tail() -> list[int]:
    random = np.random.default_rng(0)
    return np.minimum(random.lognormal(np.log(2000), 1.0, 2048) + 64, 32768).astype(int).tolist()


def recording() -> Action:
    """A batch of 256 responses of up to 2048 tokens to disk and back."""
    from megatron_rl.run.recorded_batches import load_batch, record_batch

    batch, folder = made_up_batch(256, 64, 2048), tempfile.TemporaryDirectory()

    def action() -> None:
        load_batch(record_batch(Path(folder.name), batch, 0))

    return action


def recorded_bytes() -> Action:
    """Bytes that this batch takes on disk."""
    from megatron_rl.run.recorded_batches import record_batch

    batch = made_up_batch(256, 64, 2048)

    def action() -> float:
        with tempfile.TemporaryDirectory() as folder:
            record_batch(Path(folder), batch, 0)
            return float(sum(file.stat().st_size for file in Path(folder).iterdir()))

    return action


def metrics_line() -> Action:
    """200 lines of 300 metrics."""
    from megatron_rl.monitor.run_directory import encode_line

    metrics = {f"some/metric_{i}": i / 7 for i in range(300)}

    def action() -> None:
        for step in range(200):
            encode_line(step, metrics)

    return action


def tensor_operations() -> Action:
    """Operations on whole tensors of tokens in `objective`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if not function.is_view and isinstance(result, torch.Tensor) and result.numel() >= 64 * 4096:
                self.number += 1
            return result

    def action(run: Action) -> float:
        with Count() as counter:
            run()
        return float(counter.number)

    return partial(action, objective())


CASES: dict[str, Callable[[], Action]] = {
    "objective": objective,
    "update": update,
    "route checksums": checksums,
    "dealing": dealing,
    "recording": recording,
    "metrics line": metrics_line,
    "microbatches": microbatches,
    "recorded bytes": recorded_bytes,
    "tensor operations": tensor_operations,
}
