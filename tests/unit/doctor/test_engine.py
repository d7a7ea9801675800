"""Verdicts on mismatch, weight updates and memory, in both outcomes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.doctor import engine
from megatron_rl.doctor.checks import Outcome, Setting, tiny
from megatron_rl.doctor.engine import Distances

GOOD = {
    "bf16/bf16, fp32 head": Distances(3e-3, 2e-3, 2e-3, 0.01),
    "fp16/fp16": Distances(4e-4, 3e-4, 3e-4, 0.001),
    "fp32/fp32": Distances(1e-7, 1e-7, 0.0, 1e-6),
}


def test_rounding_of_each_type_passes():
    assert GOOD.keys() == engine.PAIRS.keys()
    outcome = engine.judge_mismatch(GOOD)
    assert outcome.status == "pass"
    assert outcome.figures["log-probs"]["fp16/fp16"]["mu_po"] == 4e-4


@pytest.mark.parametrize(
    ("pair", "distance"),
    [
        ("fp16/fp16", 0.0025),  # more than 8 × 3e-4
        ("fp32/fp32", 3.1e-4),  # more than fp16's own rounding
        ("bf16/bf16, fp32 head", float("nan")),
    ],
)
def test_an_engine_further_off_than_rounding_fails(pair, distance):
    own = GOOD[pair]
    outcome = engine.judge_mismatch(GOOD | {pair: Distances(distance, distance, own.po_fp32, 0.1)})
    assert (outcome.status, outcome.reason.startswith(f"{pair}: the engine's log-probs are")) == ("fail", True)
    assert outcome.fix


@pytest.mark.parametrize(
    ("new", "old", "status"),
    [(1e-7, 0.2, "pass"), (0.2, 0.2, "fail"), (0.05, 0.2, "fail"), (float("nan"), 0.2, "fail")],
)
def test_an_update_that_did_not_arrive_fails(new, old, status):
    assert engine.judge_refit(Distances(new, old, old, 0.0), 1.0).status == status


def test_distances_are_medians_over_all_tokens():
    def scores(offset: float):
        return SimpleNamespace(
            compute_logprobs=lambda batch: [np.array([-1.0, -2.0]) + offset, np.array([-3.0]) + offset]
        )

    sequences = [SimpleNamespace(inference_logprobs=np.array(v, dtype=np.float32)) for v in ([-1.5, -2.5], [-3.5])]
    measured = engine.distances(SimpleNamespace(sequences=sequences), scores(0.25), scores(1.0))
    assert (measured.mu_po, measured.mu_fp32, measured.po_fp32) == (0.75, 1.5, 0.75)
    assert measured.rho_std == 0.0


# -- memory

GIB = 1 << 30


@pytest.fixture
def planned(tmp_path):
    recipe = tiny(Setting("cuda", 1, "/tmp", scratch=str(tmp_path)), "runtime.device=cpu")
    return engine.predict(recipe, 80 * GIB)


def test_the_plan_has_every_phase(planned):
    assert planned.keys() == engine.PHASES.keys()
    assert planned["engine asleep"] < planned["forward and backward, optimizer"] < planned["engine awake"] < 80 * GIB


def test_memory_within_the_plan(planned):
    outcome = engine.judge_memory({name: 0.9 * size for name, size in planned.items()}, planned)
    assert (outcome.status, "90%" in outcome.reason) == ("pass", True)


@pytest.mark.parametrize("phase", engine.PHASES)
def test_a_phase_beyond_the_plan_is_named(planned, phase):
    measured = {name: 0.9 * size for name, size in planned.items()} | {phase: planned[phase] + 1}
    outcome = engine.judge_memory(measured, planned)
    assert (outcome.status, f"more than `plan` expects: {phase} " in outcome.reason) == ("fail", True)


def test_engines_that_follow_each_other_do_not_sleep(monkeypatch, tmp_path):
    """On an H200 vLLM refused the second: "CuMem allocator can only be used for one instance per process"."""
    import megatron_rl.learner.learner

    started = []

    def start(recipe: Any, learner: Any, *, sleeps: bool = True) -> Any:
        started.append(sleeps)
        return SimpleNamespace(close=lambda: None)

    learner = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(megatron_rl.learner.learner, "Learner", lambda recipe: learner)
    monkeypatch.setattr(engine, "start_engine", start)
    monkeypatch.setattr(engine, "confirm", lambda *arguments: None)
    monkeypatch.setattr(engine, "generate", lambda *arguments: None)
    monkeypatch.setattr(engine, "distances", lambda *arguments: GOOD["fp16/fp16"])
    engine.mismatch(Setting("cpu", 1, str(tmp_path), scratch=str(tmp_path)))
    assert started == [False] * len(engine.PAIRS)


def test_the_meters_peak_counts_what_pytorch_took_beyond_what_was_in_use(monkeypatch):
    import torch

    state = {"free": 70, "reserved": 4, "most": 4}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (state["free"], 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: state["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: state["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    meter = engine.GpuMeter()
    meter.begin()
    state["most"] = 9
    assert (meter.capacity, meter.now(), meter.peak()) == (80, 10, 15)
    state["free"] = 50  # an engine's memory, which PyTorch's allocator does not count
    assert meter.peak() == 30


@pytest.mark.parametrize(
    ("which", "of_layers", "told"),
    [
        ("m is not here", None, ("pass", "the tiny model: no 1; m is not here")),
        ("the first 2 layers of m", "pass", ("pass", "the tiny model: no 1; the first 2 layers of m: no 2")),
        ("the first 2 layers of m", "fail", ("fail", "the first 2 layers of m: no 2")),
    ],
)
def test_a_recipes_first_layers_are_looked_at_too(which, of_layers, told, monkeypatch):
    from megatron_rl.instruments.parity import witnesses

    monkeypatch.setattr(witnesses, "of_recipe", lambda recipe: 1)
    monkeypatch.setattr(engine, "compared", lambda setup: setup)
    monkeypatch.setattr(engine, "first_layers", lambda recipe, setting: (which, of_layers and 2))
    judge = lambda name, no: Outcome(of_layers if no == 2 else "pass", f"{name}: no {no}")  # noqa: E731
    monkeypatch.setattr(engine, "judge_parity", judge)
    outcome = engine.parity(Setting("cpu", 1, "/tmp", "recipes/tiny/grpo.yaml"))
    assert (outcome.status, outcome.reason) == told
