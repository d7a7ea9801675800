"""What the ranks of test_router_replay.py run."""

from __future__ import annotations

from typing import Any

import numpy as np
from megatron.core import parallel_state

from megatron_rl.learner.learner import Learner
from tests.support.routes import with_routes
from tests.support.tiny import stored_rollouts, tiny_recipe

# With an epsilon far above every gradient, one Adam step is plain gradient descent: the weights it leaves, less those
# before, are the gradient times STEP, to the last digits of fp32, whatever the layout has sharded where.
STEP = -1e3
PLAIN_DESCENT = {"lr": 1e11, "eps": 1e8, "clip_grad": 0.0}


def run_jobs(jobs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Several of the functions below in one start of the ranks, each on its own layout: ``name → (function, kwargs)``."""
    results = {}
    for name, (function, kwargs) in jobs.items():
        results[name] = globals()[function](**kwargs)
        parallel_state.destroy_model_parallel()
    return results


def learner(replay: str = "off", telemetry: bool = False, **section: Any) -> Learner:
    model = {"model": {"path": path}} if (path := section.pop("model", None)) else {}
    routing = {"replay": replay, "telemetry": telemetry}
    return Learner(tiny_recipe(routing=routing, learner={"optimizer": PLAIN_DESCENT, **section}, **model))


def native_routes(**section: Any) -> list[np.ndarray]:
    """What the model routes by itself, one [S - 1, L, K] array per stored sequence."""
    made, batch = learner("r2", **section), stored_rollouts(0)
    made.compute_logprobs(batch, "record")
    return [s.routed_experts for s in batch.sequences]


def gradients(replay: str, routes: list[np.ndarray] | None, telemetry: bool = False, **section: Any) -> dict[str, Any]:
    """Gradient in Hugging Face names, metrics and log-probs of one update on stored rollouts with ``routes``."""
    made, batch = learner(replay, telemetry, **section), stored_rollouts(0)
    if routes is not None:
        with_routes(batch, routes)
    before = {name: tensor.double().clone() for name, tensor in made.export_weights()}
    logprobs = made.compute_logprobs(batch)
    metrics = made.update(batch)
    after = {name: (tensor.double() - before[name]) / STEP for name, tensor in made.export_weights()}
    return {
        "gradients": {name: gradient.float() for name, gradient in after.items()},
        "metrics": metrics,
        "logprobs": np.concatenate(logprobs),
        "routes": [s.routed_experts for s in batch.sequences],
    }
