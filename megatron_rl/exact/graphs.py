"""Steps of generation as CUDA graphs: the host launches one graph where it would launch two thousand kernels.

A graph repeats launches on the memory that they were captured with. So the rows of a turn are copied into buffers of
the graph's, a step changes these, and what it found is copied out before the next one. The first step of a shape runs
without a graph: that compiles kernels and starts communication, which a capture must not. The shapes are the same on
all ranks, because ranks that exchange rows have to capture, or not, together.

Shapes: n rows, P pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

Step = Callable[["Rows", torch.Tensor], tuple[torch.Tensor, ...]]
"""Rows, what is needed of each [n] → what was found of each; the rows are changed."""

LEAST_PAGES = 16  # what one program of attention reads: fewer would save nothing


@dataclass
class Rows:
    """The rows of a turn on the device, [n] each."""

    tokens: torch.Tensor  # last of each sequence, whose keys come next
    positions: torch.Tensor  # its place in the sequence
    left: torch.Tensor  # tokens that may follow
    alive: torch.Tensor  # bool
    tables: torch.Tensor  # [n, P]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


Capture = Callable[[Callable[[], None], list], Callable[[], None]]
"""What is to be launched, and the memory that all graphs share → what launches it again."""


def captured_on_cuda(body: Callable[[], None], memory: list) -> Callable[[], None]:
    """`Capture` of a CUDA graph; ``body`` does not run. ``memory``: empty, or the pool of an earlier graph."""
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL and of the monitor may use CUDA meanwhile.
    with torch.cuda.graph(graph, pool=memory[0] if memory else None, capture_error_mode="thread_local"):
        body()
    memory[:] = [graph.pool()]
    return graph.replay


def capture_for(device: torch.device, enforce_eager: bool | None) -> Capture | None:
    """How steps on ``device`` become graphs. ``enforce_eager``: `rollout.enforce_eager`."""
    return captured_on_cuda if device.type == "cuda" and not enforce_eager else None


class StepGraphs:
    """``step`` as graphs, one for each number of rows and of pages."""

    def __init__(self, step: Step, capture: Capture):
        self._step, self._capture = step, capture
        self._graphs: dict[tuple[int, int], _Graph | None] = {}
        self._memory: list = []

    def __call__(self, rows: Rows, needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = tuple(rows.tables.shape)
        if shape not in self._graphs:
            self._graphs[shape] = None
            return self._step(rows, needed)
        graph = self._graphs[shape]
        if graph is None:
            graph = self._graphs[shape] = _Graph(self._step, rows, needed, self._capture, self._memory)
        return graph(rows, needed)


class _Graph:
    def __init__(self, step: Step, rows: Rows, needed: torch.Tensor, capture: Capture, memory: list):
        self._rows, self._needed = Rows(*(x.clone() for x in rows.tensors)), needed.clone()
        self._found: tuple[torch.Tensor, ...] = ()

        def body() -> None:
            changed = Rows(*self._rows.tensors)
            outputs = step(changed, self._needed)
            self._found = tuple(x.clone() for x in outputs)  # some are the rows, which change now
            for buffer, new in zip(self._rows.tensors, changed.tensors, strict=True):
                if new is not buffer:
                    buffer.copy_(new)

        self._replay = capture(body, memory)

    def __call__(self, rows: Rows, needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for field in fields(rows):
            buffer, value = getattr(self._rows, field.name), getattr(rows, field.name)
            if value is not buffer:
                buffer.copy_(value)
                setattr(rows, field.name, buffer)
        self._needed.copy_(needed)
        self._replay()
        return tuple(x.clone() for x in self._found)


def pages_of_graphs(pages: int) -> int:
    """At least ``pages``: few numbers, so that few graphs are made."""
    return max(LEAST_PAGES, 1 << (pages - 1).bit_length())
