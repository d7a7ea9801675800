"""vLLM that crashes, samples from NaN or hangs in the middle of a run, and how the run goes on."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_rl.__main__ import main
from megatron_rl.rollout.vllm_engine import VllmGenerator
from tests.support.tiny import REPOSITORY
from tests.support.written_run import without_times

pytestmark = pytest.mark.usefixtures("cheap_engines")

GRPO = str(REPOSITORY / "recipes" / "tiny" / "grpo.yaml")


class Faulty:
    """Breaks the engine at a call of `VllmGenerator.rollout`, and keeps the engine for the next run of the process."""

    def __init__(self, monkeypatch) -> None:
        self.breaks: dict[int, object] = {}
        self.calls, self.engines = 0, []
        own = VllmGenerator.rollout

        def rollout(generator, *arguments, **keywords):
            self.calls += 1
            if self.calls in self.breaks:
                self.breaks[self.calls](generator)
            return own(generator, *arguments, **keywords)

        monkeypatch.setattr(VllmGenerator, "rollout", rollout)


def crash(generator: VllmGenerator) -> None:
    def step():
        raise RuntimeError("worker process died")

    generator._llm.llm_engine.step = step


def nan(generator: VllmGenerator) -> None:
    """NaN in the weights of the last norm: NaN in every logit."""

    def spoil(model):
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))

    generator._llm.apply_model(spoil)


def rows(run: Path) -> list[dict]:
    return without_times([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    faulty = Faulty(monkeypatch)

    def train(name: str, breaks: dict | None = None) -> tuple[int, str]:
        faulty.calls, faulty.breaks = 0, breaks or {}
        settings = [f"name={name}", f"run_root={tmp_path}", "num_steps=3", "batch.prompts=2", "validation.every=0"]
        settings += ["rollout={num_samples: 4, kv_cache_gib: 0.0625, verify_refit: false}", "checkpoint.every=0"]
        settings += ["monitor={plots: false, tensorboard: false}", "runtime.device=cpu"]
        status = main(["train", GRPO, *(part for setting in settings for part in ("--set", setting))])
        return status, capfd.readouterr().err.strip()

    train.root = tmp_path
    return train


def test_an_engine_that_breaks_costs_no_step(train):
    """Crash in step 1, NaN in step 2, then to the end; the same lines as a run that nothing happened to."""
    status, said = train("broken", {2: crash})
    assert status == 1
    assert said.splitlines()[-1].startswith("run failed: rank 0: vLLM failed on prompts train:")
    assert said.endswith("RuntimeError: worker process died")
    run = train.root / "broken"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000001"]
    status, said = train("broken", {2: nan})
    assert status == 1
    assert "is impossible" in said.splitlines()[-1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000001", "step_00000002"]
    assert train("broken")[0] == 0
    assert train("smooth")[0] == 0
    assert rows(run) == rows(train.root / "smooth")


def test_an_engine_that_hangs_is_ended(tmp_path):
    """In a child of this process, because the watchdog ends the process."""
    from tests.e2e.test_vllm_engine import engine, prompts

    with engine(deadline_s=1.0, verify_refit=False, record_routes=False) as generator:
        log = tmp_path / "log"
        pid = os.fork()
        if pid == 0:
            sys.stderr = log.open("w")
            generator._llm.llm_engine.step = lambda: time.sleep(600)
            generator.rollout(prompts(1), 1, policy_version=0, step=0)
            os._exit(77)
        deadline = time.monotonic() + 60
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.1)
        else:
            if time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
        text = log.read_text()
    assert "run failed: the rollout engine (rollout.deadline_s) did not return within 3.25 s" in text
    assert "most recent call first" in text
