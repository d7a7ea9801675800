"""Several rank programs in one start of the ranks: starting is what costs."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core import parallel_state


def run_jobs(module: str, jobs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Functions of ``module``, each free to choose its own layout: name → (function, kwargs)."""
    programs, results = importlib.import_module(module), {}
    for name, (function, kwargs) in jobs.items():
        results[name] = getattr(programs, function)(**kwargs)
        parallel_state.destroy_model_parallel()
    return results
