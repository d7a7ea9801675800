"""Learning rates against the formula and Megatron's scheduler, and what each key of the optimizer does."""

import json
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config.learner import LearnerConfig, LossScaleConfig, OptimizerConfig, ScheduleConfig
from megatron_rl.errors import InputError
from megatron_rl.learner import optimizer
from megatron_rl.learner.optimizer import LengthDecayScheduler, LossScaler, build_scheduler, with_optimizer
from megatron_rl.schedule import LearningRateSchedule
from tests.support.rounding import rounded
from tools.dev import length_curves

STEPS = 1000
LENGTHS = length_curves.paper_curve(110, 3500.0, num_steps=STEPS)(np.random.default_rng(7), 0.1)

MODES = {
    "manual": {"mode": "manual", "decay_period": 204},
    "manual-warmup": {"mode": "manual", "decay_period": 100, "warmup_steps": 40},
    "auto": {"mode": "auto"},
    "auto-warmup": {"mode": "auto", "warmup_steps": 30, "warmup_from": 1e-8},
    "shadow": {"mode": "shadow"},
    "shadow-manual": {"mode": "shadow", "decay_period": 125},
}


def config(**keys) -> ScheduleConfig:
    return ScheduleConfig(style="length-decay", **keys)


def build(schedule: ScheduleConfig, groups: list[dict] | None = None, **optimizer) -> LengthDecayScheduler:
    groups = [{"default_config": True}] if groups is None else groups
    return build_scheduler(schedule, OptimizerConfig(**optimizer), SimpleNamespace(param_groups=groups), STEPS)


def run(scheduler: LengthDecayScheduler, first: int = 0, last: int = STEPS, skipped=frozenset()) -> list[list[float]]:
    """Rates of every group at each rollout step; the update of a step in ``skipped`` overflows."""
    rates = []
    for step in range(first, last):
        scheduler.observe_length(scheduler.num_steps, LENGTHS[step])
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
        if step not in skipped:
            scheduler.step(1)
    return rates


# -- every mode, exactly


def expected_lr(mode: dict, t: int, surge: int | None, max_lr: float, min_lr: float) -> float:
    """Warm-up, then max(max_lr · 2^−floor(t/T), min_lr), written without the code under test."""
    warmup, start = mode.get("warmup_steps", 0), mode.get("warmup_from", 0.0)
    if warmup and t <= warmup:
        return start + (max_lr - start) * t / warmup
    period = mode.get("decay_period")
    if mode["mode"] == "shadow":
        return max_lr
    if mode["mode"] == "auto":
        if surge is None or t < surge:
            return max_lr
        period = round(1.8 * surge)
    return max(max_lr / 2 ** (t // period), min_lr)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_sequence_with_groups_and_skipped_steps(mode):
    groups = [
        {"default_config": True, "wd_mult": 1.0},
        {"default_config": False, "max_lr": 4e-6, "min_lr": 1e-6, "wd_mult": 0.0},
        {"default_config": True, "lr_mult": 0.25, "wd_mult": 0.5},
    ]
    skipped = {0, 7, 111, 112, 113, 205, 500}
    scheduler = build(config(**mode), groups, lr=1e-6, weight_decay=0.1)
    rates = run(scheduler, skipped=skipped)
    t, surge = 0, scheduler.length_decay.detector.surge_step
    assert surge is not None
    assert 100 <= surge <= 120
    for step in range(STEPS):
        assert rates[step][0] == expected_lr(mode, t, surge, 1e-6, 1e-7)
        assert rates[step][1] == expected_lr(mode, t, surge, 4e-6, 1e-6)
        assert rates[step][2] == 0.25 * expected_lr(mode, t, surge, 1e-6, 1e-7)
        t += step not in skipped
    assert scheduler.num_steps == STEPS - len(skipped)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.05]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_resumed_at_every_single_step(mode):
    whole = build(config(**mode))
    states, expected = [], []
    for step in range(STEPS):
        states.append(json.dumps(whole.state_dict()))  # what a checkpoint before this step would hold
        expected += run(whole, step, step + 1)
    for cut in range(STEPS):
        resumed = build(config(**mode))
        resumed.load_state_dict(json.loads(states[cut]))
        # Up to the next cut the sequence is compared, and at the next cut the state: by induction, all of the rest.
        assert run(resumed, cut, cut + 1) == [expected[cut]]
        after = states[cut + 1] if cut + 1 < STEPS else json.dumps(whole.state_dict())
        assert json.dumps(resumed.state_dict()) == after


@pytest.mark.parametrize("factor", [1.8, 1.5])
def test_surge_latches_one_period_and_shadow_only_reports_it(factor):
    auto, shadow = (build(config(mode=mode, period_factor=factor)) for mode in ("auto", "shadow"))
    rates = run(auto)
    shadows, real = [], []
    for step in range(STEPS):
        shadow.observe_length(step, LENGTHS[step])
        shadows.append(shadow.metrics()["lr_sched/shadow_lr"])
        real.append(shadow.metrics()["lr_sched/lr"])
        shadow.step(1)
    assert [rate for (rate,) in rates] == shadows
    assert set(real) == {1e-6}
    metrics = auto.metrics()
    assert metrics["lr_sched/decay_period"] == round(factor * metrics["lr_sched/surge_step"])
    assert metrics["lr_sched/decay_count"] == STEPS // metrics["lr_sched/decay_period"]
    auto.length_decay.observe(STEPS, 1e6)
    assert auto.metrics()["lr_sched/decay_period"] == metrics["lr_sched/decay_period"]


def test_a_phase_moves_every_halving_and_nothing_else():
    manual, moved = ({"mode": "manual", "decay_period": 204, "decay_phase": phase} for phase in (0, 60))
    expected, early = run(build(config(**manual), lr=1e-6)), build(config(**moved), lr=1e-6)
    rates = run(early)
    assert rates[: STEPS - 60] == expected[60:]
    assert early.metrics()["lr_sched/decay_count"] == (STEPS + 60) // 204
    # auto: the surge and the period are what they were
    auto, moved = build(config(mode="auto")), build(config(mode="auto", decay_phase=60))
    run(auto), run(moved)
    period = auto.metrics()["lr_sched/decay_period"]
    assert moved.metrics()["lr_sched/decay_period"] == period
    assert moved.metrics()["lr_sched/decay_count"] == (STEPS + 60) // period


class CountingLearner:
    """The learner's counters and its real scheduler; an update of ``num_updates`` optimizer steps, some skipped."""

    def __init__(self, scheduler: LengthDecayScheduler, minibatches: int) -> None:
        self.scheduler, self.minibatches, self.num_updates, self.rates = scheduler, minibatches, 0, []
        self.config = LearnerConfig()

    def update(self, batch: SimpleNamespace, complete: None) -> dict[str, float]:
        for i in range(self.minibatches):
            self.rates.append(self.scheduler.optimizer.param_groups[0]["lr"])
            if not (batch.step == 3 and i == 1):  # one update overflows
                self.scheduler.step(1)
                self.num_updates += 1
        return {}

    def export_weights(self) -> list:
        return []

    def step_aside(self, weights: bool = True) -> None:
        """Nothing leaves its device."""


def test_the_loop_gives_the_detector_optimizer_steps():
    """Four updates per rollout: the surge step and T_decay = round(1.8 t_s) count updates that were applied."""
    from megatron_rl.train import update

    learner = CountingLearner(build(config(mode="auto"), lr=1e-6), minibatches=4)
    recipe = SimpleNamespace(acceptance=None, objective=SimpleNamespace(kl_in_reward=None))
    run_ = SimpleNamespace(recipe=recipe, learner=learner, generator=MagicMock(), monitor=MagicMock())
    recorded = []
    for step in range(120):
        length = 1000 if step < 40 else 4000
        groups = [SimpleNamespace(rollouts=[SimpleNamespace(length=length)] * 2)]
        recorded.append(update(run_, SimpleNamespace(step=step), groups))
    t_s = learner.scheduler.length_decay.detector.surge_step
    assert 4 * 40 - 1 <= t_s <= 4 * 45 - 1
    period = round(1.8 * t_s)
    assert recorded[-1]["lr_sched/decay_period"] == period
    assert recorded[-1]["lr_sched/step"] == 4 * 119 - 1
    applied = [rate for i, rate in enumerate(learner.rates) if i != 13]
    assert applied == [max(1e-6 / 2 ** (t // period), 1e-7) for t in range(4 * 120 - 1)]
    assert applied[period - 1] == 2 * applied[period]


# -- against Megatron's own class and against the pure form


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 25])
def test_upstream_styles_are_upstreams(style, warmup):
    def groups() -> list[dict]:
        return [{"wd_mult": 1.0}, {"max_lr": 4e-6, "min_lr": 2e-7, "wd_mult": 0.0}]

    arguments = {
        "init_lr": 1e-8,
        "max_lr": 1e-6,
        "min_lr": 1e-7,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": 300,
        "lr_decay_style": style,
        "start_wd": 0.01,
        "end_wd": 0.1,
        "wd_incr_steps": 200,
        "wd_incr_style": "cosine",
    }
    upstream = OptimizerParamScheduler(SimpleNamespace(param_groups=groups()), **arguments)
    ours = LengthDecayScheduler(SimpleNamespace(param_groups=groups()), **arguments)
    schedule = ScheduleConfig(style=style, warmup_steps=warmup, warmup_from=1e-8)
    pure = LearningRateSchedule(schedule, 1e-6, total_steps=300)
    for step in range(400):
        assert ours.optimizer.param_groups == upstream.optimizer.param_groups
        assert pure.lr(step) == upstream.optimizer.param_groups[0]["lr"]
        upstream.step(1)
        ours.step(1)
    loaded = LengthDecayScheduler(SimpleNamespace(param_groups=groups()), **arguments)
    loaded.step(17)  # a scheduler that has already moved must not add its steps to the checkpoint's
    loaded.load_state_dict(upstream.state_dict())
    assert loaded.optimizer.param_groups == upstream.optimizer.param_groups
    assert upstream.state_dict().items() <= ours.state_dict().items()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_pure_schedule_equals_megatrons(mode):
    pure, rates = LearningRateSchedule(config(**mode), 1e-6, STEPS), run(build(config(**mode)))
    for step in range(STEPS):
        pure.observe_length(step, LENGTHS[step])
        assert pure.lr(step) == rates[step][0]


def test_a_checkpoints_older_bounds_do_not_outlive_the_recipes():
    groups = [{"default_config": True, "max_lr": 5e-5, "min_lr": None}, {"max_lr": 2e-6, "min_lr": None}]
    build(config(mode="manual", decay_period=10), groups, lr=1e-6).step(1000)
    assert [group["lr"] for group in groups] == [1e-7, 1e-7]


# -- the alarms' halving


def test_decay_now_halves_in_every_style_down_to_the_floor():
    for schedule in (ScheduleConfig(), config(mode="auto"), ScheduleConfig(style="cosine")):
        scheduler = build(schedule)
        before = scheduler.optimizer.param_groups[0]["lr"]
        scheduler.decay_now()
        assert scheduler.optimizer.param_groups[0]["lr"] == before / 2
        resumed = build(schedule)
        resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        assert resumed.optimizer.param_groups[0]["lr"] == before / 2
        for _ in range(5):
            scheduler.decay_now()
        assert scheduler.optimizer.param_groups[0]["lr"] == 1e-7


def test_decay_now_never_raises_a_rate_below_the_floor():
    scheduler = build(ScheduleConfig(warmup_steps=100))
    scheduler.step(1)
    assert scheduler.optimizer.param_groups[0]["lr"] == rounded(1e-8, scale=0)
    scheduler.decay_now()
    assert scheduler.optimizer.param_groups[0]["lr"] == rounded(1e-8, scale=0)


# -- the schema


def test_what_does_not_fit_the_optimizer_is_named():
    with pytest.raises(InputError, match=r"schedule.min_lr: 1e-05 is above learner.optimizer.lr"):
        build(ScheduleConfig(min_lr=1e-5))
    with pytest.raises(InputError, match=r"schedule.warmup_steps: 2000 leaves nothing of the 1000"):
        build(ScheduleConfig(style="cosine", warmup_steps=2000))
    assert build(ScheduleConfig(warmup_steps=2000)).optimizer.param_groups[0]["lr"] == 0.0


def scales(overflows: str, **keys) -> list[float]:
    """The loss scale after each update; "x" is one that overflows."""
    scaler, values = LossScaler(LossScaleConfig(**{"initial": 64.0} | keys)), []
    for update in overflows:
        scaler.settle(update == "x")
        values.append(scaler.scale.item())
    return values


def test_the_loss_scale_falls_down_to_its_minimum_and_grows_after_its_interval():
    assert scales("xxx", initial=2.0) == [1, 1, 1]
    assert scales("xxx", hysteresis=1) == [32, 16, 8]
    assert scales("xxx", hysteresis=3) == [64, 64, 32]
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
    adam_of = partial(SimpleNamespace, scale_loss=None, chained_optimizers=())
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda settings, *_, **__: adam_of(got=settings))
    model = SimpleNamespace(config=None)
    _, adam = with_optimizer(model, LearnerConfig(optimizer=OptimizerConfig(**given)), torch.device("cpu"), None)
    names = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps"}
    assert {key: getattr(adam.got, names.get(key, key)) for key in given} == given


def test_the_precision_contract_names_every_kind_of_attention_once():
    """A delta net has no core attention and is named itself, also where the first layer is one."""
    kinds = [SimpleNamespace(self_attention=mixer) for mixer in (_Delta(), _Attention(), _Delta())]
    config = SimpleNamespace(
        params_dtype=torch.bfloat16, apply_rope_fusion=False, bias_activation_fusion=False, num_moe_experts=None
    )
    model = SimpleNamespace(config=config, decoder=SimpleNamespace(layers=kinds), post_process=False)
    assert optimizer.describe_model(model)["attention"] == "_Delta, _Core"


class _Core: ...


class _Delta: ...


class _Attention:
    core_attention = _Core()
