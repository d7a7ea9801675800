"""The tiny model, recipes around it, and rollouts made without an engine: shared by tests and rank programs."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.types import Batch
from tests.support.groups import whole_sequence

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "recipes" / "tiny" / "model"
DATA = REPOSITORY / "recipes" / "tiny" / "data"


def tiny_recipe(**sections: Any) -> Recipe:
    """A legal recipe on the tiny model, fp32 on the CPU; ``sections`` are merged over it one level deep."""
    values: dict[str, Any] = {
        "name": "test",
        "num_steps": 10,
        "runtime": {"device": "cpu"},
        "model": {"path": str(MODEL)},
        "data": {"train": str(DATA / "train.jsonl"), "prompt": {"max_length": 16}},
        "reward": {"name": "modsum"},
        "batch": {"prompts": 8},
        "rollout": {"dtype": "fp32", "num_samples": 8, "max_response_length": 24},
        "learner": {"dtype": "fp32", "optimizer": {"lr": 1e-3}},
        "objective": {"max_response_length": 24},
    }
    for key, value in sections.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) and key in values else value
    return Recipe.model_validate(values)


def stored_rollouts(
    step: int, num_sequences: int = 24, minibatches: int = 1, head: int = 0, teacher: bool = False, sets: int = 0
) -> Batch:
    """A batch of random sequences of mixed length that every layout can reproduce from ``step`` alone.

    ``head``: tokens of a head that each response token has, of random mass. ``teacher``: with random log-probs of one,
    and of ``sets`` of so many tokens.
    """
    random = np.random.default_rng(step)
    sequences = []
    for i in range(num_sequences):
        prompt, response = int(random.integers(3, 9)), int(random.integers(1, 25))
        sequences.append(
            whole_sequence(
                id=f"train:{i}/0",
                tokens=random.integers(3, 98, prompt + response),
                prompt_length=prompt,
                inference_logprobs=random.normal(-3.0, 1.0, response).clip(max=-0.01).astype(np.float32),
                loss_mask=np.full(response, i % 7 != 3),
                advantage=float(random.normal()),
                reward=float(i % 2),
                policy_versions=np.zeros(response, dtype=np.int32),
            )
        )
        if teacher:
            taus = np.random.default_rng([step, i]).normal(-3.0, 1.0, response).clip(max=-0.01)
            sequences[-1].teacher_logprobs = taus.astype(np.float32)
        if sets:
            other, s = np.random.default_rng([step, i, 1]), sequences[-1]
            s.teacher_tokens = np.stack([other.permutation(128)[:sets] for _ in range(response)]).astype(np.int32)
            s.teacher_set_logprobs = np.log(other.dirichlet(np.ones(sets), response).clip(1e-4)).astype(np.float32)
        if head:
            other, s = np.random.default_rng([step, i]), sequences[-1]
            s.head_tokens = np.stack([other.permutation(128)[:head] for _ in range(response)]).astype(np.int32)
            masses = other.dirichlet(np.ones(head + 1), response)[:, :head]
            s.head_logprobs = np.log(masses.clip(1e-4, 0.99)).astype(np.float32)
    parts = np.array_split(np.arange(num_sequences), minibatches)
    return Batch(step=step, sequences=sequences, minibatches=[part.tolist() for part in parts])
