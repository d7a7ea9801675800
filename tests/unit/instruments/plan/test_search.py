"""Layouts and offload settings that a plan proposes: legal, ranked, and named where nothing fits."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.config.model_rules import layout_problems
from megatron_rl.instruments.plan import GPUS, fewest_gpus, make_plan, make_workload
from megatron_rl.instruments.plan.hardware import MOST_UTILIZATION
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.report import render
from megatron_rl.instruments.plan.timing import step_time
from megatron_rl.model.architecture import shape_of
from tests.support.planned import MOE, STAYS, work
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY

STAYS_FLAGS = [argument for setting in STAYS for argument in ("--set", setting)]


def test_offload_is_chosen_where_it_gains():
    """One node: without, no engine of 0.85 fits; Adam's states make the room. With servers there is nothing to gain."""
    plan = make_plan(work(MOE, "h100-80", nodes=1))
    assert plan.problems
    best = plan.layouts[0]
    assert best.fits
    assert best.offload.optimizer
    assert best.utilization <= MOST_UTILIZATION
    chosen = [s.removeprefix("--set ") for s in re.findall(r"--set \S+", best.overrides)]
    again = make_plan(work(MOE, "h100-80", *chosen, nodes=1))
    assert again.problems == []
    assert again.time.total == rounded(best.time.total)
    servers = ("rollout.engine=vllm_server", "rollout.servers.count=4", "rollout.gpu_memory_utilization=0.9")
    assert not any(layout.offload.gradients for layout in make_plan(work(MOE, "h100-80", *servers)).layouts)


def test_layouts_are_legal_ranked_and_mark_the_recipes():
    plan = make_plan(work())
    assert sum(layout.is_recipes for layout in plan.layouts) == 1
    fits = [layout.memory.fits for layout in plan.layouts]
    assert fits == sorted(fits, reverse=True)
    times = [layout.time.total for layout in plan.layouts if layout.memory.fits]
    assert times == sorted(times)
    assert len({str(layout) for layout in plan.layouts}) == len(plan.layouts)
    for layout in plan.layouts:
        assert layout_problems(layout.parallel, plan.work.architecture, 32) == []


def error_of(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_what_no_layout_can_hold(capsys):
    message = error_of(capsys, str(MOE), "--gpu", "a100-40", "--nodes", "1", *STAYS_FLAGS)
    assert "no layout of 8 a100-40 fits" in message
    assert "key/value" in message or "cache holds" in message


def test_a_layout_that_fits_is_named_and_does(capsys):
    message = error_of(capsys, str(MOE), "--gpu", "a100-80", "--set", "learner.parallel={tensor: 1, expert: 1}")
    keys = re.search(r"that fits: (.*)", message)[1].split()
    assert main(["plan", str(MOE), "--gpu", "a100-80", *keys]) == 0


def test_where_nothing_fits_what_lacks_least_comes_first():
    plan = make_plan(work(MOE, "a100-40", nodes=1, gpus_per_node=8))
    missing = [max(phase.missing + phase.margin for phase in layout.memory.phases) for layout in plan.layouts]
    assert min(missing) > 0
    assert missing == sorted(missing)
    assert "none fits, the one that lacks least first" in render(plan, detail=True)
    assert "--set learner.parallel" not in render(plan, detail=True)


def test_a_faster_layout_says_how_to_get_it(capsys):
    plan = make_plan(work(MOE))
    best = plan.layouts[0]
    assert not best.is_recipes
    line = next(line for line in render(plan).splitlines() if "--set learner.parallel" in line)
    words = shlex.split(line)
    overrides = [after for word, after in itertools.pairwise(words) if word == "--set"]
    taken = make_plan(work(MOE, "h100-80", *overrides))
    own = next(layout for layout in taken.layouts if layout.is_recipes)
    assert str(own) == str(best)
    assert own.memory.fits
    assert main(["plan", str(MOE), "--gpu", "H100"]) == 0
    assert "h100-80" in capsys.readouterr().out


ROUTED = REPOSITORY / "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"


@pytest.mark.parametrize(
    ("gpu", "number", "settings"),
    [("a100-40", 16, ()), ("h100-80", 4, ("rollout.max_response_length=30720",)), ("b200-180", 2, ())],
)
def test_fewest_gpus(gpu, number, settings):
    """The recipe's own layout may be illegal on so few; half of them hold no layout."""
    recipe = load_recipe(ROUTED, [*settings, "rollout.tensor_parallel=2"])
    shape = shape_of(recipe.model.path)[0]
    table = fewest_gpus(recipe, shape, GPUS[gpu], 2, 8, None, None, None, None).splitlines()
    numbers = [int(line.split()[0]) for line in table[1:]]
    assert numbers[0] == int(re.search(r"fewest: (\d+) ", table[0])[1])
    for count, line in zip(numbers, table[1:], strict=True):
        chosen = re.findall(r"--set (\S+)", line)
        again = load_recipe(ROUTED, [*settings, "rollout.tensor_parallel=2", *chosen])
        work_again = make_workload(again, shape, GPUS[gpu], max(1, count // 8), min(8, count))
        own = memory_plan(work_again)
        assert own.fits
        assert f"{step_time(work_again, own.engine).total:8.0f} s a step" in line


@pytest.mark.parametrize(
    ("gpu", "gpus", "fits"), [("a100-40", 16, False), ("h100-80", 64, True), ("b200-180", 8, True)]
)
def test_gpus_are_all_gpus(gpu, gpus, fits, capsys):
    """Where the recipe's own layout does not fit, one that does is named."""
    long = [] if not fits else ["--set", "rollout.max_response_length=30720"]
    assert main(["plan", str(ROUTED), "--gpu", gpu, "--gpus", str(gpus), *long]) == (0 if fits else 2)
    printed = capsys.readouterr()
    assert f" on {gpus // 8} × 8 {gpu}" in printed.out
    assert fits or f"a layout of {gpus} {gpu} that fits: --set learner.parallel.tensor" in printed.err
    assert len(printed.out.splitlines()) <= 8


@pytest.mark.parametrize("option", ["--gpus", "--nodes", "--gpus-per-node", "--mean-response", "--mean-prompt"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
def test_numbers_that_cannot_be_are_refused(option, value, capsys):
    with pytest.raises(SystemExit):
        main(["plan", str(ROUTED), "--gpu", "h100", option, value])
    assert f"argument {option}: " in capsys.readouterr().err


def test_advice_on_a_small_cache_is_tried():
    """Qwen3-235B in engines of 4 GPUs: 16 is named, and it holds the longest sequence."""
    large = ("model.path=models/Qwen3-235B-A22B", "learner.parallel.expert=16")

    def planned(*settings):
        recipe = load_recipe(ROUTED, [*large, *settings])
        return make_plan(make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"], 16, 8))

    plan = planned("rollout.tensor_parallel=4")
    (told,) = re.findall(r"set rollout.tensor_parallel to (\d+)", " ".join(plan.problems))
    assert not plan.has_time
    assert "a step      not known" in render(plan)
    assert planned(f"rollout.tensor_parallel={told}").memory.holds_longest
