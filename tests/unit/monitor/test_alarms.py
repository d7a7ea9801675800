"""Alarms: slopes against closed forms, levels, every recipe's rules, and how rules do on recorded runs."""

import json
import math

import numpy as np
import pytest

from megatron_rl.config import load_recipe
from megatron_rl.config.monitor import LEVELS, AlarmRule, MonitorConfig
from megatron_rl.errors import InputError
from megatron_rl.monitor import Monitor
from megatron_rl.monitor.alarms import (
    Alarms,
    CollapseRule,
    LogGrowth,
    RecordedRun,
    collapse_step,
    distinct,
    fit_slope,
    read_packed,
    score_run,
    score_set,
    t_quantile_975,
    wanted,
)
from tests.support.finished_run import curve, packed
from tests.support.rounding import rounded, standard_errors
from tests.support.tiny import MODEL

# -- slopes


SERIES = 2e-3  # what the documentation of t_quantile_975 allows its series


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (48, 2.0106)]
)
def test_t_quantiles(degrees, expected):
    assert t_quantile_975(degrees) == pytest.approx(expected, rel=SERIES)


def test_slope_and_interval_of_a_worked_example():
    # x = 0..4, y = 1, 3, 2, 5, 4: slope 0.8, residual sum of squares 3.6, s.e. sqrt(3.6 / 3 / 10), t(3) = 3.1824.
    slope = fit_slope([0, 1, 2, 3, 4], [1, 3, 2, 5, 4])
    assert slope.value == rounded(0.8)
    assert slope.upper - slope.value == pytest.approx(3.1824 * math.sqrt(0.12), rel=SERIES)
    assert slope.value - slope.lower == rounded(slope.upper - slope.value)
    assert fit_slope([0, 1], [0, 1]) is None
    assert fit_slope([2, 2, 2], [0, 1, 2]) is None


def test_interval_covers_the_true_slope_95_times_in_100():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        xs = np.arange(20.0)
        slope = fit_slope(xs.tolist(), (0.3 * xs + rng.standard_normal(20)).tolist())
        covered += slope.lower <= 0.3 <= slope.upper
    assert abs(covered / 1000 - 0.95) < standard_errors(math.sqrt(0.95 * 0.05), 1000)


def test_log_growth_is_the_growth_rate():
    growth = LogGrowth(window=10)
    slopes = [growth.observe(step, 1e-4 * 1.05**step) for step in range(30)]
    assert slopes[8] is None
    assert slopes[9].value == rounded(math.log(1.05))
    assert slopes[-1].lower == rounded(math.log(1.05))
    assert growth.observe(30, 0.0).value == rounded(math.log(1.05))


# -- alarms


def steps_at_which(rule: dict, values: list[float | None]) -> list[int]:
    alarms = Alarms([AlarmRule(name="rule", metric="m", **rule)])
    steps = []
    for step, value in enumerate(values):
        events = alarms.observe(step, {} if value is None else {"m": value})
        assert alarms.metrics(events) == {"alarm/rule": float(bool(events))}
        steps += [event.step for event in events]
    return steps


JUMPS = [0.0, 2.0, 2.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 2.0, 2.0, 2.0]
LINE = [0.1 * step for step in range(30)]
GROWTH = [1e-3 * 1.1**step for step in range(30)]
FALLS = [1.0, 1.0, 7.0, 1.0, 3.0, 0.0]  # means of two: 1, 4, 4, 2, 1.5; shares of the highest: 1, 1, 1, 0.5, 0.375
BELOW_ZERO = [-1.0, -1.0, -5.0]  # the bottom is -5 - 3 × 2, the lowest less three median moves; means of two: -1, -3
NOISE = [-0.5 + 0.05 * ((7 * step) % 5 - 2) for step in range(100)]
STARTS = [1.0, 2.0, 9.0, 1.0, 8.0, 8.0]  # medians of three: 2, 2, 8, 8; the first is the start


@pytest.mark.parametrize(
    ("rule", "values", "steps"),
    [
        ({"above": 1.0}, JUMPS, [1, 4, 9]),
        ({"above": 1.0, "for_steps": 3}, JUMPS, [6, 11]),
        ({"below": 1.0}, JUMPS, [0, 3, 8]),
        ({"above": 1.0, "for_steps": 2}, [2.0, None, None, 2.0], [3]),  # a metric that is absent is no observation
        ({"above": 1.0, "for_steps": 2}, [2.0, math.nan, 2.0, 2.0], [3]),  # NaN breaks the row
        ({"statistic": "not_finite"}, [1.0, math.inf, 1.0, math.nan], [1, 3]),
        ({"statistic": "ratio", "window": 3, "above": 3.0}, [1.0, 9.0, 1.0, 1.0, 3.1, 1.0], [4]),  # to the median
        ({"statistic": "slope", "window": 10, "above": 0.09}, LINE, [9]),
        ({"statistic": "slope", "window": 10, "above": 0.11}, LINE, []),
        ({"statistic": "log_slope", "window": 5, "above": 0.09}, GROWTH, [4]),
        ({"statistic": "log_slope", "window": 5, "below": 0.09}, GROWTH, []),
        ({"statistic": "mean", "window": 3, "above": 1.9}, [0.0, 0.0, 3.0, 3.0, 3.0], [3]),
        ({"statistic": "mean", "window": 3, "above": 0.9}, [9.0, 9.0], []),
        ({"statistic": "of_best", "window": 2, "below": 0.51}, FALLS, [4]),
        ({"statistic": "of_best", "window": 2, "below": 0.49}, FALLS, [5]),
        ({"statistic": "of_best", "window": 2, "below": 0.81}, BELOW_ZERO, [2]),
        ({"statistic": "of_best", "window": 2, "below": 0.8}, BELOW_ZERO, []),
        ({"statistic": "of_best", "window": 3, "below": 0.5}, NOISE, []),
        ({"statistic": "of_start", "window": 3, "above": 3.9}, STARTS, [4]),
        ({"statistic": "of_start", "window": 3, "above": 4.0}, STARTS, []),
        ({"statistic": "of_start", "window": 1, "above": 0.5}, [0.0, 5.0], []),
    ],
)
def test_a_rule_goes_off_where_its_statistic_crosses_its_bound(rule, values, steps):
    assert steps_at_which(rule, values) == steps


def test_confident_slope_ignores_what_noise_explains():
    rng = np.random.default_rng(0)
    noise = np.exp(0.3 * rng.standard_normal(200)).tolist()
    growing = [value * 1.1**step for step, value in enumerate(noise)]
    sure = {"statistic": "log_slope_lower", "window": 20, "above": 0.02, "for_steps": 3}
    plain = {**sure, "statistic": "log_slope"}
    assert steps_at_which(plain, noise) != []
    assert steps_at_which(sure, noise) == []
    assert len(steps_at_which(sure, growing)) == 1


def test_alarm_state_resumes_at_every_step():
    rules = [
        AlarmRule(name="a", metric="m", statistic="ratio", window=4, above=1.2, for_steps=2),
        AlarmRule(name="b", metric="m", statistic="slope", window=5, above=0.0, then=["save", "stop"]),
        AlarmRule(name="c", metric="m", statistic="of_start", window=4, above=5.0),
        AlarmRule(name="d", metric="m", statistic="of_best", window=1, below=0.9999, for_steps=1),
    ]
    values = np.random.default_rng(1).uniform(0.5, 2.0, 60).cumsum().tolist()
    whole = Alarms(rules)
    expected = [whole.observe(step, {"m": value}) for step, value in enumerate(values)]
    assert any(wanted(events, "stop") for events in expected)
    for cut in range(60):
        first, second = Alarms(rules), Alarms(rules)
        for step in range(cut):
            first.observe(step, {"m": values[step]})
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [second.observe(step, {"m": values[step]}) for step in range(cut, 60)] == expected[cut:]


@pytest.mark.parametrize(
    ("rule", "values", "onset"),
    [
        ({"above": 1.0, "for_steps": 3}, [0, 2, 0, 2, 2, 2], 3),
        ({"above": 1.0, "for_steps": 1}, [0, 0, 2], 2),
        ({"statistic": "not_finite", "for_steps": 2}, [0, math.inf, math.inf], 1),
        ({"statistic": "ratio", "window": 2, "above": 2.0, "for_steps": 2}, [1, 1, 3, 9], 2),
        ({"statistic": "mean", "window": 3, "above": 1.0, "for_steps": 2}, [0, 0, 0, 9, 9], 1),
        ({"statistic": "of_best", "window": 2, "below": 0.6}, [4, 4, 4, 2, 2], 3),
        ({"statistic": "of_start", "window": 2, "above": 2.0}, [1, 1, 1, 4], 2),
        ({"statistic": "slope", "window": 3, "above": 0.5}, [5, 4, 3, 2, 3, 4], 3),
    ],
    ids=lambda value: str(value.get("statistic", "value")) if isinstance(value, dict) else "",
)
def test_the_onset_is_where_what_the_rule_saw_began(rule, values, onset):
    """Of a statistic of a window: the window's first step, as the cause may lie anywhere in it."""
    alarms = Alarms([AlarmRule(name="a", metric="m", **rule)])
    events = [event for step, value in enumerate(values) for event in alarms.observe(step, {"m": value})]
    assert [(event.step, event.onset) for event in events] == [(len(values) - 1, onset)]


def test_a_rule_on_the_first_step_looks_once():
    rule = AlarmRule(name="first", metric="m", above=1.0, then=["stop"])
    alarms = Alarms([], first=[rule])
    assert alarms.observe(0, {}) == []  # a step without the metric is not yet the first
    assert alarms.metrics([]) == {}
    (event,) = alarms.observe(1, {"m": 2.0})
    assert wanted([event], "stop")
    assert alarms.metrics([event]) == {"alarm/first": 1.0}
    assert Alarms([], first=[rule]).observe(0, {"m": 1.0}) == []
    later = Alarms([], first=[rule])
    later.observe(0, {"m": 0.0})
    assert later.observe(1, {"m": 2.0}) == []
    own = AlarmRule(name="first", metric="m", above=5.0)
    assert Alarms([own], first=[rule]).observe(0, {"m": 2.0}) == []


def test_a_rule_on_the_first_step_is_over_in_a_run_that_goes_on():
    rule = AlarmRule(name="first", metric="m", above=1.0, then=["stop"])
    for saved in (Alarms([], first=[rule]).state_dict(), {}):
        alarms = Alarms([], first=[rule])
        alarms.load_state_dict(saved)
        assert alarms.observe(4, {"m": 2.0}) == []


def test_message_says_what_was_seen_and_what_follows():
    alarms = Alarms([AlarmRule(name="mismatch", metric="mismatch/rho_std", above=0.1, then=["decay_lr", "save"])])
    (event,) = alarms.observe(7, {"mismatch/rho_std": 0.25})
    assert event.message == (
        "alarm mismatch at step 7: mismatch/rho_std = 0.25 > 0.1 for 1 steps; then: decay_lr, save"
    )
    assert wanted([event], "save")
    assert not wanted([event], "stop")


# -- the rules that every recipe starts from


def default_rules() -> list[AlarmRule]:
    return load_recipe(MODEL.parent / "grpo.yaml").monitor.alarms


def test_default_rules_say_what_went_wrong():
    rng, fired = np.random.default_rng(0), {}
    alarms = Alarms(default_rules())
    for step in range(300):
        growth = 1.025 ** max(0, step - 150)
        metrics = {
            "actor/pg_loss": math.nan if step > 290 else float(rng.normal()),
            "mismatch/rho_std": 1e-3 * growth * float(np.exp(0.2 * rng.standard_normal())),
            "actor/grad_norm": 0.5 * growth * float(np.exp(0.3 * rng.standard_normal())),
            "actor/entropy": 0.3 if step < 200 else 0.005,
        }
        for event in alarms.observe(step, metrics):
            fired.setdefault(event.name, event.step)
            assert wanted([event], "stop") == (event.name == "not-finite")
    assert 150 < fired["mismatch-growth"] < 200
    assert 150 < fired["gradient-growth"] < 200
    assert fired["entropy-collapse"] == 219
    assert fired["not-finite"] == 293


def test_default_rules_are_silent_on_noise_decline_and_single_spikes():
    for seed in range(5):
        rng, alarms, fired = np.random.default_rng(seed), Alarms(default_rules()), []
        noise = np.exp(0.3 * rng.standard_normal((2, 1000)))
        for step in range(1000):
            spike = 10.0 if step % 97 == 50 else 1.0
            metrics = {
                "actor/pg_loss": float(rng.normal()),
                "mismatch/rho_std": 1e-3 * float(noise[0, step]) * 0.999**step,
                "actor/grad_norm": 0.5 * float(noise[1, step]) * spike,
                "actor/entropy": 0.3 * 0.997**step,
            }
            fired += alarms.observe(step, metrics)
        assert fired == []


def test_every_default_rule_watches_a_metric_that_the_run_reports():
    """A rule on a name that nothing writes would never go off, and no one would know."""
    reported = {"actor/pg_loss", "mismatch/rho_std", "actor/grad_norm", "actor/entropy"}
    assert {rule.metric for rule in default_rules()} == reported


def collapsing(step: int) -> dict[str, float]:
    return {"critic/rewards/mean": 0.8 if step < 20 else 0.1, "groups/no_signal_frac": 0.0, "actor/grad_norm": 0.5}


def test_a_run_says_at_its_end_what_went_off_also_after_a_resume(tmp_path):
    config = MonitorConfig(terminal="off", plots=False, tensorboard=False)
    with Monitor(tmp_path, config, {}, True, levels=LEVELS) as monitor:
        for step in range(40):
            monitor.record(step, collapsing(step))
        state = monitor.state_dict()
    assert "alarms went off, first at: reward-break (step 21)" in (tmp_path / "log.txt").read_text()
    # A silent rule has a metric only where it goes off.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if any(key.startswith("alarm/") for key in line)] == [21, 23]
    with Monitor(tmp_path / "on", config, {}, True, levels=LEVELS) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
    assert "reward-break (step 21)" in (tmp_path / "on" / "log.txt").read_text()


def test_packed_runs_are_read_once_each(tmp_path):
    runs = [{"run": name, "cause": "rate", "records": curve([0.5, 0.1])} for name in ("a", "b")]
    unpacked = read_packed(packed(tmp_path / "x.xz", runs))
    assert [(run.name, run.cause, len(run.records)) for run in unpacked] == [("s/a", "rate", 2), ("s/b", "rate", 2)]
    assert [run.name for run in distinct(unpacked)] == ["s/a"]
    (tmp_path / "bad.xz").write_bytes(b"no xz")
    with pytest.raises(InputError, match="cannot be read as packed runs"):
        read_packed(tmp_path / "bad.xz")


def test_a_set_of_rules_is_scored_by_hand():
    drop = AlarmRule(name="drop", metric="critic/rewards/mean", below=0.3)
    runs = [
        RecordedRun("collapsed", curve([0.8] * 20 + [0.1] * 20)),  # collapse: step 22, the median of five
        RecordedRun("missed", curve([1.6] * 20 + [0.7] * 20)),
        RecordedRun("healthy", curve([0.8] * 10 + [0.2] + [0.8] * 9)),
        RecordedRun("ailing", curve([0.8] * 20 + [0.5] * 20)),  # fell by more than a third, less than half
        RecordedRun("planted", curve([0.2] * 20), cause="reward"),
    ]
    score = score_set([(run, [drop]) for run in runs], CollapseRule())
    assert (score.runs, score.collapses, score.noticed, score.in_time) == (5, 2, 1, 1)
    assert (score.leads, score.missed) == ((2,), ("missed",))
    assert (score.healthy_runs, score.healthy_steps, score.false_alarms) == (1, 20, ("drop",))
    assert score.false_per_thousand == 50.0


@pytest.mark.parametrize("collapses", [True, False])
def test_collapse_is_found_where_the_reward_halves(collapses):
    values = [0.8] * 50 + ([0.8 - 0.01 * i for i in range(1, 81)] if collapses else [0.8] * 80)
    records = [{"step": i, "critic/rewards/mean": v} for i, v in enumerate(values)]
    # 0.4 is reached at step 89; the median of 5 trails by 2.
    assert collapse_step(records, CollapseRule()) == (91 if collapses else None)


def test_a_dip_is_no_collapse_and_nan_is():
    dip = [0.8] * 30 + [0.1] * 4 + [0.8] * 30
    assert collapse_step([{"step": i, "critic/rewards/mean": v} for i, v in enumerate(dip)], CollapseRule()) is None
    nan = [0.8] * 20 + [0.3] + [float("nan")] * 20
    assert collapse_step([{"step": i, "critic/rewards/mean": v} for i, v in enumerate(nan)], CollapseRule()) == 22


def test_lead_and_false_alarms_are_counted():
    rewards = [0.8] * 100 + [0.1] * 20
    signal = [0.0] * 10 + [1.0] * 2 + [0.0] * 68 + [1.0] * 40
    records = [
        {"step": i, "critic/rewards/mean": r, "s": s} for i, (r, s) in enumerate(zip(rewards, signal, strict=True))
    ]
    rule = AlarmRule(name="s", metric="s", above=0.5)
    (score,) = score_run(records, [rule], CollapseRule(), horizon=50)
    assert (score.fired, score.collapse, score.lead, score.false_alarms) == ((10, 80), 102, 22, 1)
    (calm,) = score_run(records[:90], [rule], CollapseRule(), horizon=50)
    assert (calm.collapse, calm.lead, calm.false_alarms) == (None, None, 2)
