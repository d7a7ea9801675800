"""Keys of optimizer, loss scale and schedule reach Megatron: each by what it changes, in closed form."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_rl.config.learner import LearnerConfig, LossScaleConfig, OptimizerConfig
from megatron_rl.learner import optimizer
from megatron_rl.learner.optimizer import LossScaler, with_optimizer


def scales(overflows: str, **keys) -> list[float]:
    """The loss scale after each update; "x" is one that overflows."""
    scaler, values = LossScaler(LossScaleConfig(**{"initial": 64.0, "minimum": 1.0} | keys)), []
    for update in overflows:
        scaler.settle(update == "x")
        values.append(scaler.scale.item())
    return values


def test_the_loss_scale_falls_by_its_factor_down_to_its_minimum():
    assert scales("xxx", backoff_factor=0.5) == [32, 16, 8]
    assert scales("xxx", backoff_factor=0.25) == [16, 4, 1]
    assert scales("xxx", backoff_factor=0.25, minimum=8.0) == [16, 8, 8]


def test_the_loss_scale_falls_once_as_many_updates_overflowed_as_hysteresis_says():
    assert scales("xxx", hysteresis=1) == [32, 16, 8]
    assert scales("xxx", hysteresis=3) == [64, 64, 32]


def test_the_loss_scale_grows_after_its_interval():
    assert scales("......", growth_interval=3) == [64, 64, 128, 128, 128, 256]


def test_an_interval_that_is_shorter_after_a_resume_grows_the_scale():
    before = LossScaler(LossScaleConfig(initial=64.0, growth_interval=100))
    for _ in range(7):
        before.settle(False)
    after = LossScaler(LossScaleConfig(initial=64.0, growth_interval=3))
    after.load_state_dict(before.state_dict())
    values = []
    for _ in range(4):
        after.settle(False)
        values.append(after.scale.item())
    assert values == [128, 128, 128, 256]


def test_numbers_of_adam_reach_megatron(monkeypatch):
    given = {"lr": 0.5, "weight_decay": 0.25, "beta1": 0.125, "beta2": 0.75, "eps": 0.0625, "clip_grad": 3.0}
    wrapped = SimpleNamespace(config=SimpleNamespace())
    monkeypatch.setattr(optimizer, "DistributedDataParallel", lambda *_: wrapped)
    monkeypatch.setattr(
        optimizer, "get_megatron_optimizer", lambda settings, *_, **__: SimpleNamespace(scale_loss=None, got=settings)
    )
    model = SimpleNamespace(config=None)
    _, adam = with_optimizer(model, LearnerConfig(optimizer=OptimizerConfig(**given)), torch.device("cpu"), None)
    names = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps"}
    assert {key: getattr(adam.got, names.get(key, key)) for key in given} == given
