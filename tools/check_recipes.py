#!/usr/bin/env python
"""Load and check every recipe, and every study, below `recipes/`: part of `make lint`.

A recipe whose model is not on this machine is loaded and validated but not checked against the architecture. A file
without `num_steps`, `model` and `data` after its `extends:` are merged is a base for others and only parsed.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.check import check_recipe  # noqa: E402
from megatron_rl.config import load_recipe  # noqa: E402
from megatron_rl.config.loader import is_base  # noqa: E402
from megatron_rl.errors import InputError  # noqa: E402
from megatron_rl.lab import load_study  # noqa: E402


def main() -> int:
    warnings.simplefilter("error")  # a shipped recipe has nothing to be warned of
    failed = 0
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        name = path.relative_to(ROOT)
        try:
            print(f"{name}: {_check(path)}")
        except (InputError, UserWarning) as error:
            failed += 1
            print(f"{name}: FAILED\n  {error}", file=sys.stderr)
    return 1 if failed else 0


def _check(path: Path) -> str:
    if path.name == "study.yaml":
        study = load_study(path)
        study.check()
        return f"study, {len(study.study.arms)} arms checked"
    if is_base(path):
        return "base, parsed"
    recipe = load_recipe(path)
    if not (recipe.model.path / "config.json").is_file():
        return f"loaded; model {recipe.model.path} is not on this machine"
    check_recipe(recipe)
    return "checked"


if __name__ == "__main__":
    sys.exit(main())
