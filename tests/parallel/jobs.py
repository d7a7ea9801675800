"""Several rank programs in one start of the ranks: starting is what costs."""

import importlib
from typing import Any

from tests.support.layouts import leave_layout


def run_jobs(module: str, jobs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Functions of ``module`` or, as "program.function", below it, each free to choose its own layout:
    name → (function, kwargs)."""
    results = {}
    for name, (function, kwargs) in jobs.items():
        program, _, attribute = function.rpartition(".")
        programs = importlib.import_module(".".join(filter(None, (module, program))))
        results[name] = getattr(programs, attribute)(**kwargs)
        leave_layout()
    return results
