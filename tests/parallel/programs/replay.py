"""What the ranks of test_router_replay.py run."""

from copy import copy
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_rl.errors import InputError
from megatron_rl.learner import router_replay as replay
from megatron_rl.learner.learner import Learner
from megatron_rl.routing import RouteError, missing_id
from megatron_rl.types import Batch
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import stored_rollouts, tiny_recipe

# With an epsilon far above every gradient, one Adam step is plain gradient descent: the weights it leaves, less those
# before, are the gradient times STEP, to the last digits of fp32, whatever the layout has sharded where.
STEP = -1e3
PLAIN_DESCENT = {"lr": 4e9, "eps": 4e6, "clip_grad": 0.0}


def learner(mode: str = "off", telemetry: bool = False, malformed: str = "error", **section: Any) -> Learner:
    model = {"model": {"path": path}} if (path := section.pop("model", None)) else {}
    routing = {"replay": mode, "telemetry": telemetry, "malformed": malformed}
    return Learner(tiny_recipe(routing=routing, learner={"optimizer": PLAIN_DESCENT, **section}, **model))


def native_routes(**section: Any) -> list[np.ndarray]:
    """What the model routes by itself, one [S - 1, L, K] array per stored sequence."""
    made, batch = learner("r2", **section), stored_rollouts(0)
    made.compute_logprobs(batch, "record")
    return [s.routed_experts for s in batch.sequences]


def gradients(mode: str, routes: list[np.ndarray] | None, **section: Any) -> dict[str, Any]:
    """Gradient in Hugging Face names, metrics and log-probs of one update on stored rollouts with ``routes``."""
    made, batch = learner(mode, **section), stored_rollouts(0)
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
        "routes": routes_of_all(made, batch),
    }


def routes_of_all(made: Learner, batch: Batch) -> list[np.ndarray | None]:
    """Routes of every sequence, from the replica that holds them."""
    held = {i: s.routed_experts for i, s in enumerate(batch.sequences) if s.routed_experts is not None}
    routes = made.passes.share(held)
    return [routes.get(i) for i in range(len(batch.sequences))]


def some_routes() -> list[np.ndarray]:
    return random_routes(stored_rollouts(0))


def dense_layer(model: str, **section: Any) -> dict[str, Any]:
    """A model whose layer 1 is dense: native routes replayed, and random ones."""
    native = native_routes(model=model, **section)
    random = random_routes(stored_rollouts(0), num_layers=3)
    return {
        "off": gradients("off", None, model=model, **section),
        "native": gradients("r3", native, model=model, **section),
        "random": gradients("r3", random, model=model, **section),
    }


def _attempt(made: Learner, batch: Batch) -> dict[str, Any]:
    before = {name: tensor.clone() for name, tensor in made.export_weights()}
    error = None
    try:
        made.update(batch)
    except RouteError as raised:
        error = str(raised)
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in made.export_weights())
    return {"error": error, "num_updates": made.num_updates, "weights_moved": moved}


def mutated_payload(**section: Any) -> dict[str, Any]:
    """An update with the routes of one sequence damaged after their checksums were made."""
    made, batch = learner("r3", **section), stored_rollouts(0)
    with_routes(batch, random_routes(batch))
    victim = batch.sequences[5]
    victim.routed_experts = np.roll(victim.routed_experts, 1, axis=0)
    return _attempt(made, batch)


def mutated_slice(mutation: str, **section: Any) -> dict[str, Any]:
    """An update in which this rank takes the wrong part of sound routes."""
    made, batch = learner("r3", **section), stored_rollouts(0)
    with_routes(batch, random_routes(batch))
    rank = parallel_state.get_tensor_model_parallel_rank()
    if mutation == "permute ranks":
        with mock.patch.object(replay, "_sequence_parallel", return_value=(2, 1 - rank)):
            return _attempt(made, batch)
    made.replay.layers = made.replay.layers[::-1] if mutation == "swap local layers" else [
        3 - layer for layer in made.replay.layers
    ][::-1]  # fmt: skip
    return _attempt(made, batch)


H = 2e-2


def finite_differences() -> dict[str, Any]:
    """d/dh of L = −Σ_i A_i Σ_t log pi / N along the routers' own gradient, random routes replayed."""
    made, batch = learner("r3"), stored_rollouts(0)
    with_routes(batch, random_routes(batch))
    num_tokens = sum(int(s.loss_mask.sum()) for s in batch.sequences)

    def loss() -> float:
        learned = made.compute_logprobs(batch)
        return -sum(
            s.advantage * float((logprobs.astype(np.float64) * s.loss_mask).sum())
            for s, logprobs in zip(batch.sequences, learned, strict=True)
        ) / num_tokens  # fmt: skip

    routers = {name: p for name, p in made.module.named_parameters() if "router" in name}
    before = {name: p.detach().clone() for name, p in routers.items()}
    made.update(batch)
    gradient = {name: (p.detach() - before[name]) / STEP for name, p in routers.items()}
    norm = float(sum((g.double() ** 2).sum() for g in gradient.values())) ** 0.5
    fresh = learner("r3")
    made.module.load_state_dict(fresh.module.state_dict())

    def moved(h: float) -> float:
        with torch.no_grad():
            for name, p in routers.items():
                p.copy_(before[name] + h * gradient[name] / norm)
        return loss()

    steps = (H, 2 * H)
    return {"autograd": norm, "differences": [(moved(h) - moved(-h)) / (2 * h) for h in steps]}


def with_missing_rows() -> dict[str, Any]:
    """Native routes of which every seventh row is missing, or holds one expert twice where that is allowed."""
    native = native_routes()
    damaged, doubled, num_damaged, num_rows = [], [], 0, 0
    for routes in native:
        hit = (np.arange(routes.shape[0] * routes.shape[1]) % 7 == 0).reshape(routes.shape[:2])
        num_damaged, num_rows = num_damaged + int(hit.sum()), num_rows + hit.size
        damaged.append(np.where(hit[..., None], missing_id(routes.dtype), routes).astype(np.uint8))
        doubled.append(np.where(hit[..., None], 0, routes).astype(np.uint8))
    return {
        "fraction": num_damaged / num_rows,
        "off": gradients("off", None),
        "missing": gradients("r3", damaged),
        "malformed": gradients("r3", doubled, malformed="fallback"),
    }


def refused_options() -> dict[str, str | None]:
    """What RouterReplayer says to a Megatron configuration with each option."""
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "fused": {"moe_router_fusion": True},
        "aux loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2},
        "capacity": {"moe_expert_capacity_factor": 1.0},
    }
    made, messages = learner("off"), {}
    for name, changes in options.items():
        config = copy(made.module.config)
        for key, value in changes.items():
            setattr(config, key, value)
        try:
            replay.refuse_options(config)
            messages[name] = None
        except InputError as error:
            messages[name] = str(error)
    return messages
