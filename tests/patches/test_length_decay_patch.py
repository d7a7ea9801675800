"""The decay style length-decay for users of Megatron's own scripts equals ours, step by step.

The scheduler of every release is the one in its wheel. The patch of the command line changes megatron/training and
megatron/rl, which no wheel holds: it is checked where MEGATRON_LM names a checkout of a pinned release.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config.learner import OptimizerConfig, ScheduleConfig
from megatron_rl.learner.optimizer import LengthDecayScheduler, build_scheduler
from megatron_rl.patching import releases, upstream
from megatron_rl.patching.series import Series
from tests.support.patience import PATIENCE_S
from tools.dev import length_curves, release_tests

REPOSITORY = Path(__file__).parents[2]
NAME = "megatron/core/optimizer_param_scheduler.py"
RELEASES = {
    name: series
    for name in releases.names(REPOSITORY / "patches")
    if (series := Series.read(REPOSITORY / "patches" / name)).purposes and series.archives
}
STEPS, BATCH_SIZE = 600, 64
LENGTHS = length_curves.paper_curve(110, 3500.0, num_steps=STEPS)(np.random.default_rng(11), 0.1)


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=RELEASES)
def patched(request, tmp_path, monkeypatch) -> SimpleNamespace:
    """The scheduler of a release before and after the patch, and the new module, beside the installed package."""
    series = RELEASES[request.param]
    with zipfile.ZipFile(upstream.fetch(series, REPOSITORY / ".cache" / "patches", None)) as wheel:
        files = {"megatron/core/length_decay.py": None, NAME: wheel.read(NAME)}
    (patch,) = [patch for patch in series.patches if patch.name.startswith("length-decay-in-the-scheduler")]
    for side, content in (("before", files), ("after", patch.applied_to(files))):
        for name, text in content.items():
            if text is not None:
                (tmp_path / side / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / side / name).write_bytes(text)
    # The patched file imports the new one by its final name; restored afterwards with everything else here.
    for name in ("megatron.core.length_decay", "pristine_scheduler", "patched_scheduler"):
        monkeypatch.setitem(sys.modules, name, None)
    decay = load("megatron.core.length_decay", tmp_path / "after/megatron/core/length_decay.py")
    before = load("pristine_scheduler", tmp_path / "before" / NAME)
    return SimpleNamespace(decay=decay, scheduler=load("patched_scheduler", tmp_path / "after" / NAME), before=before)


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


@pytest.fixture
def base():
    """Give our class another base, as `base(class)`."""
    bases = LengthDecayScheduler.__bases__
    yield lambda new: setattr(LengthDecayScheduler, "__bases__", (new,))
    LengthDecayScheduler.__bases__ = bases


def test_our_own_schedule_is_the_same_over_a_patched_scheduler(patched, base):
    """In an environment to which the series was applied our class has the patched one as its base."""
    rates = {}
    for side, module in (("plain", patched.before), ("patched", patched.scheduler)):
        base(module.OptimizerParamScheduler)
        config = ScheduleConfig(style="length-decay", mode="auto", warmup_steps=30)
        ours = build_scheduler(config, OptimizerConfig(lr=1e-6), SimpleNamespace(param_groups=groups()), STEPS)
        rates[side] = []
        for step, length in enumerate(LENGTHS):
            ours.observe_length(ours.num_steps, length)
            ours.step(1)
            rates[side].append([group["lr"] for group in ours.optimizer.param_groups])
            if step in (20, 150, 300):
                state = json.loads(json.dumps(ours.state_dict()))
                ours = build_scheduler(config, OptimizerConfig(lr=1e-6), SimpleNamespace(param_groups=groups()), STEPS)
                ours.load_state_dict(state)
    assert rates["patched"] == rates["plain"]
    assert len({rate for rate, _ in rates["plain"]}) > 30  # the warm-up has 30


@pytest.mark.parametrize("style", ["constant", "cosine"])
def test_other_styles_are_untouched(patched, style):
    arguments = (0.0, 1e-6, 1e-7, 10, 100, style, 0.0, 0.1, 100, "linear")
    before = patched.before.OptimizerParamScheduler(SimpleNamespace(param_groups=groups()), *arguments)
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
    command = [sys.executable, "-m", "megatron_rl", "patch", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S)


def test_the_series_is_applied_only_when_named():
    told = patches("status").stdout.splitlines()
    assert told[0].endswith(": applied")
    assert "  schedule: not applied, but fits" in told


if tree := os.environ.get("MEGATRON_LM"):  # a checkout of Megatron-LM at a pinned release, which no package holds

    def test_whole_series_fits_a_checkout():
        done = patches("check", "--tree", tree, "--series", "schedule")
        assert re.fullmatch(
            rf"megatron-core-\S+: 2 patches, \d+ files: apply to {Path(tree).resolve()} and revert exactly\n",
            done.stdout,
        )

    LOOP_S = 600  # of 600 iterations on a loaded machine

    @pytest.mark.parametrize(("mode", "warmup"), [("auto", 0), ("auto", 30), ("shadow", 30)])
    def test_rates_of_megatrons_own_training_loop_are_ours(tmp_path, mode, warmup):
        """Of 0.16 or later: programs/training_loop.py says what is replaced on a CPU."""
        shutil.copytree(Path(tree) / "megatron", tmp_path / "tree" / "megatron")
        release_tests.add_triton(tmp_path / "tree")
        done = patches("apply", "--tree", str(tmp_path / "tree"), "--series", "schedule,cpu")
        assert done.returncode == 0, done.stderr
        (tmp_path / "lengths.json").write_text(json.dumps(list(LENGTHS)))
        program = Path(__file__).parent / "programs" / "training_loop.py"
        names = [tmp_path / "tree", tmp_path / "lengths.json", tmp_path / "found.json", warmup, mode]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, program, *names]
        done = subprocess.run(
            list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LOOP_S
        )
        assert done.returncode == 0, done.stderr[-4000:]
        printed = json.loads((tmp_path / "found.json").read_text())
        optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0} for _ in printed["rates"][0]])
        config = ScheduleConfig(style="length-decay", mode=mode, warmup_steps=warmup, min_lr=1e-4)
        ours = build_scheduler(config, OptimizerConfig(lr=1e-3, weight_decay=0.1), optimizer, STEPS)
        rates = []
        for length in LENGTHS:
            ours.observe_length(ours.num_steps, length)
            rates.append([group["lr"] for group in optimizer.param_groups])
            ours.step(1)
        assert printed["rates"] == rates
        assert len({rate for rate, *_ in rates}) > (1 + warmup if mode == "auto" else warmup)
