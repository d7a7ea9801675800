"""The decay style length-decay for users of Megatron's own scripts equals ours, step by step.

The patch also changes megatron/training and megatron/rl, which no wheel holds: that part is checked where MEGATRON_LM
names a checkout of the pinned tag.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import megatron.core.optimizer_param_scheduler as installed
import numpy as np
import pytest

from megatron_rl.config.learner import OptimizerConfig
from megatron_rl.config.schedule import ScheduleConfig
from megatron_rl.learner.scheduler import build_scheduler
from megatron_rl.schedule import synthetic
from tests.support.patience import PATIENCE_S
from tests.support.series import megatron_core

PATCH = Path(__file__).parents[2] / "patches" / "megatron-lm" / "lr-decay-style-length-decay.patch"
TOOL = PATCH.parents[2] / "tools" / "patches.py"
STEPS, BATCH_SIZE = 600, 64
LENGTHS = synthetic.paper_curve(110, 3500.0, num_steps=STEPS)(np.random.default_rng(11), 0.1)


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def patched(tmp_path, monkeypatch) -> SimpleNamespace:
    """The patched scheduler module and the new one, built from the installed package's file."""
    if megatron_core().name != "megatron-core-0.16":
        pytest.skip("the series megatron-lm is for checkouts of core_v0.16.1")
    name = "megatron/core/optimizer_param_scheduler.py"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(Path(installed.__file__).read_bytes())
    subprocess.run(["git", "apply", "--include=megatron/core/*", str(PATCH)], cwd=tmp_path, check=True)
    # The patched file imports the new one by its final name; restored afterwards with everything else here.
    monkeypatch.setitem(sys.modules, "megatron.core.length_decay", None)
    monkeypatch.setitem(sys.modules, "patched_scheduler", None)
    decay = load("megatron.core.length_decay", tmp_path / "megatron/core/length_decay.py")
    return SimpleNamespace(decay=decay, scheduler=load("patched_scheduler", tmp_path / name))


def groups() -> list[dict]:
    return [{"wd_mult": 1.0}, {"max_lr": 4e-6, "min_lr": 1e-6, "wd_mult": 0.0}]


def build_theirs(patched: SimpleNamespace, warmup: int, **keys):
    return patched.scheduler.OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups()),
        init_lr=0.0 if warmup else 1e-6,
        max_lr=1e-6,
        min_lr=1e-7,
        lr_warmup_steps=warmup * BATCH_SIZE,
        lr_decay_steps=STEPS * BATCH_SIZE,
        lr_decay_style="length-decay",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=STEPS * BATCH_SIZE,
        wd_incr_style="constant",
        length_decay_config=patched.decay.LengthDecayConfig(num_steps_per_update=BATCH_SIZE, **keys),
    )


@pytest.mark.parametrize("warmup", [0, 30])
@pytest.mark.parametrize(
    "keys", [{"mode": "manual", "decay_period": 100}, {"mode": "auto"}, {"mode": "shadow"}], ids=lambda k: k["mode"]
)
def test_equals_ours_step_by_step_and_across_a_resume(patched, keys, warmup):
    config = ScheduleConfig(style="length-decay", warmup_steps=warmup, **keys)
    optimizer = SimpleNamespace(param_groups=groups())
    ours = build_scheduler(config, OptimizerConfig(lr=1e-6, weight_decay=0.1), optimizer, STEPS)
    theirs, rates = build_theirs(patched, warmup, **keys), set()
    for step in range(STEPS):
        surge = ours.observe_length(ours.num_steps, LENGTHS[step])
        assert theirs.observe_length(LENGTHS[step]) == surge
        assert theirs.optimizer.param_groups == optimizer.param_groups
        rates.add(optimizer.param_groups[0]["lr"])
        if step % 7:  # the others overflow: neither scheduler moves
            ours.step(1)
            theirs.step(BATCH_SIZE)
        if step in (50, 111, 113, 300):
            state = json.loads(json.dumps(theirs.state_dict()))
            theirs = build_theirs(patched, warmup, **keys)
            theirs.load_state_dict(state)
    assert (2.5e-7 in rates) == (keys["mode"] != "shadow")


@pytest.mark.parametrize("style", ["constant", "cosine"])
def test_other_styles_are_untouched(patched, style):
    arguments = (0.0, 1e-6, 1e-7, 10, 100, style, 0.0, 0.1, 100, "linear")
    before = installed.OptimizerParamScheduler(SimpleNamespace(param_groups=groups()), *arguments)
    after = patched.scheduler.OptimizerParamScheduler(SimpleNamespace(param_groups=groups()), *arguments)
    for _ in range(120):
        assert after.optimizer.param_groups == before.optimizer.param_groups
        assert after.state_dict() == before.state_dict()
        assert after.observe_length(1000.0) is None
        before.step(1)
        after.step(1)


def test_bad_settings_are_refused(patched):
    config = patched.decay.LengthDecayConfig
    for keys in ({"mode": "manual"}, {"mode": "auto", "decay_period": 5}, {"mode": "stairs"}, {"surge_ratio": 1.0}):
        with pytest.raises(ValueError, match="length-decay"):
            config(**{"decay_period": 5 if "surge_ratio" in keys else None, **keys})


def patches(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=PATIENCE_S)


def test_the_series_is_used_only_when_named():
    assert "megatron-lm" not in patches("status").stdout
    done = patches("status", "megatron-lm")
    assert done.returncode == 2
    assert "name yours with --tree" in done.stderr
    done = patches("check", "megatron-lm")
    assert done.returncode == 0
    assert done.stdout.startswith("megatron-lm: skipped, read only (1 patches, 5 files)")


if tree := os.environ.get("MEGATRON_LM"):  # a checkout of Megatron-LM at core_v0.16.1, which no package holds

    def test_whole_series_fits_a_checkout():
        done = patches("check", "--tree", tree, "megatron-lm")
        assert done.stdout == f"megatron-lm: 1 patches, 5 files: apply to {Path(tree).resolve()} and revert exactly\n"
