"""What test_trace.py runs: traces of recipes, some with fewer layers."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan import GPUS, Workload, make_workload
from megatron_rl.model.architecture import Architecture, shape_of


def shrunk(architecture: Architecture, layers: int | None) -> Architecture:
    """The same with its first ``layers`` layers; None: as it is."""
    if layers is None:
        return architecture
    return replace(architecture, num_layers=layers, moe_layers=architecture.moe_layers[:layers])


def workload(recipe: str, layers: int | None, overrides: list[str]) -> Workload:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_recipe(recipe, overrides)
    if layers is not None:
        layers = max(layers, loaded.learner.parallel.pipeline)
    return make_workload(loaded, shrunk(shape_of(loaded.model.path)[0], layers), GPUS["h100-80"])


def trace_all(cases: list[dict[str, Any]], out: str) -> int:
    """Write what `as_json` says of each case: recipe, layers, overrides, ranks, checkpoint_format and passes."""
    import torch
    import torch.distributed as dist

    from megatron_rl.instruments.trace import as_json, ranks_that_differ, trace_rank, trace_update

    results = []
    for case in cases:
        work = workload(case["recipe"], case.get("layers"), case.get("overrides", []))
        ranks = case.get("ranks") or ranks_that_differ(work.parallel, work.ranks)
        form = case.get("checkpoint_format", "own")
        traces = [trace_rank(work.recipe, work.architecture, rank, work.ranks, form) for rank in ranks]
        for trace in traces if case.get("passes") else []:
            trace.phases += trace_update(work, trace.rank)
        results.append(as_json(work, traces))
        assert not dist.is_initialized()
        assert torch.nn.Module.to.__module__ == "torch.nn.modules.module"
    Path(out).write_text(json.dumps(results))
    return 0
