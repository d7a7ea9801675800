"""The programs of the other tests over TransformerEngine's layers: importing this module installs them.

It is for a helper process of its own, that has not imported Megatron.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from tests.support import te

te.install()

Job = tuple[str, dict[str, Any]]


def run_jobs(jobs: dict[str, Job]) -> dict[str, Any]:
    """name → (program.function, kwargs); what each returned. A job that is named "unmarked …" runs without the marks
    of expert weights."""
    from megatron.core import parallel_state

    results = {}
    for name, (function, kwargs) in jobs.items():
        module, _, attribute = function.partition(".")
        program = importlib.import_module(f"tests.parallel.programs.{module}")
        with _unmarked() if name.startswith("unmarked") else nullcontext():
            results[name] = getattr(program, attribute)(**kwargs)
        parallel_state.destroy_model_parallel()
    return results


def _unmarked() -> AbstractContextManager:
    """Expert weights as TransformerEngine and Megatron leave them."""

    def only_their_optimizer(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False

    return mock.patch("megatron_rl.learner.model.mark_expert_parameters", only_their_optimizer)
