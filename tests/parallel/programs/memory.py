"""What the ranks of test_memory.py run."""

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.dev.measure_memory import make_checkpoint, measure


def measure_cases(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, float]]:
    """(measured, predicted) bytes of this rank for each (model, arguments of `measure`)."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)
        for model, arguments in cases:
            if dist.get_rank() == 0:
                make_checkpoint(model, Path(folders[0]))
            dist.barrier()
            result = measure(Path(folders[0]) / model, **arguments)
            results.append((result.measured, result.predicted))
        dist.barrier()
    return results
