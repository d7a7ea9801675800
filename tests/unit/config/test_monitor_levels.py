"""The rules on levels that every run has: what they compute, when they are there, and how they did on recorded runs."""

from __future__ import annotations

import json
import lzma

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config.monitor import LEVELS, RHO_BOUNDS, AlarmRule, MonitorConfig, level_rules
from megatron_rl.errors import InputError
from megatron_rl.instruments.watch import views
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.monitor import Monitor
from megatron_rl.monitor.alarms import Alarms
from megatron_rl.monitor.scoring import CollapseRule, RecordedRun, distinct, read_packed, score_set
from tests.support.tiny import tiny_recipe
from tests.support.written_run import WrittenRun


def went_off(rule: AlarmRule, values: list[float]) -> list[int]:
    alarms = Alarms([rule])
    return [event.step for step, value in enumerate(values) for event in alarms.observe(step, {rule.metric: value})]


def rule(**keys) -> AlarmRule:
    return AlarmRule(name="rule", metric="m", **keys)


def test_the_mean_of_a_window_is_held_against_a_bound():
    # Means of three: -, -, 1, 2, 3.
    assert went_off(rule(statistic="mean", window=3, above=1.9), [0.0, 0.0, 3.0, 3.0, 3.0]) == [3]
    assert went_off(rule(statistic="mean", window=3, above=0.9), [9.0, 9.0]) == []


def test_of_best_is_the_share_of_the_highest_mean():
    # Means of two: 1, 4, 4, 2, 1; shares of the highest so far: 1, 1, 1, 0.5, 0.25.
    values = [1.0, 1.0, 7.0, 1.0, 3.0, -1.0]
    assert went_off(rule(statistic="of_best", window=2, below=0.51), values) == [4]
    assert went_off(rule(statistic="of_best", window=2, below=0.49), values) == [5]
    assert went_off(rule(statistic="of_best", window=2, below=0.9), [-1.0, -1.0, -5.0, -9.0]) == []


def test_of_start_is_a_multiple_of_the_runs_first_window():
    # Medians of three: 2, 2, 8, 8; the first is the start.
    values = [1.0, 2.0, 9.0, 1.0, 8.0, 8.0]
    assert went_off(rule(statistic="of_start", window=3, above=3.9), values) == [4]
    assert went_off(rule(statistic="of_start", window=3, above=4.0), values) == []
    assert went_off(rule(statistic="of_start", window=1, above=0.5), [0.0, 5.0]) == []


def recipe(learner: str, rollout: str, **keys) -> dict:
    return {"learner": {"dtype": learner}, "rollout": {"dtype": rollout, **keys}}


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        (recipe("fp32", "fp32"), RHO_BOUNDS["fp32"]),
        (recipe("fp32", "bf16"), RHO_BOUNDS["bf16"]),
        (recipe("bf16", "bf16", quantization={"weights": "int4", "kv_cache": None, "block": [1, 1]}), 2.0),
        (recipe("fp32", "fp32", max_staleness=1), None),
        (recipe("fp32", "fp32") | {"exact": {"noise": {"kind": "stale"}}}, None),
        (recipe("fp32", "fp32") | {"precision": {"allow_asymmetric": True}}, None),
        ({}, None),
    ],
)
def test_the_contract_bounds_rho_by_the_coarser_type(values, bound):
    found = {rule.name: rule.above for rule in level_rules(values)}
    assert found.get("mismatch-contract") == bound
    assert set(found) - {"mismatch-contract"} == {rule.name for rule in LEVELS}


def test_one_key_turns_them_off():
    assert level_rules({"monitor": {"levels": False}}) == []
    assert level_rules(tiny_recipe(monitor={"levels": False}).model_dump()) == []


def collapsing(step: int) -> dict[str, float]:
    return {"critic/rewards/mean": 0.8 if step < 20 else 0.1, "groups/no_signal_frac": 0.0, "actor/grad_norm": 0.5}


def test_a_run_says_at_its_end_what_went_off_also_after_a_resume(tmp_path):
    config = MonitorConfig(terminal="off", plots=False, tensorboard=False)
    with Monitor(tmp_path, config, {}, True, levels=LEVELS) as monitor:
        for step in range(40):
            monitor.record(step, collapsing(step))
        state = monitor.state_dict()
    assert "alarms went off, first at: reward-drop (step 23)" in (tmp_path / "log.txt").read_text()
    # A silent rule has a metric only where it goes off.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if any(key.startswith("alarm/") for key in line)] == [23]
    with Monitor(tmp_path / "on", config, {}, True, levels=LEVELS) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
    assert "reward-drop (step 23)" in (tmp_path / "on" / "log.txt").read_text()


def test_a_collapsed_run_is_no_plain_done(tmp_path):
    written = WrittenRun(tmp_path)
    for step in range(12):
        written.step(step, alarm=step == 7)
    written.directory.done.write_text("12\n")
    run = WatchedRun("run", tmp_path)
    run.refresh()
    assert run.status() == "alarmed"
    rules = {rule["name"]: rule["text"] for rule in views.state([run])["runs"][0]["rules"]}
    assert "(window of 10, full since step 9)" in rules["reward-drop"]
    assert "(window of 20, has 12 of 21)" in rules["length-surge"]
    assert "window" not in rules["no-signal"]


def packed(path, runs: list[dict]):
    lines = [{"format": 1, "study": "s"}, *runs]
    path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def curve(values: list[float]) -> list[dict]:
    return [{"step": step, "critic/rewards/mean": value} for step, value in enumerate(values)]


def test_packed_runs_are_read_once_each(tmp_path):
    runs = [{"run": name, "cause": "rate", "records": curve([0.5, 0.1])} for name in ("a", "b")]
    found = read_packed(packed(tmp_path / "x.xz", runs))
    assert [(run.name, run.cause, len(run.records)) for run in found] == [("s/a", "rate", 2), ("s/b", "rate", 2)]
    assert [run.name for run in distinct(found)] == ["s/a"]
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


def test_the_command_prints_the_two_halves(tmp_path, capsys):
    runs = [{"run": f"r{number}", "records": curve([0.8] * 20 + [0.1 + number / 1000] * 20)} for number in range(12)]
    assert main(["score-alarms", str(packed(tmp_path / "x.xz", runs))]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    halves = [read_packed(tmp_path / "x.xz")[number].half for number in range(12)]
    assert int(rows["set"][1]) == halves.count("set") > 0
    assert rows["judge"][2:5] == [str(halves.count("judge")), "100.0%", "0"]
