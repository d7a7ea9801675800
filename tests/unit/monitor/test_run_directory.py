"""A run's directory: metrics survive failures and resumes, names are its own, its environment."""

import json
import math
import os

import numpy as np
import pytest

from megatron_rl.errors import InputError
from megatron_rl.monitor import RunDirectory, read_metrics, write_environment
from megatron_rl.monitor.run_directory import JsonlSink, code_of, encode_line, environment_variables


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


def test_run_directory_names(tmp_path):
    run = RunDirectory(tmp_path / "a" / "run").create()
    assert sorted(p.name for p in run.root.iterdir()) == ["batches", "checkpoints", "plots", "tensorboard"]
    assert (run.metrics.name, run.recipe.name, run.log.name) == ("metrics.jsonl", "recipe.resolved.yaml", "log.txt")


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
    environ |= {"SLURM_JWT": "x", "VLLM_S3_SECRET": "x", "NCCL_HOSTID": "a", "VLLM_PROXY": "http://me:x@proxy:1"}
    environ |= {"FLASHINFER_CUBIN_DIR": "/c", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "MY_NCCL_ALGO": "x"}
    environ["SLURM_SUBMIT_DIR"] = "ftp://me:x@host/folder"
    kept = {"NCCL_DEBUG": "INFO", "SLURM_SUBMIT_DIR": "ftp://host/folder", "WORLD_SIZE": "2", "NCCL_HOSTID": "a"}
    kept |= {"VLLM_PROXY": "http://proxy:1", "FLASHINFER_CUBIN_DIR": "/c", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    assert environment_variables(environ) == kept


def test_a_run_has_the_code_of_all_its_starts():
    a, b = ({"commit": letter * 40, "changed": changed} for letter, changed in (("a", []), ("b", ["a.py"])))
    assert code_of({"git": a}) == "a" * 40
    assert code_of({"git": a, "resumed": [{"git": a}]}) == "a" * 40
    both = "a" * 40 + ", continued by " + "b" * 40 + "+changes"
    assert code_of({"git": a, "resumed": [{"git": b}, {"git": b}]}) == both
    assert code_of({"git": a, "resumed": [{"git": None}]}) == "a" * 40 + ", continued by unknown"
    assert code_of({"git": None, "resumed": [{"git": b}]}) is None
