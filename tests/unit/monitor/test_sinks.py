"""Weights & Biases gets what metrics.jsonl gets, through its real client, and cannot end a run."""

import importlib.util
import json
import resource
import sys
import threading
import time
import warnings
from unittest.mock import MagicMock

import pytest

from megatron_rl.config.monitor import MonitorConfig, SinksConfig, WandbSinkConfig
from megatron_rl.monitor import Monitor, read_metrics, sinks
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.monitor.sinks import TensorBoardSink, WandbSink, missing_clients
from tests.support.sinks import run

RECORD = "from tests.support.sinks.record import main; main()"
READ = """
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
            start["keys"] = [record.run.project, record.run.run_group, record.run.entity]
            start["recipe"] = {i.key: json.loads(i.value_json) for i in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            items = {i.key or i.nested_key[0]: float(json.loads(i.value_json)) for i in record.history.item}
            step = int(items.pop("_step"))
            start.setdefault("seconds", []).append(items["_timestamp"])
            start["steps"][step] = {k: v for k, v in items.items() if k[0] != "_"}
    starts.append(start)
print(json.dumps(starts))
"""


def recorded(folder) -> dict[int, dict[str, float]]:
    return {
        int(record["step"]): {k: float(v) for k, v in record.items() if k not in ("step", "time")}
        for record in read_metrics(folder / "run")
    }


def same(written: dict, wanted: dict) -> bool:
    return json.dumps(written, sort_keys=True) == json.dumps(wanted, sort_keys=True)  # NaN equals NaN


def test_offline_files_hold_the_numbers_of_metrics_jsonl_and_a_resumed_run_goes_on_with_its_id(tmp_path):
    began = time.time()
    run(RECORD, str(tmp_path), "0", "5")
    first = recorded(tmp_path)
    time.sleep(1.1)  # the client names a start's folder by the second
    run(RECORD, str(tmp_path), "3", "6")
    starts = json.loads(run(READ, str(tmp_path)))
    assert [sorted(map(int, start["steps"])) for start in starts] == [[0, 1, 2, 3, 4], [3, 4, 5]]
    assert same({int(k): v for k, v in starts[0]["steps"].items()}, first)
    last = {step: metrics for step, metrics in recorded(tmp_path).items() if step >= 3}
    assert same({int(k): v for k, v in starts[1]["steps"].items()}, last)
    assert starts[0]["id"] == starts[1]["id"]
    for start in starts:
        assert (start["name"], start["keys"]) == ("run", ["p", "g", "e"])
        assert all(began <= t <= time.time() for t in start["seconds"])
        assert start["recipe"]["learner"] == {"optimizer": {"lr": 1e-6}}


def test_every_key_of_a_sink_reaches_its_client(tmp_path, monkeypatch):
    keys = {"project": "p", "entity": "e", "group": "g", "mode": "offline"}
    client = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", client)
    config = SinksConfig.model_validate({"wandb": keys})
    WandbSink(config.wandb, RunDirectory(tmp_path).create())._open()
    given = client.init.call_args.kwargs
    assert {key: given[key] for key in type(config.wandb).model_fields} == keys


class Slow:
    """A service whose calls return when the test says so."""

    def __init__(self) -> None:
        self.answers, self.steps, self.ended = threading.Event(), [], False

    def log(self, metrics, step):
        self.answers.wait()
        self.steps.append(step)
        if step == 1:
            raise ConnectionError("no route to host")

    def finish(self):
        self.ended = True


def sink_of(service: Slow, folder) -> WandbSink:
    sink = WandbSink(WandbSinkConfig(), RunDirectory(folder))
    sink._open = lambda: service
    return sink


def test_steps_wait_for_a_slow_service_in_memory_and_close_sends_them(tmp_path):
    service = Slow()
    sink = sink_of(service, tmp_path)
    for step in range(4):
        sink.write(step, {"x": 1.0})  # returns although the service does not
    assert service.steps == []
    service.answers.set()
    with pytest.raises(sinks.SinkError, match="ConnectionError: no route to host"):
        sink.close()
    assert (service.steps, service.ended) == ([0, 1, 2, 3], True)


def test_the_end_of_a_run_waits_for_a_service_no_longer_than_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "CLOSING_SECONDS", 0.0)
    service = Slow()
    sink = sink_of(service, tmp_path)
    sink.write(0, {"x": 1.0})
    with pytest.raises(sinks.SinkError, match=r"metrics\.jsonl has all of them"):
        sink.close()
    service.answers.set()


def test_a_client_that_is_not_installed_is_named_before_anything_starts(monkeypatch):
    wanted = SinksConfig(wandb={})
    assert missing_clients(SinksConfig()) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    (problem,) = missing_clients(wanted)
    assert problem.startswith("monitor.sinks.wandb: the package wandb is not installed; `pip install wandb`")


@pytest.mark.parametrize(("folder", "times"), [("wandb/offline-run-1", 1), ("wandb/run-1", 0), ("", 0)])
def test_how_to_send_what_was_kept_offline_is_said_at_the_end(folder, times, tmp_path, monkeypatch):
    """A client that failed at its start has left no folder to send."""
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)

    class Sink:
        def write(self, step, metrics) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr("megatron_rl.monitor.monitor.WandbSink", lambda *_: Sink())
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
    monitor._sinks["wandb"] = sink_of(service, tmp_path)
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
