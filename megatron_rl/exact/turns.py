"""Turns of generation: prompts that begin, steps of every row, and then a look at what was sampled.

`exact.schedule` says who runs when. Between two looks nothing waits for a value on the device: a turn is a fixed number
of steps of a fixed number of rows, tokens are chosen on the device, and a sequence that has ended runs on in its row
without effect until the turn ends.

Shapes: n rows, a multiple of ``bucket``; V/tp this rank's share of the vocabulary; m sequences of this replica; P pages
of the longest row.

Steps may run as CUDA graphs: the host launches one graph where it would launch two thousand kernels. A graph repeats
launches on the memory that they were captured with. So the rows of a turn are copied into buffers of the graph's, a
step changes these, and what it found is copied out before the next one. The first step of a shape runs without a graph:
that compiles kernels and starts communication, which a capture must not. The shapes are the same on all ranks, because
ranks that exchange rows have to capture, or not, together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch

from megatron_rl.exact.layers import CachedStep, PagedCache
from megatron_rl.exact.schedule import Schedule, Whole
from megatron_rl.exact.step import GenerationPasses, Owners, in_passes, largest
from megatron_rl.process.ranks import gather_objects

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
    """CUDA graphs of ``step``, one for each number of rows and of pages."""

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
    """Round ``pages`` up to a power of two: few graphs are made."""
    return max(LEAST_PAGES, 1 << (pages - 1).bit_length())


# How full generation is: sequences and cache pages, counted once in every turn.


@dataclass
class Counts:
    """Sums over the turns of one replica."""

    turns: int = 0
    running: int = 0  # sequences with a row
    waiting: int = 0  # sequences without one, that have not ended
    pages: int = 0  # in use
    most_pages: int = 0  # in use in one turn

    def add(self, running: int, waiting: int, pages: int) -> None:
        self.turns += 1
        self.running += running
        self.waiting += waiting
        self.pages += pages
        self.most_pages = max(self.most_pages, pages)

    def metrics(self, preempted: int, num_pages: int, num_replicas: int) -> dict[str, float]:
        """`perf/rollout_*` of all replicas, the same on every rank. Collective.

        ``preempted``: times that a sequence of this replica gave up its pages. ``num_pages``: that its cache has for
        sequences. Replicas take the same number of turns, and ranks of a replica count the same.
        """
        of_ranks = gather_objects((preempted, self.running, self.waiting, self.pages, self.most_pages))
        columns = list(zip(*of_ranks, strict=True))
        preempted, running, waiting, pages = (sum(column) for column in columns[:4])
        taken = max(1, self.turns) * len(of_ranks)
        return {
            "perf/rollout_preempted": preempted * num_replicas / len(of_ranks),
            "perf/rollout_running": running / taken,
            "perf/rollout_waiting": waiting / taken,
            "perf/rollout_pages": pages / taken,
            "perf/rollout_pages_max": float(max(columns[4])),
            "perf/rollout_pages_there": float(num_pages),
        }


class Chooser(Protocol):
    """What decides the next token of each row."""

    most_steps: int | None
    """Steps that it can be asked for at a time; None: any number."""
    head: int
    """k of the heads that it returns."""

    def ahead(self, sequences: list[int], made: np.ndarray, count: int) -> np.ndarray:
        """[len(sequences), count]: what it needs for each of the next ``count`` tokens, from the host. ``made`` says
        how many tokens each response has. Each number is asked for once, in order."""
        ...

    def choose(self, logits: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a token [n] int64 for each row of ``logits`` [n, V/tp], its log po and its log mu; where ``head`` is
        not 0, the k most probable tokens [n, k] and their log mu. ``needed`` [n]: a column of `ahead`."""
        ...


@dataclass
class Responses:
    """Responses of one replica's sequences: [m, longest] each, of which the first ``lengths`` [m] count."""

    tokens: np.ndarray  # int32
    clean: np.ndarray  # float32, log po as the learner computes it
    log_mu: np.ndarray  # float32, of what was sampled from
    lengths: np.ndarray  # int64
    heads: tuple[np.ndarray, ...] = ()  # [m, longest, k] int32 tokens, most probable first, and float32 log mu

    @classmethod
    def empty(cls, number: int, longest: int, head: int = 0) -> Responses:
        shape, floats = (number, longest, head), np.zeros((2, number, longest), np.float32)
        heads = (np.zeros(shape, np.int32), np.zeros(shape, np.float32)) if head else ()
        return cls(np.zeros((number, longest), np.int32), *floats, np.zeros(number, np.int64), heads)

    def add(self, sequences: np.ndarray, places: np.ndarray, *columns: np.ndarray) -> None:
        for kept, column in zip((self.tokens, self.clean, self.log_mu, *self.heads), columns, strict=True):
            kept[sequences, places] = column


@dataclass
class First:
    """The first token in its turn of each sequence that begins."""

    rows: np.ndarray
    sequences: np.ndarray
    places: np.ndarray  # of the token in the response
    columns: tuple[torch.Tensor, ...]  # of `Chooser.choose`


class Turns:
    """The responses of one replica while they grow; all methods are collective.

    ``numbers`` [m]: by which ``chooser`` knows the sequences. ``prompts`` [m]: theirs. ``found`` is filled.
    ``capture``: how steps become graphs; None: they are launched one by one, as they are where a dose, a watch or
    ``chooser`` works on the host.
    """

    def __init__(
        self,
        passes: GenerationPasses,
        schedule: Schedule,
        chooser: Chooser,
        responses: Responses,
        *,
        numbers: range,
        prompts: list[list[int]],
        cache: PagedCache,
        stop: frozenset[int],
        bucket: int,
        max_tokens: int,
        capture: Capture | None = None,
    ):
        self._passes, self._schedule, self._chooser, self._found = passes, schedule, chooser, responses
        self._numbers, self._prompts, self._cache = numbers, prompts, cache
        self._device, self._bucket, self._max_tokens = passes.device, bucket, max_tokens
        self._stop = torch.tensor(sorted(stop), dtype=torch.int64, device=self._device)
        self._owners: Owners = list  # of the rows of a step
        self.counts = Counts()
        self._graphs = None
        if capture is not None and chooser.most_steps is None and passes.step_is_alone:
            self._graphs = StepGraphs(self._advance, capture)

    def run(self) -> None:
        """All turns until every sequence has ended."""
        while self._turn():
            pass
        self._found.lengths = self._schedule.made

    def _turn(self) -> bool:
        """Whether there was anything to do, on any replica: those that share experts take part in all passes."""
        schedule = self._schedule
        begun = schedule.turn()
        parts = in_passes([w for w in begun if w.logits is None], lambda whole: whole.length, self._max_tokens)
        num_passes, num_steps, *shape = largest(len(parts), schedule.steps, len(schedule.rows), schedule.width)
        if not shape[0]:
            return False
        self.counts.add(len(schedule.rows), schedule.num_waiting, schedule.num_pages_held)
        for part in parts + [[]] * (num_passes - len(parts)):
            self._compute(part)
        first = self._first(begun)
        rows = self._rows(first, *shape)
        sampled = self._steps(rows, num_steps)
        self._look(rows, first, sampled)
        return True

    def _tokens(self, sequence: int, length: int) -> list[int]:
        """The first ``length`` of prompt and response."""
        prompt = self._prompts[sequence]
        return (prompt + self._found.tokens[sequence, : length - len(prompt)].tolist())[:length]

    def _compute(self, part: list[Whole]) -> None:
        """One pass over whole sequences: their logits, and their keys and values in the cache."""
        logits = self._passes.whole_rows(
            [self._tokens(whole.sequences[0], whole.length) for whole in part],
            cache=self._cache,
            pages=[whole.pages for whole in part],
            owners=lambda: [(self._numbers[w.sequences[0]], place) for w in part for place in range(w.length)],
        )
        ends = torch.tensor([whole.length for whole in part], dtype=torch.int64).cumsum(0) - 1
        for whole, row in zip(part, logits[ends.to(self._device)], strict=True):
            whole.logits = row

    def _first(self, begun: list[Whole]) -> First | None:
        """The next token of sequences that begin, which comes with their prompts."""
        if not begun:
            return None
        schedule = self._schedule
        copies = [copy for whole in begun for copy in whole.copies]
        if copies:
            self._cache.copy(*map(list, zip(*copies, strict=True)))
        sequences = np.array([i for whole in begun for i in whole.sequences])
        logits = torch.stack([whole.logits for whole in begun for _ in whole.sequences])
        places = schedule.made[sequences]
        needed = self._chooser.ahead([self._numbers[i] for i in sequences], places, 1)
        chosen = self._chooser.choose(logits, torch.from_numpy(needed[:, 0]).to(self._device))
        schedule.made[sequences] += 1
        row_of = {sequence: row for row, sequence in enumerate(schedule.rows)}
        return First(np.array([row_of[i] for i in sequences.tolist()]), sequences, places, chosen)

    def _rows(self, first: First | None, most_rows: int, most_pages: int) -> Rows:
        """Those of the schedule, and rows of padding. ``most_rows``, ``most_pages``: of any replica."""
        schedule = self._schedule
        number = len(schedule.rows)
        equal = self._graphs is not None or self._passes.needs_equal_rows
        size = max(1, -(-(most_rows if equal else number) // self._bucket)) * self._bucket
        pages = schedule.width if self._graphs is None else pages_of_graphs(most_pages)
        made = schedule.made[schedule.rows]
        columns = np.zeros((3, size), np.int64)
        columns[0, :number] = self._found.tokens[schedule.rows, made - 1]
        columns[1:, :number] = schedule.num_tokens - 1, schedule.limits[schedule.rows] - made
        tokens, positions, left = torch.from_numpy(columns).to(self._device)
        tables = np.full((size, pages), PagedCache.SCRATCH)
        tables[:number, : schedule.width] = schedule.tables[:number, : schedule.width]
        if first is not None:
            tokens[torch.from_numpy(first.rows).to(self._device)] = first.columns[0]
        alive = (left > 0) & ~self._is_stop(tokens)
        return Rows(tokens, positions, left, alive, torch.from_numpy(tables).to(self._device))

    def _steps(self, rows: Rows, num_steps: int) -> list[tuple[torch.Tensor, ...]]:
        """Steps of all rows without a look at any value; of each, what was chosen, and which rows count."""
        schedule = self._schedule
        numbers, starts = [self._numbers[i] for i in schedule.rows], schedule.num_tokens
        needed = torch.zeros(len(rows.tokens), num_steps, dtype=torch.float64)
        if numbers and num_steps:
            numbers_ahead = torch.from_numpy(self._chooser.ahead(numbers, schedule.made[schedule.rows], num_steps))
            needed = torch.cat([numbers_ahead, numbers_ahead.new_zeros(len(needed) - len(numbers_ahead), num_steps)])
        needed, sampled = needed.to(self._device), []
        advance = self._graphs or self._advance
        for turn in range(num_steps):
            self._owners = lambda turn=turn: [(i, int(n) - 1 + turn) for i, n in zip(numbers, starts, strict=True)]
            sampled.append(advance(rows, needed[:, turn]))
        return sampled

    def _advance(self, rows: Rows, needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step of all rows, which are changed: what was chosen, and which rows count."""
        step = CachedStep.of(self._cache, rows.tables, rows.positions)
        logits = self._passes.one_step(rows.tokens, rows.positions, step, self._owners)
        chosen, *found = self._chooser.choose(logits, needed)
        counts = rows.alive
        going_on = counts.long()
        rows.tokens = torch.where(counts, chosen, rows.tokens)
        rows.positions, rows.left = rows.positions + going_on, rows.left - going_on
        rows.alive = counts & (rows.left > 0) & ~self._is_stop(rows.tokens)
        return chosen, *found, counts

    def _is_stop(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] → [n] bool. PyTorch's `isin` sorts where there are many to look for, and then waits for a number."""
        return (tokens[:, None] == self._stop).any(1)

    def _look(self, rows: Rows, first: First | None, sampled: list[tuple[torch.Tensor, ...]]) -> None:
        """Read what was sampled, and end the sequences whose last token is among it."""
        schedule, responses = self._schedule, self._found
        numbers = np.array(schedule.rows, np.int64)
        if first is not None:
            responses.add(first.sequences, first.places, *(column.numpy(force=True) for column in first.columns))
        if sampled:
            *columns, counts = (torch.stack(c, 1).numpy(force=True)[: len(numbers)] for c in zip(*sampled, strict=True))
            row, turn = counts.nonzero()  # the steps of a row that count are its first ones
            sequences = numbers[row]
            responses.add(sequences, schedule.made[sequences] + turn, *(column[row, turn] for column in columns))
            schedule.made[numbers] += counts.sum(1)
        alive = rows.alive.numpy(force=True)[: len(numbers)]
        schedule.end(np.flatnonzero(~alive).tolist())
