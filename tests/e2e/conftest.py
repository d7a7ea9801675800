"""What several files of this folder start from."""

import importlib

import pytest

from tests.support.heap import hide

ENGINE = ("megatron_rl.rollout.vllm_engine", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")


@pytest.fixture(scope="session")
def cheap_engines() -> None:
    """For files that start engines in the worker itself."""
    for name in ENGINE:
        importlib.import_module(name)
    hide()
