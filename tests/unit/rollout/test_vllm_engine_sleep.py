"""An engine on a GPU gives up its weights while it sleeps, and takes room for the cache after the new ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.process.devices import leave_default_stream
from megatron_rl.rollout import precision, vllm_engine
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.vllm_engine import VllmGenerator
from tests.support import streams
from tests.support.tiny import MODEL


class Calls:
    """In the place of vLLM: notes what it is asked for."""

    def __init__(self) -> None:
        self.made: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, *args, *kwargs.values()))
            return [{"w": 1}] if name == "apply_model" else True

        return call


@pytest.fixture
def engine(monkeypatch) -> VllmGenerator:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(vllm_engine, "checked", lambda weights, shapes: weights)
    made = VllmGenerator.__new__(VllmGenerator)
    made._config, made._device, made._shapes, made._sleeps = RolloutConfig(), "cuda", {}, True
    made._broken, made._stats, made._policy_version, made._wants_weights = "", {}, 0, False
    made._wants_cache, made._architecture, made._max_prompt_length = False, SimpleNamespace(linear=None), 16
    made._shortest = 1
    made._record_routes, made._precision = False, PrecisionConfig()
    made._num_engines, made._engine, made._rank = 1, 0, 0
    made._sampling, made._llm = Sampling.from_config(made._config), Calls()
    return made


def test_order_of_sleep_wake_and_refit(engine, monkeypatch):
    """The cache wakes with the first rollout: until then its room is the learner's."""
    monkeypatch.setattr(engine, "_run_engine", lambda requests, sampling, records: [])
    engine.sleep()
    engine.wake()
    engine.refit(iter(()), 1)
    assert [call[0] for call in engine._llm.made][-1] == "reset_prefix_cache"
    engine.rollout([], 1, policy_version=1, step=0)
    engine.rollout([], 1, policy_version=1, step=1)
    made = engine._llm.made
    assert [call[:2] for call in made if call[0] in ("sleep", "wake_up")] == [
        ("sleep", 2),
        ("wake_up", ["weights"]),
        ("wake_up", ["kv_cache"]),
    ]
    names = [call[0] for call in made]
    assert names.index("finish_weight_update") < len(names) - 1 - names[::-1].index("wake_up")


def test_an_engine_that_does_not_sleep_keeps_its_memory(engine):
    engine._sleeps = False
    engine.sleep()
    engine.wake()
    engine.refit(iter(()), 1)
    assert {"sleep", "wake_up"}.isdisjoint(call[0] for call in engine._llm.made)


def test_a_refit_without_sleep_wakes_nothing(engine):
    engine.refit(iter(()), 1)
    assert "wake_up" not in [call[0] for call in engine._llm.made]


def test_no_rollout_between_wake_and_refit(engine):
    engine.sleep()
    engine.wake()
    with pytest.raises(RolloutError, match="gave up its weights while it slept: `wake`, then `refit`"):
        engine.rollout([], 1, policy_version=0, step=0)


def test_the_check_at_start_covers_sleep(engine, monkeypatch):
    """A parameter that no update brings would be lost in the first sleep."""

    monkeypatch.setattr(vllm_engine, "HFFolder", Path)
    monkeypatch.setattr(vllm_engine, "model_weights", lambda folder, architecture: iter(()))
    monkeypatch.setattr(vllm_engine, "check_own_refit", lambda before, after: None)
    engine._verify_refit(Path("model"))
    names = [call[0] for call in engine._llm.made]
    assert names[0] == names[-1] == "apply_model"
    assert "sleep" in names


def test_a_closed_engine_gives_its_memory_back_to_the_gpu(engine, monkeypatch):
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    core = Calls()
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    engine._owns_world = False
    engine.close()
    engine.close()
    assert [call[0] for call in core.made] == ["shutdown"]
    assert len(emptied) == 1


class Starts:
    """In the place of `vllm.LLM`: asks for the current stream, as vLLM's graphs do."""

    def __init__(self, **arguments: Any) -> None:
        streams.ask_vllm()

    def init_weight_transfer_engine(self, request: dict) -> None:
        pass


@pytest.mark.parametrize("beside_a_learner", [True, False])
def test_an_engine_keeps_the_stream_of_its_learner(engine, monkeypatch, beside_a_learner):
    """One that knows of none makes its own current for good, and gradients wait at every parameter."""
    current = streams.install(monkeypatch)
    if beside_a_learner:
        leave_default_stream(torch.device("cuda", 0))
    before = current()
    streams.import_vllm(monkeypatch)
    monkeypatch.setitem(vllm.__dict__, "LLM", Starts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    engine._start(MODEL)
    assert (current() == before) == beside_a_learner
    assert current() != streams.DEFAULT


def test_an_engine_starts_on_the_gpu_of_its_learner(engine, monkeypatch):
    class Started(Exception):
        pass

    def contained(rank: int, gpu: int | None) -> None:
        raise Started(gpu)

    monkeypatch.setattr(vllm_engine.process_state, "contained", contained)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "6")
    with pytest.raises(Started, match="2"):
        engine._start(Path("model"))


@pytest.mark.parametrize(("kind", "is_refused"), [("fp32", True), ("tf32", False), (None, False)])
def test_an_engine_with_other_products_than_the_recipe_says_is_refused(kind, is_refused, engine, monkeypatch):
    monkeypatch.setattr(vllm_engine.fp32_products, "measured_products", lambda *_, **__: {"Triton": "tf32"})
    if is_refused:
        with pytest.raises(InputError, match="should multiply fp32 matrices as fp32: Triton has tf32"):
            engine._hold_products(kind)
    else:
        engine._hold_products(kind)


@pytest.mark.parametrize("kind", ["fp32", "tf32"])
def test_what_an_engine_says_of_fp32_is_measured(kind, monkeypatch):
    monkeypatch.setattr(precision.fp32_products, "measured_products", lambda *_, **__: {"PyTorch": kind})
    monkeypatch.setattr(precision, "describe_configuration", lambda _: {"head": "fp32", "dtype": "bf16"})
    said = precision.described(SimpleNamespace(), precision.describe_model(torch.nn.Linear(1, 1)))
    assert said == {"weights": "", "head": kind, "dtype": "bf16"}
