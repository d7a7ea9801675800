"""Graphs of steps: which step is captured, what it reads and leaves, how CUDA is asked; and counts of turns."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.exact.turns import Counts, Rows, StepGraphs, capture_for, captured_on_cuda, pages_of_graphs


def rows(first: int, pages: int = 16) -> Rows:
    number = torch.arange(first, first + 4)
    return Rows(number, number + 10, 3 - number % 2, number % 2 == 0, torch.full((4, pages), first))


def step(given: Rows, needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `exact.turns` does to rows, in small: they are bound anew, and one result is what they were."""
    before = given.alive
    given.tokens = torch.where(before, given.tokens + needed + given.tables[:, 0], given.tokens)
    given.left = given.left - 1
    given.alive = before & (given.left > 0)
    return given.tokens * 2, before


class Captures:
    """In the place of CUDA: each capture and each repetition is noted."""

    def __init__(self) -> None:
        self.captured, self.repeated, self.memory = 0, 0, []

    def __call__(self, body: Callable[[], None], memory: list) -> Callable[[], None]:
        self.captured += 1
        self.memory.append(memory)

        def repeat() -> None:
            self.repeated += 1
            body()

        return repeat


def all_steps(advance: Callable, turns: list[Rows]) -> list[list]:
    steps = []
    for turn in turns:
        sampled = [advance(turn, torch.tensor([1, 2, 3, 4]) * (1 + number)) for number in range(3)]
        steps += [[x.tolist() for x in one] for one in sampled]
        steps.append([x.tolist() for x in turn.tensors])
    return steps


def test_repeated_steps_are_those_that_run():
    captures = Captures()
    turns = [(1, 16), (5, 16), (2, 32), (3, 16), (4, 32)]
    repeated = all_steps(StepGraphs(step, captures), [rows(*turn) for turn in turns])
    assert repeated == all_steps(step, [rows(*turn) for turn in turns])
    assert captures.captured == 2, "one for each shape"
    assert captures.repeated == 3 * len(turns) - 2, "the first step of a shape runs"
    assert captures.memory[0] is captures.memory[1]


@pytest.mark.parametrize(("pages", "of_graph"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (256, 256)])
def test_graphs_are_few(pages, of_graph):
    assert pages_of_graphs(pages) == of_graph


def test_who_captures():
    assert capture_for(torch.device("cuda", 3), None) is captured_on_cuda
    assert capture_for(torch.device("cuda"), False) is captured_on_cuda
    assert capture_for(torch.device("cuda"), True) is None
    assert capture_for(torch.device("cpu"), False) is None


def test_cuda_is_asked_for_one_pool_of_memory(monkeypatch):
    asked, ran = [], []

    def graph(made: object, pool: object, capture_error_mode: str) -> nullcontext:
        asked.append((made, pool, capture_error_mode))
        return nullcontext()

    graphs = [SimpleNamespace(pool=lambda: "the pool", replay=object()) for _ in range(2)]
    unused = iter(graphs)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: next(unused))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    memory: list = []
    assert [captured_on_cuda(lambda: ran.append(1), memory) for _ in range(2)] == [one.replay for one in graphs]
    assert asked == [(graphs[0], None, "thread_local"), (graphs[1], "the pool", "thread_local")]
    assert ran == [1, 1]


def test_means_over_turns_and_the_most():
    counts = Counts()
    for running, waiting, pages in ((4, 3, 8), (4, 0, 12), (1, 0, 1)):
        counts.add(running, waiting, pages)
    assert counts.metrics(preempted=2, num_pages=12, num_replicas=1) == {
        "perf/rollout_preempted": 2.0,
        "perf/rollout_running": 3.0,
        "perf/rollout_waiting": 1.0,
        "perf/rollout_pages": 7.0,
        "perf/rollout_pages_max": 12.0,
        "perf/rollout_pages_there": 12.0,
    }


def test_without_prompts_there_are_no_turns():
    counted = Counts().metrics(preempted=0, num_pages=3, num_replicas=1)
    assert {name for name, value in counted.items() if value} == {"perf/rollout_pages_there"}


def test_replicas_are_summed_once_whatever_their_ranks(monkeypatch):
    counts = Counts()
    counts.add(running=4, waiting=2, pages=8)
    other = (5, 2, 0, 3, 3)  # preempted, running, waiting, pages, most pages of the second replica
    monkeypatch.setattr("megatron_rl.exact.turns.gather_objects", lambda mine: [mine, mine, other, other])
    assert counts.metrics(preempted=1, num_pages=12, num_replicas=2) == {
        "perf/rollout_preempted": 6.0,
        "perf/rollout_running": 3.0,
        "perf/rollout_waiting": 1.0,
        "perf/rollout_pages": 5.5,
        "perf/rollout_pages_max": 8.0,
        "perf/rollout_pages_there": 12.0,
    }
