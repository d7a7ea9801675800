"""Measure a checkpoint's accuracy by rollout dtype, temperature, top-p and token budget, as in [FP16 Table 2].

    megatron-rl paper eval-grid RECIPE --checkpoint DIR --dtypes bf16,fp16,fp32 --temperatures 0.6 --top-ps 0.95 \\
        --budgets 8192,32768 --set validation.num_samples=32

Responses are sampled once per dtype, temperature and top-p, with the largest budget. A smaller budget scores the first
tokens of the same responses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from megatron_rl.commands.arguments import add_recipe
from megatron_rl.commands.eval import newest
from megatron_rl.commands.stored_batch import is_main_rank
from megatron_rl.errors import EXIT_DONE, InputError

SHOWN = ("avg@", "pass@", "response_length/mean", "response_length/clip_ratio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="Measure this checkpoint, given as in `megatron-rl eval`.",
    )
    parser.add_argument(
        "--dtypes", metavar="A,B,…", help="Use these dtypes of the rollout engine (default: rollout.dtype)."
    )
    parser.add_argument(
        "--temperatures", metavar="A,B,…", help="Use these temperatures (default: validation.temperature)."
    )
    parser.add_argument("--top-ps", metavar="A,B,…", help="Use these values of top-p (default: validation.top_p).")
    parser.add_argument(
        "--budgets",
        metavar="A,B,…",
        help="Use these numbers of tokens of a response (default: rollout.max_response_length).",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="Write every figure to this file as JSON.")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe
    from megatron_rl.config.base import Dtype
    from megatron_rl.config.precision import refuse_both_products

    recipe = load_recipe(options.recipe, options.overrides)
    dtypes = _listed("--dtypes", options.dtypes, str, [recipe.rollout.dtype], lambda x: x in get_args(Dtype))
    refuse_both_products("--dtypes", dtypes)
    temperatures = _listed(
        "--temperatures", options.temperatures, float, [recipe.validation.temperature], lambda x: 0 <= x < float("inf")
    )
    top_ps = _listed("--top-ps", options.top_ps, float, [recipe.validation.top_p], lambda x: 0 < x <= 1)
    budgets = _listed("--budgets", options.budgets, int, [recipe.rollout.max_response_length], lambda x: x > 0)
    from megatron_rl.evaluate import evaluate_grid  # imports the engines, so only after the recipe is accepted
    from megatron_rl.process.output import format_table

    points = evaluate_grid(recipe, newest(options.checkpoint.resolve()), dtypes, temperatures, top_ps, budgets)
    if not is_main_rank():
        return EXIT_DONE
    names = [name for name in points[0].figures if any(part in name for part in SHOWN) and "ci95" not in name]
    header = ["dtype", "temperature", "top-p", "budget", *(name.removeprefix("val/") for name in names)]
    rows = [
        [p.dtype, f"{p.temperature:g}", f"{p.top_p:g}", str(p.budget), *(f"{p.figures[name]:.4f}" for name in names)]
        for p in points
    ]
    print(format_table(header, rows))
    if options.output:
        record = {"checkpoint": str(options.checkpoint), "recipe": recipe.name, "points": [asdict(p) for p in points]}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return EXIT_DONE


def _listed(
    flag: str, text: str | None, read: Callable[[str], Any], default: list[Any], is_legal: Callable[[Any], bool]
) -> list[Any]:
    """Return the distinct values of a flag. Raises `InputError` for one that cannot be read or is out of range."""
    if text is None:
        return default
    values = []
    for item in text.split(","):
        try:
            value = read(item.strip())
        except ValueError:
            raise InputError(f"{flag} {text}: {item!r} is not a valid {read.__name__}") from None
        if not is_legal(value):
            raise InputError(f"{flag} {text}: {item!r} is out of range")
        values.append(value)
    return list(dict.fromkeys(values))
