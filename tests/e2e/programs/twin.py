"""What test_recipes.py runs in one process: many short runs, one engine per rollout dtype."""

import json
from pathlib import Path
from typing import Any

from megatron_rl.config import Recipe
from megatron_rl.run import start as run
from megatron_rl.train import train
from tests.support.layouts import leave_layout


class Engines:
    """Keeps a vLLM engine for the next run that wants the same one; each run's learner sends it its own weights."""

    def __init__(self) -> None:
        self._start, self._engine, self._key = run.start_generator, None, None
        self.num_started = 0

    def __call__(self, recipe: Recipe, tokenizer: Any, learner: Any, **options: Any) -> Any:
        if recipe.rollout.engine != "vllm":
            return self._start(recipe, tokenizer, learner, **options)
        key = engine_key(recipe)
        if key != self._key:
            self.close()
            self._engine, self._key = self._start(recipe, tokenizer, learner, **options), key
            self._close, self._engine.close = self._engine.close, lambda: None
            self.num_started += 1
        self._engine.refit(learner.export_weights(), 0)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._close()
        self._engine = self._key = None


def engine_key(recipe: Recipe) -> str:
    """Equal for recipes that one engine can serve."""
    rollout, precision = recipe.rollout.model_dump(mode="json"), recipe.precision.model_dump(mode="json")
    return json.dumps([str(recipe.model.path), recipe.routing.needs_engine_routes, rollout, precision])


def run_twins(recipes: list[dict[str, Any]]) -> dict[str, Any]:
    """Name → rows of metrics.jsonl of each run; and how many engines were started."""
    engines, rows = Engines(), {}
    run.start_generator = engines
    run.shutdown = leave_layout  # the engine lives on in this world
    run.Run.save = lambda self: None  # the last checkpoint: a fifth of a twin's time, and other tests' business
    twins = sorted(map(Recipe.model_validate, recipes), key=engine_key)
    for twin in twins:
        train(twin, resume="never")
        file = Path(twin.run_dir) / "metrics.jsonl"
        rows[twin.name] = [json.loads(line) for line in file.read_text().splitlines()]
    engines.close()
    return {"rows": rows, "num_engines": engines.num_started}
