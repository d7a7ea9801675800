"""Unit costs of a server that `tools.bench.pipeline` measures: those of a server that works as `plan` simulates it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.instruments.plan.fleet import ServerCosts
from megatron_rl.instruments.plan.workload import Lengths
from tests.support.rounding import gamma
from tools.bench.lib import server_costs
from tools.bench.pipeline import Measured

STEP, REQUEST, TOKEN = 2.0**-7, 2.0**-9, 2.0**-12  # seconds: sums of powers of two are exact
CALLBACKS = 10  # rounds of the event loop in which a client that was answered asks again


@dataclass
class MadeUpClient:
    """A server with a clock of its own: a step of n responses takes (1 + n) · STEP, whoever comes stops the others."""

    address: Any = None
    token: str = ""
    deadline_s: float = 0.0
    now: float = 0.0
    waiting: list = field(default_factory=list)
    running: dict = field(default_factory=dict)  # future → tokens to go

    async def check_health(self) -> None:
        self.worker = asyncio.create_task(self.work())

    async def push(self, weights: Any) -> None: ...

    async def close(self) -> None:
        self.worker.cancel()

    async def generate(self, body: dict[str, Any], version: int) -> None:
        ended = asyncio.get_running_loop().create_future()
        self.waiting.append((ended, body))
        await ended

    async def work(self) -> None:
        while True:
            for _ in range(CALLBACKS):
                await asyncio.sleep(0)
            for ended, body in self.waiting:
                self.now += REQUEST + TOKEN * len(body["token_ids"])
                self.running[ended] = body["sampling_params"]["max_tokens"]
            self.waiting.clear()
            assert len(self.running) <= server_costs.RUNNING[-1]
            self.now += STEP * (1 + len(self.running))
            for ended in list(self.running):
                self.running[ended] -= 1
                if not self.running[ended]:
                    del self.running[ended]
                    ended.set_result(None)


def test_they_are_those_of_the_server(monkeypatch):
    client = MadeUpClient()
    monkeypatch.setattr(server_costs, "ServerClient", lambda *arguments: client)
    monkeypatch.setattr(server_costs, "time", SimpleNamespace(perf_counter=lambda: client.now))
    costs = asyncio.run(server_costs.server_costs(None, "", 100, rounds=1))
    prompt_tokens = server_costs.PREFILLED[0]
    assert [costs.read[number] for number in server_costs.RUNNING] == [STEP * (1 + n) for n in server_costs.RUNNING]
    assert costs.request == REQUEST + TOKEN * prompt_tokens
    assert costs.prefill == (TOKEN, 0.0)


def measured(tokens: list[float], seconds: list[float]) -> Measured:
    rows = [
        {"perf/rollout_tokens": n, "perf/time/step": s + 3.0, "perf/time/generate": 2.0, "perf/refit_engine_s": 1.0}
        for n, s in zip(tokens, seconds, strict=True)
    ]
    return Measured(rows, Lengths("", 1, np.ones(1)), ServerCosts(1, 0.0, [0.0, 0.0]), True, 0.0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.5 + 0.25 * n for n in (1, 2, 3, 6)], (0.5, 0.25)),
        ([0.25 * n - 0.125 for n in (1, 2, 3, 6)], (0.0, 0.625 / 3)),  # below nothing for no token: by tokens alone
        ([5.0, 4.0, 3.0, 0.0], (3.0, 0.0)),  # fewer seconds for more tokens: by steps alone
    ],
)
def test_a_step_that_learns_is_a_line_through_the_steps(seconds, expected):
    """By least squares, through the mean of all steps."""
    costs = measured([1.0, 2.0, 3.0, 6.0], seconds).learn
    assert costs == pytest.approx(expected, rel=gamma(32), abs=gamma(32))
