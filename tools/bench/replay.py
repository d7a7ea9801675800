"""Cost of router replay: bytes per token, time to check and slice routes, and the update with and without it.

    python -m tools.bench.replay [--repeats 5]

One process, processor time (the machine may be shared), best of the repeats. The update is that of the tiny model on
rollouts made up here; checking and slicing is also timed at the shape of Qwen3-30B-A3B (48 layers, 128 experts, top-8).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.routing import RouteShape, RouteSlice, pack_routes, packed_keys, route_checksums
from megatron_rl.types import Batch, Rollout

REPOSITORY = Path(__file__).resolve().parents[2]

SHAPES = {
    "tiny": RouteShape(8, 2, tuple(range(4))),
    "Qwen3-30B-A3B": RouteShape(128, 8, tuple(range(48))),
}


def rollouts(shape: RouteShape, num_sequences: int, length: int) -> Batch:
    """Sequences of ``length`` tokens with random routes."""
    random = np.random.default_rng(0)
    sequences = []
    for i in range(num_sequences):
        prompt, tokens = length // 8, random.integers(3, 98, length)
        scores = random.random((length - 1, len(shape.layers), shape.num_experts), dtype=np.float32)
        routes = np.argpartition(scores, shape.topk, axis=-1)[..., : shape.topk].astype(shape.dtype)
        s = Rollout(
            id=f"bench:{i}/0",
            prompt=tokens[:prompt],
            tokens=tokens[prompt:].astype(np.int32),
            inference_logprobs=np.full(length - prompt, -1.0, dtype=np.float32),
            advantage=float(i % 2) - 0.5,
            reward=float(i % 2),
            policy_versions=np.zeros(length - prompt, dtype=np.int32),
            routed_experts=routes,
        )
        s.route_checksums = route_checksums(s.id, tokens, routes)
        sequences.append(s)
    return Batch(0, sequences, [list(range(num_sequences))])


def best(function: Callable[[], object], repeats: int) -> float:
    """Seconds of processor time of the fastest of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def step_costs(batch: Batch, shape: RouteShape, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Processor time in µs a token of all that a rank does with the routes of its share in one step.

    ``seal``: where they arrive from the engine. ``check``: against the tokens, once a step; ``slice``: a rank's rows
    and layers, proved against the tensors that the model gets. ``pass``: what each forward pass adds. No tensor or
    pipeline parallelism: with them a rank slices its part alone.
    """
    sequences = batch.sequences
    num_tokens, layers = sum(s.whole_length for s in sequences), range(len(shape.layers))
    packed = pack_routes(sequences, 0, shape)
    tokens, positions = (np.concatenate(x) for x in zip(*((s.whole, np.arange(s.whole_length)) for s in sequences)))
    keys = packed_keys(tokens, positions, [s.id for s in sequences], [s.whole_length for s in sequences])

    def take() -> RouteSlice:
        routes = packed.take([(0, num_tokens)], layers)
        routes.verify(keys, layers, shape)
        routes.settle()
        return routes

    taken = take()
    costs = {
        "seal": lambda: [route_checksums(s.id, s.whole, s.routed_experts) for s in sequences],
        "check": lambda: pack_routes(sequences, 0, shape),
        "slice": take,
        "pass": lambda: taken.on(torch.device(device)),
    }
    return {name: best(action, repeats) / num_tokens * 1e6 for name, action in costs.items()}


def payload_table(repeats: int) -> None:
    print(f"µs a token\n{'shape':<16}{'bytes/token':>12}{'seal':>8}{'check':>8}{'slice':>8}{'pass':>8}{'step':>8}")
    for name, shape in SHAPES.items():
        costs = step_costs(rollouts(shape, 2, 8192), shape, repeats)
        shown = "".join(f"{value:>8.2f}" for value in (*costs.values(), sum(costs.values())))
        print(f"{name:<16}{shape.bytes_per_token:>12}{shown}")


def tiny_recipe(**routing: object) -> Recipe:
    values = load_recipe(REPOSITORY / "recipes" / "tiny" / "grpo.yaml").model_dump(mode="json")
    values["runtime"]["device"] = "cpu"
    values["learner"]["optimizer"]["lr"] = 1e-9  # the same work in every repeat
    return Recipe.model_validate({**values, "routing": routing})


def update_table(repeats: int) -> None:
    from megatron_rl.learner.learner import Learner

    print(f"\n{'update, tiny model, 32 × 256 tokens':<40}{'s':>8}{'of off':>10}")
    batch, reference = rollouts(SHAPES["tiny"], 32, 256), None
    for name, routing in (
        ("off", {}),
        ("off, telemetry", {"telemetry": True}),
        ("r3", {"replay": "r3"}),
        ("r2 (with its old-logprobs pass)", {"replay": "r2"}),
    ):
        learner = Learner(tiny_recipe(**routing))
        learner.update(batch)
        seconds = best(lambda learner=learner: learner.update(batch), repeats)
        reference = reference or seconds
        print(f"{name:<40}{seconds:>8.3f}{seconds / reference:>10.2f}")
        if routing.get("replay") == "r2":
            for s in batch.sequences:
                s.old_logprobs = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    payload_table(arguments.repeats)
    update_table(arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
