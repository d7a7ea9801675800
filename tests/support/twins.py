"""The tiny twin of a recipe: the same objective, precision and routing on a model that two CPU cores can train.

Twins that differ in nothing but numbers are one: a recipe's `twin_key` is what its twin switches, with every number
left out.
"""

import json
from pathlib import Path
from typing import Any

from megatron_rl.config import Recipe
from tests.support.tiny import DATA, MODEL

PROMPTS, SAMPLES, MINIBATCHES, STEPS = 4, 4, 2, 2
LONGEST_RESPONSE = 24
ROLLOUT_KEPT = ("engine", "dtype", "quantization", "temperature", "top_p", "top_k", "max_staleness", "in_flight")
LEARNER_KEPT = ("dtype", "lora", "loss_scale", "optimizer", "offload", "recompute", "max_consecutive_overflows")


def shared_keys(recipe: Recipe) -> dict[str, Any]:
    """What a twin has in common with its recipe, but for the length that the objective divides by."""
    values = recipe.model_dump(mode="json")
    values["objective"].pop("max_response_length")
    return {
        "objective": values["objective"],
        "precision": values["precision"],
        "routing": values["routing"],
        "exact": values["exact"],
        "learner": {key: values["learner"][key] for key in ("dtype", "lora", "loss_scale")},
        "rollout": {key: values["rollout"][key] for key in ROLLOUT_KEPT},
        "weights of servers": values["rollout"]["servers"]["weights"],
        "several_updates": values["batch"]["minibatches"] > 1,
    }


def twin_key(recipe: Recipe) -> str:
    """Equal for recipes whose twins would differ in numbers alone."""
    return json.dumps(_without_numbers(shared_keys(recipe)), sort_keys=True)


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def twin(recipe: Recipe, run_root: Path, dense_model: Path) -> Recipe:
    """``recipe`` on the tiny model (adapters: on ``dense_model``), digit sums, 16 sequences a step, two steps."""
    values = recipe.model_dump(mode="json")
    several = recipe.batch.minibatches > 1
    return Recipe.model_validate(
        {
            "name": f"twin-{recipe.name}",
            "num_steps": STEPS,
            "run_root": str(run_root),
            "runtime": {"device": "cpu"},
            "model": {"path": str(dense_model if recipe.learner.lora else MODEL)},
            "data": {"train": str(DATA / "train.jsonl"), "prompt": {"max_length": 16}},
            "reward": {"name": "modsum", "overlong": values["reward"]["overlong"] and {"buffer": 8, "penalty": 1.0}},
            "batch": {
                **values["batch"],
                "prompts": PROMPTS,
                "minibatches": MINIBATCHES if several else 1,
                "generation_prompts": values["batch"]["generation_prompts"] and 2 * PROMPTS,
            },
            "rollout": {
                **{key: values["rollout"][key] for key in ROLLOUT_KEPT},
                "num_samples": SAMPLES,
                "max_response_length": LONGEST_RESPONSE,
                "kv_cache_gib": 0.0625,
                "servers": {
                    "launch": int(recipe.rollout.engine == "vllm_server"),
                    "weights": values["rollout"]["servers"]["weights"],
                },
            },
            "exact": values["exact"],
            "learner": {key: values["learner"][key] for key in LEARNER_KEPT},
            "precision": values["precision"],
            "routing": values["routing"],
            "objective": {**values["objective"], "max_response_length": LONGEST_RESPONSE},
            "schedule": values["schedule"],
            "monitor": {**values["monitor"], "terminal": "off", "tensorboard": False, "plots": False},
            "recorder": values["recorder"],
        }
    )
