"""Load, check and plan every recipe, and check every study, below `recipes/`: part of `make lint`.

A recipe whose model is not on this machine is checked against the shape known by its name (model/architecture.py).
A recipe whose name says how many GPUs it is for (…-4n8g-…) has a line `# Plan: GPU …` in its header: what
`megatron-rl plan` says of it, which must be true and must fit; --write brings these lines up to date. A file
without `num_steps`, `model` and `data` after its `extends:` are merged is a base for others and only parsed.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.loader import is_base
from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import is_study, load_study
from megatron_rl.instruments.plan import GPUS, make_plan, make_workload, summary
from megatron_rl.model.architecture import shape_of
from megatron_rl.run.prepare import check_recipe

ROOT = Path(__file__).resolve().parents[2]

_PLAN = re.compile(r"^# Plan: .*?(" + "|".join(GPUS) + r").*$", re.MULTILINE)
_SIZED = re.compile(r"-\d+n\d+g(-|$)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the plans into the recipes' headers")
    write = parser.parse_args().write
    warnings.simplefilter("error")  # a shipped recipe has nothing to be warned of
    failed = 0
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        name = path.relative_to(ROOT)
        try:
            print(f"{name}: {check(path, write)}")
        except (InputError, UserWarning) as error:
            failed += 1
            print(f"{name}: FAILED\n  {error}", file=sys.stderr)
    return 1 if failed else 0


def check(path: Path, write: bool = False) -> str:
    """What was done with a file below `recipes/`. Raises `InputError` for what is wrong with it."""
    if is_study(path):
        study = load_study(path)
        study.check(offline=path.name == "scale.yaml")
        return f"study, {len(study.study.arms)} arms checked"
    if is_base(path):
        return "base, parsed"
    recipe = load_recipe(path)
    if not recipe.name.endswith(path.stem) and _SIZED.search(path.stem):
        raise InputError(f"name: {recipe.name}, but the file is {path.name}; end the name with that")
    check_recipe(recipe, offline=True)
    return "checked; " + check_header(path, recipe, write) if _SIZED.search(path.stem) else "checked"


def check_header(path: Path, recipe: Recipe, write: bool) -> str:
    """Hold the header's plan against the planner's; the plan."""
    text = path.read_text()
    plan_lines = list(_PLAN.finditer(text))
    if not plan_lines:
        raise InputError(f"the header lacks a line '# Plan: GPU', GPU one of {', '.join(GPUS)}")
    plans = []
    for line in plan_lines:
        plan = make_plan(make_workload(recipe, shape_of(recipe.model.path)[0], GPUS[line[1]]))
        if plan.problems:
            raise InputError(f"does not fit {line[1]}: " + "; ".join(plan.problems))
        plans.append(f"# Plan: {summary(plan)}")
    plan_of = dict(zip((line[0] for line in plan_lines), plans, strict=True))
    stale = [line for line, plan in plan_of.items() if line != plan]
    if stale and not write:
        raise InputError(f"the header says {stale[0]!r}; it should be {plan_of[stale[0]]!r}: run with --write")
    if stale:
        path.write_text(_PLAN.sub(lambda line: plan_of[line[0]], text))
    return "; ".join(plan.removeprefix("# Plan: ") for plan in plans)


if __name__ == "__main__":
    sys.exit(main())
