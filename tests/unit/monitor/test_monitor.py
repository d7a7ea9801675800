"""The monitor's record: files that survive failures and continue across a resume, and times that add up."""

from __future__ import annotations

import json
import math
import os
import resource
import warnings
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.errors import Fault, InputError, OwnWarning
from megatron_rl.monitor import Monitor, PhaseTimer, RunDirectory, read_metrics, write_environment
from megatron_rl.monitor.environment import code_of, environment_variables
from megatron_rl.monitor.run_directory import JsonlSink, encode_line
from megatron_rl.monitor.samples import repetition_fraction, rollout_metrics
from megatron_rl.monitor.sinks import TensorBoardSink
from megatron_rl.monitor.terminal import TerminalSink, format_duration, sparkline
from megatron_rl.types import Group, Prompt, Rollout
from tests.support.rounding import rounded

SUMMARY = {"name": "unit", "num_steps": 30}
QUIET = {"terminal": "off", "plots": False, "tensorboard": False}


def monitor(folder, is_main=True, **keys) -> Monitor:
    return Monitor(folder, MonitorConfig(**{**QUIET, **keys}), SUMMARY, is_main)


def group(rewards: list[float], responses: list[list[int]], reason: str = "stop") -> Group:
    rollouts = [
        Rollout(
            prompt_id="p:0",
            sample=i,
            tokens=tokens,
            inference_logprobs=np.zeros(len(tokens), np.float32),
            finish_reason=reason,
            policy_versions=np.zeros(len(tokens), np.int32),
            text="text",
            reward=reward,
            raw_reward=reward,
        )
        for i, (reward, tokens) in enumerate(zip(rewards, responses, strict=True))
    ]
    return Group(Prompt(id="p:0", tokens=[1], answer="1"), rollouts)


def without_clocks(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "time" and not key.startswith("perf/")}


# -- metrics.jsonl


def test_lines_are_strict_json_and_read_back_exactly(tmp_path):
    metrics = {"a": 0.1, "b": math.nan, "c": math.inf, "d": -math.inf, "e": np.float32(0.25), "f": 3}
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(4, metrics)

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    assert record.pop("step") == 4
    record.pop("time")
    assert math.isnan(record.pop("b"))
    assert record == {"a": 0.1, "c": math.inf, "d": -math.inf, "e": 0.25, "f": 3}


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(10):
        sink.write(step, {"loss": float(step)})
    kept = path.read_text().splitlines()[:6]
    with path.open("a") as file:
        file.write('{"step": 10, "lo')
    assert [record["step"] for record in read_metrics(path)] == list(range(10))
    JsonlSink(path).resume_at(6)
    assert path.read_text().splitlines() == kept
    sink.write(6, {"loss": 60.0})
    assert [record["loss"] for record in read_metrics(path)] == [0, 1, 2, 3, 4, 5, 60]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode_line(0, {}) + "{broken\n" + encode_line(2, {}))
    with pytest.raises(InputError, match="line 2: not valid JSON"):
        read_metrics(path)
    with pytest.raises(InputError, match="no such file"):
        read_metrics(tmp_path / "absent")


def test_partial_write_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(0, {"a": 1.0})
    whole, real_write = path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:7]))
    with pytest.raises(OSError, match="only 7 of"):
        sink.write(1, {"a": 1.0})
    assert path.read_bytes() == whole


def test_resumed_run_continues_the_file_identically(tmp_path):
    rng = np.random.default_rng(0)
    data = [{"actor/grad_norm": rng.uniform(), "mismatch/rho_std": 1e-3 * rng.uniform()} for _ in range(30)]
    alarm = {"name": "up", "metric": "mismatch/rho_std", "statistic": "slope", "window": 5, "above": 0, "for_steps": 2}
    keys = {"growth_window": 6, "alarms": [alarm]}
    whole = monitor(tmp_path / "whole", **keys)
    for step, metrics in enumerate(data):
        whole.record(step, metrics)
    first = monitor(tmp_path / "cut", **keys)
    for step in range(17):
        first.record(step, data[step])
        if step == 11:
            state = json.dumps(first.state_dict())
    second = monitor(tmp_path / "cut", **keys)
    second.load_state_dict(json.loads(state))
    second.resume_at(12)
    for step in range(12, 30):
        second.record(step, data[step])
    expected = [without_clocks(record) for record in read_metrics(tmp_path / "whole")]
    assert [without_clocks(record) for record in read_metrics(tmp_path / "cut")] == expected
    assert any("mismatch/growth" in record for record in expected)
    assert sum(record["alarm/up"] for record in expected) > 0


# -- sinks


def test_a_failing_sink_warns_once_and_training_goes_on(tmp_path, monkeypatch):
    m = monitor(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.warns(UserWarning, match=r"metrics.jsonl failed .*No space left.* training goes on"):
            m.record(0, {"a": 1.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            m.record(1, {"a": 2.0})
    m.record(2, {"a": 3.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2], (
        "what a full disk refused is written later"
    )


def test_event_files_are_real_and_purged_on_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = monitor(tmp_path, tensorboard=True)
    for step in range(6):
        first.record(step, {"actor/lr": 1.0 + step})
    first.close()
    second = monitor(tmp_path, tensorboard=True)
    second.resume_at(3)
    second.record(3, {"actor/lr": 30.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/lr")] == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 30.0)]


def test_tensorboard_goes_on_when_the_disk_has_room_again(tmp_path):
    """What a full disk refused is written later, once and in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink, (_, hard) = TensorBoardSink(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    sink.write(0, {"a": 0.0})
    (file,) = tmp_path.iterdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 7, hard))  # fails as a full disk does
    try:
        for step in (1, 2):
            with pytest.raises(OSError, match="only 7 of"):
                sink.write(step, {"a": float(step)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    sink.write(3, {"a": 3.0})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("a")
    assert [(event.step, event.value) for event in events] == [(step, float(step)) for step in range(4)]


def test_only_the_main_rank_writes(tmp_path):
    other = monitor(tmp_path / "run", is_main=False)
    with other.phase("generate"):
        pass
    other.log("nothing")
    assert other.record(0, {"a": 1.0}) == []
    other.close()
    assert not (tmp_path / "run").exists()


def test_alarms_are_shared_from_the_main_rank(tmp_path):
    rule = {"name": "low", "metric": "reward", "below": 0.5, "then": ["stop"]}
    board: list = []
    main = Monitor(tmp_path, MonitorConfig(**QUIET, alarms=[rule]), SUMMARY, True, share=lambda e: board.append(e) or e)
    other = Monitor(tmp_path, MonitorConfig(**QUIET, alarms=[rule]), SUMMARY, False, share=lambda _: board[-1])
    events = main.record(0, {"reward": 0.1})
    assert [event.name for event in events] == ["low"]
    assert other.record(0, {"reward": 0.9}) == events


def test_terminal_lines(tmp_path):
    screen = StringIO()
    sink = TerminalSink(tmp_path / "log.txt", "auto", 10, Console(file=screen, width=250, soft_wrap=True))
    assert not sink.is_live
    sink.write(0, {"critic/rewards/mean": 0.5, "actor/lr": 7e-5, "perf/time/step": 2.0, "perf/time/generate": 1.25})
    line = screen.getvalue().splitlines()[1]
    assert line.split() == ["0", "0.500", "7.00e-05", "2.00", "0:18", "generate", "1.25"]
    assert line.strip() in (tmp_path / "log.txt").read_text()


def test_live_status_line_shows_progress(tmp_path):
    screen = StringIO()
    console = Console(file=screen, width=200, force_terminal=True)
    sink = TerminalSink(tmp_path / "log.txt", "auto", 10, console)
    assert sink.is_live
    sink.write(2, {"critic/rewards/mean": 0.5, "perf/time/step": 60.0})
    sink.enter_phase("generate")
    sink.close()
    assert "3/10" in screen.getvalue()
    assert "eta 7:00" in screen.getvalue()
    assert "generate" in screen.getvalue()
    assert "generate" not in (tmp_path / "log.txt").read_text().splitlines()[1]


def test_formats():
    assert [format_duration(s) for s in (0, 61, 3600, 36061)] == ["0:00", "1:01", "1:00:00", "10:01:01"]
    assert sparkline([0.0, 0.5, math.nan, 1.0]) == "▁▅ █"
    assert sparkline([2.0, 2.0]) == "▁▁"


# -- times


def test_phase_times_and_overhead_add_up():
    now = [100.0]
    timer = PhaseTimer(clock=lambda: now[0])

    def work(name: str, seconds: float, tokens: int = 0) -> None:
        with timer.phase(name) as span:
            span.tokens = tokens
            now[0] += seconds

    work("generate", 4.0, tokens=200)
    work("reward", 1.0)
    with timer.phase("update"):
        work("old_logprobs", 1.0)
        work("pack", 0.5)
        with timer.phase("forward_backward"):
            work("optimizer", 1.0)  # inside an engine phase: part of it, not counted twice
            now[0] += 2.0
    now[0] += 0.5
    metrics = timer.collect()
    assert metrics["perf/time/step"] == 10.0
    assert metrics["perf/time/update"] == 4.5
    assert metrics["perf/time/forward_backward"] == 3.0
    assert metrics["perf/tokens_per_s/generate"] == 50.0
    assert metrics["perf/overhead_frac"] == rounded(0.2)  # 10 - 4 - 1 - 3
    assert metrics["perf/peak_mem_gib"] > 0
    now[0] += 1.0  # between the steps: logging
    work("generate", 3.0)
    assert timer.collect()["perf/overhead_frac"] == rounded(0.25)


def test_a_phase_that_raises_is_still_timed():
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])

    def fail() -> None:
        with timer.phase("generate"):
            now[0] += 2.0
            raise KeyError("lost")

    with pytest.raises(KeyError):
        fail()
    assert timer.current is None
    assert timer.collect()["perf/time/generate"] == 2.0


# -- what follows from the responses


def test_repetition_fraction():
    assert repetition_fraction(list(range(100)), 4) == 0.0
    assert repetition_fraction([1, 2, 3], 4) == 0.0
    loop = [1, 2, 3, 4, 5] * 20  # 97 four-grams, 5 of them different
    assert repetition_fraction(loop, 4) == rounded(92 / 97)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, 500).tolist()
    grams = [tuple(tokens[i : i + 5]) for i in range(496)]
    assert repetition_fraction(tokens, 5) == rounded(1 - len(set(grams)) / 496)


def test_rollout_metrics():
    groups = [group([1.0, 0.0], [[5] * 10, [1, 2]]), group([0.5, 0.5], [[1], [1, 2, 3]], reason="length")]
    metrics = rollout_metrics(groups, ngram=2)
    assert metrics["critic/rewards/mean"] == 0.5
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (4.0, 10.0)
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["groups/no_signal_frac"] == 0.5
    assert metrics["response/repetition_frac"] == rounded(8 / 9 / 4)
    assert metrics["response/repetitive_responses"] == 0.25
    assert rollout_metrics([], 2) == {}


def test_given_metrics_win_over_derived_ones(tmp_path):
    m = monitor(tmp_path)
    m.record(0, {"critic/rewards/mean": 0.125}, [group([1.0], [[1, 2]])])
    (record,) = read_metrics(tmp_path)
    assert record["critic/rewards/mean"] == 0.125
    assert record["response_length/mean"] == 2.0


# -- the surroundings


def test_environment_file_keeps_every_start_and_no_secret(tmp_path):
    path = tmp_path / "environment.json"
    first = write_environment(path, {"megatron-core": ["a.patch"]})
    write_environment(path)
    record = json.loads(path.read_text())
    assert record["versions"] == first["versions"]
    assert record["patches"] == {"megatron-core": ["a.patch"]}
    assert {"torch", "pydantic"} <= set(record["versions"])
    assert len(record["resumed"]) == 1
    assert record["hardware"]["cores"] >= 1
    environ = {"NCCL_DEBUG": "INFO", "VLLM_API_KEY": "x", "SLURM_JWT_TOKEN": "x", "HOME": "/", "WORLD_SIZE": "2"}
    environ |= {"SLURM_JWT": "x", "VLLM_S3_PWD": "x", "NCCL_WHATEVER": "x", "VLLM_PROXY": "http://me:x@proxy:1"}
    environ["SLURM_SUBMIT_DIR"] = "ftp://me:x@host/folder"
    kept = {"NCCL_DEBUG": "INFO", "SLURM_SUBMIT_DIR": "ftp://host/folder", "WORLD_SIZE": "2"}
    assert environment_variables(environ) == kept


@pytest.mark.parametrize("name", ["DONE", "LOCK", "STOP", "environment.json", "recipe.resolved.yaml"])
@pytest.mark.parametrize("kind", ["folder", "loop", "dangling"])
def test_what_has_the_name_of_a_runs_file_is_refused(tmp_path, name, kind):
    path = tmp_path / name
    path.mkdir() if kind == "folder" else path.symlink_to(path if kind == "loop" else tmp_path / "nothing")
    with pytest.raises(InputError, match=f"{name} is not the file that a run keeps there .*; move it away, or give"):
        RunDirectory(tmp_path).check()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_what_has_the_name_of_a_runs_folder_is_refused(tmp_path, name):
    RunDirectory(tmp_path).check()
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=f"{name} is not the folder that a run keeps there \\(a file\\)"):
        RunDirectory(tmp_path).check()


def test_steps_that_could_not_be_written_are_a_fault_and_stay_in_the_state(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    first = monitor(tmp_path)
    with pytest.warns(OwnWarning, match="metrics.jsonl failed"):
        first.record(0, {"a": 1.0})
    first.record(1, {"a": 2.0})
    with pytest.raises(Fault, match=r"metrics\.jsonl: 2 steps could not be written"):
        first.refuse_lost_steps()
    state = json.loads(json.dumps(first.state_dict()))
    (tmp_path / "metrics.jsonl").rmdir()
    second = monitor(tmp_path)
    second.load_state_dict(state | {"unwritten": [*state["unwritten"], encode_line(2, {"a": 3.0})]})
    second.resume_at(2)  # the third is recorded again
    second.refuse_lost_steps()
    assert [record["a"] for record in read_metrics(tmp_path)] == [1.0, 2.0]
    assert "unwritten" not in second.state_dict()


def test_a_run_has_the_code_of_all_its_starts():
    a, b = ({"commit": letter * 40, "changed": changed} for letter, changed in (("a", []), ("b", ["a.py"])))
    assert code_of({"git": a}) == "a" * 40
    assert code_of({"git": a, "resumed": [{"git": a}]}) == "a" * 40
    both = "a" * 40 + ", continued by " + "b" * 40 + "+changes"
    assert code_of({"git": a, "resumed": [{"git": b}, {"git": b}]}) == both
    assert code_of({"git": a, "resumed": [{"git": None}]}) == "a" * 40 + ", continued by unknown"
    assert code_of({"git": None, "resumed": [{"git": b}]}) is None


def test_run_directory_names(tmp_path):
    run = RunDirectory(tmp_path / "a" / "run").create()
    assert sorted(p.name for p in run.root.iterdir()) == ["batches", "checkpoints", "plots", "tensorboard"]
    assert (run.metrics.name, run.recipe.name, run.log.name) == ("metrics.jsonl", "recipe.resolved.yaml", "log.txt")
