"""What docs/patches.md tells users of verl, slime and NeMo-RL to add gives this project's learning rates.

Their packages need GPUs. Each stub below makes the calls of the trainer in its order, on one of two data-parallel
ranks, and the code that runs in it is in `recipes/length_decay/trainers`. The scheduler is Megatron's, patched.
"""

import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.config.learner import ScheduleConfig
from megatron_rl.patching import states
from megatron_rl.patching.releases import find_target
from megatron_rl.schedule import LearningRateSchedule
from tests.support.series import megatron_core
from tests.support.tiny import REPOSITORY
from tools.dev import length_curves

DOCUMENT = (REPOSITORY / "docs" / "patches.md").read_text()
FILES = REPOSITORY / "recipes" / "length_decay" / "trainers"
NUM_BATCHES, BATCH_SIZE, WARMUP = 300, 8, 5
PEAK, FLOOR = 1e-6, 1e-7
MEANS = length_curves.paper_curve(60, 3500.0, num_steps=NUM_BATCHES)(np.random.default_rng(3), 0.1)
LENGTHS = [
    np.random.default_rng(step).integers(1, 2 * int(mean), BATCH_SIZE).tolist() for step, mean in enumerate(MEANS)
]


def code(name: str) -> str:
    """The text of a file for a trainer, of which docs/patches.md says where it belongs."""
    return (FILES / name).read_text()


def module(monkeypatch, name: str, text: str = "", **values) -> ModuleType:
    """A module of this name, also as an attribute of its package where there is one."""
    made = ModuleType(name)
    made.__dict__.update(values)
    monkeypatch.setitem(sys.modules, name, made)
    package, _, last = name.rpartition(".")
    if package in sys.modules:
        monkeypatch.setattr(sys.modules[package], last, made, raising=False)
    exec(compile(text, name, "exec"), made.__dict__)
    return made


@pytest.fixture
def scheduler_class(monkeypatch) -> type:
    """OptimizerParamScheduler of the installed release, patched, under its name."""
    import megatron.core.optimizer  # noqa: F401 -- takes other names from the module, before it is replaced

    series = megatron_core()
    pristine = states.examine(series, find_target(series, None, allow_global=True)).pristine
    (patch,) = series.of(["schedule/length-decay-in-the-scheduler"])
    files = patch.applied_to(pristine)
    for name in ("length_decay", "optimizer_param_scheduler"):
        made = module(monkeypatch, f"megatron.core.{name}")
        exec(compile(files[f"megatron/core/{name}.py"], name, "exec"), made.__dict__)
    return made.OptimizerParamScheduler


@pytest.fixture
def other_rank(monkeypatch) -> dict[str, torch.Tensor]:
    """What the other data-parallel rank adds to the next sum, under "adds"."""
    other: dict[str, torch.Tensor] = {}

    def all_reduce(tensor, group):
        assert group == "data parallel"
        tensor += other["adds"].to(tensor.dtype)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return other


def built(make: type, optimizer: SimpleNamespace, per_update: int, **keys):
    """The scheduler with the arguments that all three trainers give, in steps of ``per_update``."""
    return make(
        optimizer,
        init_lr=0.0,
        max_lr=PEAK,
        min_lr=FLOOR,
        lr_warmup_steps=WARMUP * per_update,
        lr_decay_steps=NUM_BATCHES * per_update,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=NUM_BATCHES * per_update,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=None,
        lr_wsd_decay_style="exponential",
        **keys,
    )


def expected(updates_of_a_batch: int) -> Iterator[float]:
    """The rate of each step of the schedule."""
    ours = LearningRateSchedule(
        ScheduleConfig(style="length-decay", mode="auto", min_lr=FLOOR, warmup_steps=WARMUP),
        PEAK,
        NUM_BATCHES * updates_of_a_batch,
    )
    for batch, lengths in enumerate(LENGTHS):
        ours.observe_length(batch * updates_of_a_batch, sum(lengths) / len(lengths))
        yield from (ours.lr(batch * updates_of_a_batch + update) for update in range(updates_of_a_batch))


def expect_equal(rates: list[float], updates_of_a_batch: int) -> None:
    assert rates == list(expected(updates_of_a_batch))
    assert len(set(rates)) > WARMUP + 2  # the surge was found, and the rate was halved more than once


def test_slime(monkeypatch, scheduler_class, other_rank):
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        module(monkeypatch, name)
    trainer = module(monkeypatch, "slime.backends.megatron_utils.model", OptimizerParamScheduler=scheduler_class)
    groups = SimpleNamespace(get_data_parallel_group_gloo=lambda with_context_parallel: "data parallel")
    monkeypatch.setattr(sys.modules["megatron.core"], "mpu", groups)
    hooks = module(monkeypatch, "slime_length_decay", code("slime_length_decay.py"))
    for option in ("init", "before-train-step-hook"):  # the options name functions of the file
        assert getattr(hooks, re.search(rf"--custom-megatron-{option}-path slime_length_decay\.(\w+)", DOCUMENT)[1])

    args = SimpleNamespace(global_batch_size=BATCH_SIZE // 2, lr_decay_style="constant")
    hooks.choose_style(args)
    optimizer, rates = SimpleNamespace(param_groups=[{"wd_mult": 1.0}]), []
    scheduler = built(
        trainer.OptimizerParamScheduler, optimizer, args.global_batch_size, lr_decay_style=args.lr_decay_style
    )
    for rollout, lengths in enumerate(LENGTHS):
        other_rank["adds"] = torch.tensor([sum(lengths[3:]), len(lengths[3:])])
        hooks.note_length(args, rollout, {"response_lengths": lengths[:3]})
        for step in range(2):
            hooks.observe_length(args, rollout, step, [], optimizer, scheduler)
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step(increment=args.global_batch_size)
    expect_equal(rates, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_verl(monkeypatch, scheduler_class, other_rank, nested):
    for name in ("verl", "verl.utils"):
        module(monkeypatch, name)
    module(monkeypatch, "verl.utils.device", get_device_id=lambda: "cpu")
    worker = module(monkeypatch, "verl_worker", code("verl_engine_workers.py"))
    config = eval(re.search(r"`length_decay_config=(LengthDecayConfig\(mode=\"auto\"\))`", DOCUMENT)[1], names())
    optimizer, rates = SimpleNamespace(param_groups=[{"wd_mult": 1.0}]), []
    scheduler = built(scheduler_class, optimizer, 1, lr_decay_style="length-decay", length_decay_config=config)
    engine = SimpleNamespace(lr_scheduler=scheduler, get_data_parallel_group=lambda: "data parallel")
    for lengths in LENGTHS:
        other_rank["adds"] = torch.tensor([sum(lengths[3:]), len(lengths[3:])])
        masks = [torch.ones(length, dtype=torch.int64) for length in lengths[:3]]
        padded = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        mask = torch.nested.as_nested_tensor(masks, layout=torch.jagged) if nested else padded
        worker.observe_length(engine, Batch(loss_mask=mask))
        rates.append(optimizer.param_groups[0]["lr"])  # of every mini-batch
        scheduler.step(1)
    expect_equal(rates, 1)
    worker.observe_length(SimpleNamespace(lr_scheduler=None), {})  # an engine that is not Megatron's


class Batch(dict):
    """A TensorDict of three responses."""

    shape = (3,)


def names() -> dict:
    return dict(sys.modules["megatron.core.length_decay"].__dict__)


def test_nemo_rl(monkeypatch, scheduler_class):
    worker = module(monkeypatch, "nemo_worker", code("nemo_rl_megatron_policy_worker.py"))
    text = re.search(r"`length_decay_config=(LengthDecayConfig\([^`]*BATCH\))`", DOCUMENT)[1]
    config = eval(text, names() | {"BATCH": BATCH_SIZE})
    optimizer, rates = SimpleNamespace(param_groups=[{"wd_mult": 1.0}]), []
    scheduler = built(scheduler_class, optimizer, BATCH_SIZE, lr_decay_style="length-decay", length_decay_config=config)
    for lengths in LENGTHS:
        counts = torch.tensor([len(lengths), sum(lengths)], dtype=torch.float32)  # summed over ranks
        worker.observe_length(scheduler, counts[1], counts[0])
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=BATCH_SIZE)
    expect_equal(rates, 1)
    worker.observe_length(scheduler, torch.tensor(0.0), torch.tensor(0.0))
