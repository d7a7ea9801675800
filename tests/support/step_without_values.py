"""A step of exact generation on a device without values: python -m tests.support.step_without_values. Prints JSON.

The device is PyTorch's `meta`: tensors have a shape and a type and no values, so that nothing can be computed that a
value decides. `Captured` refuses what a CUDA graph cannot hold. Kernels are not launched: their grids are recorded. A
process of its own, as tests.support.kernels.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.exact_on_kernels import small_model
from tests.support.kernel_modules import kernels_replaced
from tests.support.te import run_interpreted

ROWS, PAGES, DEVICE = 64, 40, "meta"
OF_A_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


def run() -> dict[str, Any]:
    """What the program prints, from a process of its own."""
    return json.loads(run_interpreted("tests.support.step_without_values").splitlines()[-1])


class WaitsForTheDevice(Exception):
    """The host would read a value, or copy between host and device."""


@dataclass
class Counts:
    """Of a step: the last grid of each kernel, elements of each exchange between ranks, and launches of one layer."""

    grids: dict[str, list[int]] = field(default_factory=dict)
    exchanged: list[tuple[str, int]] = field(default_factory=list)
    launches: int = 0
    of_layer: int = 0


@dataclass(frozen=True)
class Group:
    """In the place of a process group: this rank is its last one."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.ranks - 1


class Captured(TorchDispatchMode):
    """Refuses what makes the host wait for the device, or takes memory of the host, as a CUDA graph would."""

    def __init__(self, counts: Counts):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = any(x.device.type == DEVICE for x in given)
        if func in INDEXING:  # by numbers: the shape is known; by a mask: it is not
            if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])):
                raise WaitsForTheDevice(f"{func} by a mask")
        elif on_device and OF_A_VALUE.intersection(func.tags):
            raise WaitsForTheDevice(str(func))
        out = func(*args, **(kwargs or {}))
        self._counts.launches += computes(func)
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if on_device and any(x.device.type == "cpu" for x in made):
            raise WaitsForTheDevice(f"{func} to the host")
        if any(x.device.type == DEVICE for x in made) and any(x.device.type == "cpu" and x.dim() for x in given):
            raise WaitsForTheDevice(f"{func} from the host")
        return out


def computes(func: Any) -> bool:
    """Whether an operation launches something: it is no view, and does more than to allocate."""
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not is_view and "empty" not in func._schema.name and "_unsafe_view" not in func._schema.name


class Launches:
    """In the place of a kernel: keeps the grid, launches nothing."""

    def __init__(self, name: str, counts: Counts):
        self._name, self._counts = name, counts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(type(size) is int and size > 0 for size in grid), (self._name, grid)

        def launch(*args: Any, **_: Any) -> None:
            wrong = [x for x in args if isinstance(x, torch.Tensor) and x.device.type != DEVICE]
            assert not wrong, (self._name, wrong)
            self._counts.grids[self._name] = list(grid)
            self._counts.launches += 1

        return launch


@contextmanager
def kernels_recorded(counts: Counts) -> Iterator[None]:
    from megatron_rl.exact.kernels import gemm

    # These tensors lie nowhere. The table is made once a place in memory, before any capture.
    table = patch.object(gemm, "weight_offsets", lambda weights: torch.zeros(len(weights), dtype=torch.int64))
    with kernels_replaced(lambda name, _: Launches(name, counts)), table:
        yield


@contextmanager
def exchanges_recorded(counts: Counts) -> Iterator[None]:
    """Between ranks that are not there."""
    from megatron_rl.exact import invariant

    def recorded(name: str) -> Callable[..., None]:
        def exchange(output: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
            assert sent.is_contiguous()
            assert output.is_contiguous()
            counts.exchanged.append((name, sent.numel()))

        return patch.object(torch.distributed, name, exchange)

    with (
        recorded("all_gather_into_tensor"),
        recorded("all_to_all_single"),
        patch.object(invariant, "_is_ours", lambda _op, group, _async: group.size() > 1),
    ):
        yield


def without_values(module: torch.nn.Module) -> None:
    """Give ``module`` weights without values."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.empty(weight.shape, dtype=weight.dtype, device=DEVICE)


def step(dtype: str, tensor: int = 1, expert: int = 1) -> Counts:
    """One step with its choice of tokens, which nothing may hold up; as one of ``tensor`` and of ``expert`` ranks. It
    has all weights, and the shapes of what it exchanges are those of ranks that share them out."""
    from megatron_rl.exact import invariant
    from megatron_rl.exact.doses import Dose
    from megatron_rl.exact.generator import Draws
    from megatron_rl.exact.layers import PagedCache
    from megatron_rl.exact.schedule import Pages, Schedule
    from megatron_rl.exact.turns import Responses, Rows, Turns
    from tests.parallel.programs.exact import start

    with tempfile.TemporaryDirectory() as folder:
        learner, generator = start(dtype, model={"path": small_model(Path(folder))})
    decoder, counts = generator.policy, Counts()
    passes = decoder.passes
    forced = patch.object(invariant, "_forced", True)
    with forced, torch.no_grad(), torch.device(DEVICE), kernels_recorded(counts), exchanges_recorded(counts):
        without_values(learner.module)
        decoder.device = passes.device = torch.device(DEVICE)
        part = learner.module.decoder.layers[0].self_attention
        heads, width = part.num_query_groups_per_partition, part.hidden_size_per_attention_head
        passes.step_forward._cos, passes.step_forward._sin = torch.zeros(2, 1024, width // 2).unbind()
        ranks = passes.step_forward._ranks
        if tensor > 1 or expert > 1:
            ranks.tensor_group, ranks.expert_group = Group(tensor), Group(expert)
        turns = Turns(
            passes,
            Schedule(np.ones(ROWS, np.int64), np.ones(ROWS, np.int64), [0] * ROWS, Pages(PAGES), ROWS, 2),
            Draws(decoder, [[1]] * ROWS, list(range(ROWS)), 1.0, Dose(None, 0), head=4),
            Responses.empty(ROWS, 1, head=4),
            numbers=range(ROWS),
            prompts=[[1]] * ROWS,
            cache=PagedCache(PAGES, 1, heads, width, next(iter(learner.module.parameters()))),
            stop=frozenset({0}),
            bucket=ROWS,
            max_tokens=ROWS,
        )
        numbers = torch.zeros(3, ROWS, dtype=torch.int64).unbind()
        rows = Rows(*numbers, torch.ones(ROWS, dtype=torch.bool), torch.zeros(ROWS, PAGES, dtype=torch.int64))
        needed = torch.zeros(ROWS, dtype=torch.float64)
        with Captured(counts):
            turns._advance(rows, needed)
            counts.exchanged.clear()
            marks = {}
            passes.step_forward.watch = lambda name, _: marks.setdefault(name, counts.launches)
            turns._advance(rows, needed)  # what it left is what it takes
    counts.of_layer = marks["layer 0"] - marks["embedding"]
    return counts


def main() -> dict[str, Any]:
    by_dtype = {dtype: step(dtype) for dtype in ("fp32", "bf16")}
    by_dtype["TP2 EP4"] = step("bf16", tensor=2, expert=4)
    return {name: asdict(one) for name, one in by_dtype.items()}


if __name__ == "__main__":
    print(json.dumps(main()))
