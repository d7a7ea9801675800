"""A short run with routes and stored batches, and the tools on it, in processes of their own (test_flight_tools.py)."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.__main__ import main
from megatron_rl.train import train
from tests.support.tiny import tiny_recipe


def record_run(folder: str, model: str) -> str:
    """Three steps in bf16 with two updates each, a checkpoint after every one, all batches; returns the run directory.

    Routes are recorded and not replayed, so that both what the run did and what replay would have done can be had.
    """
    recipe = tiny_recipe(
        name="recorded",
        run_root=folder,
        num_steps=3,
        model={"path": model},
        batch={"prompts": 8, "minibatches": 2},
        rollout={"dtype": "bf16", "kv_cache_gib": 0.0625},
        # An untrained model earns nothing; length alone makes the difference that learning needs.
        reward={"name": "modsum", "overlong": {"buffer": 20}},
        # So small that what the first update of a step changes is little beside what the routers' rounding does.
        learner={"dtype": "bf16", "optimizer": {"lr": 2e-5}},
        routing={"telemetry": True},
        checkpoint={"every": 1, "keep_last": 0},
        recorder={"record_batches": "all"},
        monitor={"terminal": "off", "tensorboard": False},
    )
    dist.destroy_process_group()  # the run joins by itself and leaves at its end
    train(recipe)
    return str(Path(folder) / "recorded")


def use_tools(run: str) -> dict[str, Any]:
    """What each call of a tool printed, returned, and wrote as JSON."""
    results = {
        "again": _call("replay", run, "--step", "1"),
        "r3": _call("replay", run, "--step", "1", "--set", "routing.replay=r3"),
        "fp32": _call("replay", run, "--step", "1", "--set", "learner.dtype=fp32", "--set", "routing.replay=r3"),
        "attribution": _call("attribute", run, "--step", "1"),
        "gradient bias": _call("gradient-bias", run, "--step", "1"),
    }
    shutil.rmtree(Path(run) / "checkpoints" / "step_00000002")
    results["repeated"] = _call("replay", run, "--step", "2")
    for file in (Path(run) / "batches").glob("step_00000001.*"):
        file.unlink()
    results["impossible"] = _call("replay", run, "--step", "2")
    results["nearest"] = _call("replay", run, "--step", "2", "--weights", "nearest")
    results["absent"] = _call("replay", run, "--step", "1")
    return results


def _call(command: str, run: str, *arguments: str) -> dict[str, Any]:
    out, errors, told = io.StringIO(), io.StringIO(), Path(run) / "told.json"
    told.unlink(missing_ok=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main([command, run, *arguments, "--json", str(told)])
    numbers = json.loads(told.read_text()) if told.exists() else None
    return {"status": status, "out": out.getvalue(), "errors": errors.getvalue(), "json": numbers}
