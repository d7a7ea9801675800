"""An engine on a GPU gives up its weights while it sleeps, and takes room for the cache after the new ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout import vllm_engine
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.vllm_engine import VllmGenerator


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
    made._config, made._device, made._shapes = RolloutConfig(), "cuda", {}
    made._broken, made._stats, made._policy_version, made._wants_weights = "", {}, 0, False
    made._wants_cache, made._architecture, made._max_prompt_length = False, None, 16
    made._record_routes = False
    made._num_engines, made._engine, made._rank = 1, 0, 0
    made._sampling, made._llm = Sampling.from_config(made._config), Calls()
    return made


def test_order_of_sleep_wake_and_refit(engine, monkeypatch):
    """The cache wakes with the first rollout: until then its room is the learner's."""
    monkeypatch.setattr(engine, "_run_engine", lambda requests, sampling: [])
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

    class Folder:
        def __init__(self, path: Path) -> None: ...

        def items(self) -> Any:
            return iter(())

    monkeypatch.setattr(vllm_engine, "HFFolder", Folder)
    monkeypatch.setattr(vllm_engine, "check_own_refit", lambda before, after: None)
    engine._verify_refit(Path("model"))
    names = [call[0] for call in engine._llm.made]
    assert names[0] == names[-1] == "apply_model"
    assert "sleep" in names
