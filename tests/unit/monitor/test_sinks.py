"""Weights & Biases, MLflow and SwanLab get what metrics.jsonl gets, through their real clients; none can end a run."""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import sys
import threading
import time
import warnings
from unittest.mock import MagicMock

import pytest

from megatron_rl.config.monitor import MonitorConfig, SinksConfig
from megatron_rl.errors import OwnWarning
from megatron_rl.monitor import Monitor, read_metrics, sinks
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.monitor.sinks import ServiceSink, TensorBoardSink, missing_clients
from tests.support.sinks import run

RECORD = "from tests.support.sinks.record import main; main()"
READ = {
    "wandb": """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
from tests.support.sinks import records
starts = []
for file in sorted(Path(sys.argv[1]).glob("run/wandb/offline-run-*/*.wandb")):
    start = {"steps": {}}
    for data in records(file):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "run":
            start["id"], start["name"] = record.run.run_id, record.run.display_name
            start["keys"] = [record.run.project, record.run.run_group, record.run.entity, *record.run.tags]
            start["recipe"] = {i.key: json.loads(i.value_json) for i in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            items = {i.key or i.nested_key[0]: float(json.loads(i.value_json)) for i in record.history.item}
            step = int(items.pop("_step"))
            start.setdefault("seconds", []).append(items["_timestamp"])
            start["steps"][step] = {k: v for k, v in items.items() if k[0] != "_"}
    starts.append(start)
print(json.dumps(starts))
""",
    "swanlab": """
import json, sys
from pathlib import Path
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from tests.support.sinks import records
starts = []
for file in sorted(Path(sys.argv[1]).glob("run/swanlab/run-*/*.swanlab")):
    start = {"steps": {}, "id": file.stem}
    for data in records(file):
        record = Record.FromString(data)
        if record.HasField("start"):
            start["name"] = record.start.name
            start["keys"] = [record.start.project, *record.start.tags]
        if record.HasField("scalar"):
            start["steps"].setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
    starts.append(start)
print(json.dumps(starts))
""",
    "mlflow": """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/run/mlflow.db")
experiment = client.get_experiment_by_name("megatron_rl")
runs = client.search_runs([experiment.experiment_id])
steps, seconds = {}, []
for name in runs[0].data.metrics:
    for metric in client.get_metric_history(runs[0].info.run_id, name):
        steps.setdefault(metric.step, {}).setdefault(name.replace("_at_", "@"), []).append(metric.value)
        seconds.append(metric.timestamp / 1000)
print(json.dumps([{"seconds": seconds, "runs": len(runs), "name": runs[0].info.run_name, "status": runs[0].info.status,
                   "recipe": runs[0].data.params, "steps": steps}]))
""",
}


def recorded(folder) -> dict[int, dict[str, float]]:
    return {
        int(record["step"]): {k: float(v) for k, v in record.items() if k not in ("step", "time")}
        for record in read_metrics(folder / "run")
    }


def same(written: dict, wanted: dict) -> bool:
    return json.dumps(written, sort_keys=True) == json.dumps(wanted, sort_keys=True)  # NaN equals NaN


@pytest.mark.parametrize("service", ["wandb", "swanlab"])
def test_offline_files_hold_the_numbers_of_metrics_jsonl_and_a_resumed_run_goes_on_with_its_id(service, tmp_path):
    began = time.time()
    run(service, RECORD, str(tmp_path), service, "0", "5")
    first = recorded(tmp_path)
    time.sleep(1.1)  # the clients name a start's folder by the second
    run(service, RECORD, str(tmp_path), service, "3", "6")
    starts = json.loads(run(service, READ[service], str(tmp_path)))
    assert [sorted(map(int, start["steps"])) for start in starts] == [[0, 1, 2, 3, 4], [3, 4, 5]]
    assert same({int(k): v for k, v in starts[0]["steps"].items()}, first)
    last = {step: metrics for step, metrics in recorded(tmp_path).items() if step >= 3}
    assert same({int(k): v for k, v in starts[1]["steps"].items()}, last)
    assert starts[0]["id"] == starts[1]["id"]
    assert all(start["name"] == "run" for start in starts)
    assert all(start["keys"] == {"wandb": ["p", "g", "e", "a"], "swanlab": ["p", "a"]}[service] for start in starts)
    if service == "wandb":
        assert all(began <= t <= time.time() for start in starts for t in start["seconds"])
        assert starts[0]["recipe"]["learner"] == {"optimizer": {"lr": 1e-6}}


def test_mlflow_holds_the_numbers_of_metrics_jsonl_in_one_run_over_both_starts(tmp_path):
    began = int(time.time())  # MLflow counts milliseconds
    run("mlflow", RECORD, str(tmp_path), "mlflow", "0", "5")
    first = recorded(tmp_path)
    run("mlflow", RECORD, str(tmp_path), "mlflow", "3", "6")
    (logged,) = json.loads(run("mlflow", READ["mlflow"], str(tmp_path)))
    assert (logged["runs"], logged["name"], logged["status"]) == (1, "run", "FINISHED")
    assert all(began <= t <= time.time() for t in logged["seconds"])
    assert logged["recipe"] == {"name": "unit", "learner.optimizer.lr": "1e-06"}
    steps = {int(step): metrics for step, metrics in logged["steps"].items()}
    last = recorded(tmp_path)
    for step, metrics in steps.items():
        wanted = [source[step] for source in ([first, last] if step in (3, 4) else [last])]
        for name, values in metrics.items():
            expected = [record[name] for record in wanted if name in record]
            if expected[0] == math.inf:  # MLflow's database has the largest double for it
                expected = [1.7976931348623157e308] * len(expected)
            assert same(sorted(values), sorted(expected)), (step, name)
        assert set(metrics) == {name for record in wanted for name in record}
    assert set(steps) == set(last)


@pytest.mark.parametrize("service", ["wandb", "swanlab"])
def test_every_key_of_a_sink_reaches_its_client(service, tmp_path, monkeypatch):
    keys = {"project": "p", "name": "n", "tags": ["t"], "mode": "offline"}
    keys |= {"entity": "e", "group": "g"} if service == "wandb" else {"workspace": "w"}
    client = MagicMock()
    monkeypatch.setitem(sys.modules, service, client)
    config = SinksConfig.model_validate({service: keys})
    sinks.service_sinks(config, RunDirectory(tmp_path).create())[service]._client.begin({}, False)
    given = client.init.call_args.kwargs
    assert {key: given[key] for key in type(getattr(config, service)).model_fields} == keys


def test_every_key_of_mlflow_reaches_its_client(tmp_path, monkeypatch):
    client = MagicMock()
    client.MlflowClient().create_run().info.run_id = "id"
    monkeypatch.setitem(sys.modules, "mlflow", client)
    monkeypatch.setitem(sys.modules, "mlflow.entities", MagicMock())
    config = SinksConfig.model_validate({"mlflow": {"experiment": "e", "name": "n", "tracking_uri": "http://here"}})
    sinks.service_sinks(config, RunDirectory(tmp_path).create())["mlflow"]._client.begin({}, False)
    assert client.MlflowClient.call_args.kwargs == {"tracking_uri": "http://here"}
    assert client.MlflowClient().get_experiment_by_name.call_args.args == ("e",)
    assert client.MlflowClient().create_run.call_args.kwargs == {"run_name": "n"}


def test_a_service_that_is_away_costs_no_step_and_is_said_once(tmp_path):
    code = """
import sys, warnings
from pathlib import Path
from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.monitor import Monitor
uri = "http://127.0.0.1:9"  # nothing listens at the port of `discard`
config = MonitorConfig(terminal="off", plots=False, tensorboard=False, sinks={"mlflow": {"tracking_uri": uri}})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Monitor(Path(sys.argv[1]), config, {}, True) as monitor:
        for step in range(3):
            monitor.record(step, {"x": 1.0})
print([str(w.message) for w in caught if "monitor: mlflow failed" in str(w.message)])
"""
    said = run("mlflow", code, str(tmp_path))
    assert said.count("training goes on without it") == 1
    assert len(read_metrics(tmp_path)) == 3


class Slow:
    """A service whose calls return when the test says so."""

    def __init__(self) -> None:
        self.answers, self.steps, self.ended = threading.Event(), [], False

    def begin(self, recipe, resumes):
        self.resumes = resumes

    def log(self, step, metrics, seconds):
        self.answers.wait()
        self.steps.append(step)
        if step == 1:
            raise ConnectionError("no route to host")

    def end(self):
        self.ended = True


def test_steps_wait_for_a_slow_service_in_memory_and_close_sends_them(tmp_path):
    service = Slow()
    sink = ServiceSink(service, tmp_path / "absent.yaml")
    sink.resume_at(0)
    for step in range(4):
        sink.write(step, {"x": 1.0})  # returns although the service does not
    assert service.steps == []
    service.answers.set()
    with pytest.raises(sinks.SinkError, match="ConnectionError: no route to host"):
        sink.close()
    assert (service.steps, service.ended, service.resumes) == ([0, 1, 2, 3], True, False)


def test_the_end_of_a_run_waits_for_a_service_no_longer_than_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "CLOSING_SECONDS", 0.0)
    service = Slow()
    sink = ServiceSink(service, tmp_path / "absent.yaml")
    sink.write(0, {"x": 1.0})
    with pytest.raises(sinks.SinkError, match=r"metrics\.jsonl has all of them"):
        sink.close()
    service.answers.set()


def test_a_run_without_sinks_starts_no_thread(tmp_path):
    before = set(threading.enumerate())  # threads of other tests may end meanwhile
    with Monitor(tmp_path, MonitorConfig(terminal="off", plots=False), {}, True) as monitor:
        monitor.record(0, {"x": 1.0})
        assert set(threading.enumerate()) <= before


def test_a_client_that_is_not_installed_is_named_before_anything_starts(monkeypatch):
    wanted = SinksConfig(wandb={}, swanlab={})
    assert missing_clients(SinksConfig()) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    (problem,) = missing_clients(wanted)
    assert problem.startswith("monitor.sinks.wandb: the package wandb is not installed; `pip install wandb`")


def test_a_failing_service_becomes_one_warning(tmp_path):
    monitor = Monitor(tmp_path, MonitorConfig(terminal="off", plots=False, tensorboard=False), {}, True)
    service = Slow()
    service.answers.set()
    monitor._sinks["wandb"] = ServiceSink(service, RunDirectory(tmp_path).recipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            monitor.record(step, {"x": 1.0})
        monitor.close()
    (warning,) = caught
    assert warning.category is OwnWarning
    assert str(warning.message).startswith("monitor: wandb failed (ConnectionError: no route to host)")


@pytest.mark.parametrize(("folder", "times"), [("wandb/offline-run-1", 1), ("wandb/run-1", 0), ("", 0)])
def test_how_to_send_what_was_kept_offline_is_said_at_the_end(folder, times, tmp_path, monkeypatch):
    """A client that failed at its start has left no folder to send."""
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)

    class Sink:
        def write(self, step, metrics) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr("megatron_rl.monitor.monitor.service_sinks", lambda *_: {"wandb": Sink()})
    sinks = SinksConfig(wandb={"mode": "offline"})
    config = MonitorConfig(terminal="off", plots=False, tensorboard=False, sinks=sinks)
    Monitor(tmp_path, config, {}, True).close()
    log = tmp_path / "log.txt"
    said = f"`wandb sync {tmp_path}/wandb/offline-run-*` sends the curves"
    assert (log.read_text() if log.is_file() else "").count(said) == times


def test_a_broken_sink_is_said_although_a_thread_hides_warnings(tmp_path, capsys):
    """`warnings.catch_warnings` of any thread hides the warnings of all."""
    config = MonitorConfig(terminal="plain", plots=False, tensorboard=False)
    monitor = Monitor(tmp_path, config, {}, True)
    service = Slow()
    service.answers.set()
    monitor._sinks["wandb"] = ServiceSink(service, RunDirectory(tmp_path).recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            monitor.record(step, {"x": 1.0})
        monitor.close()
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert text.count("monitor: wandb failed (ConnectionError: no route to host)") == 1


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
