"""The record of a run's environment: every start, the code of each, and no secret."""

from __future__ import annotations

import json

from megatron_rl.monitor import write_environment
from megatron_rl.monitor.run_directory import code_of, environment_variables


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
