"""Measure the training-inference mismatch of a checkpoint by pairs of dtypes [FP16 §3.5]; write JSON, PNG and HTML.

    megatron-rl paper mismatch RECIPE [--pairs all | bf16/bf16,bf16/bf16+fp8,tf32/tf32] [--prompts 64] [--samples 4] \\
        [--checkpoint RUN/checkpoints/step_00000100] [--set KEY.PATH=VALUE …] --out DIR

A pair is learner/rollout, each bf16, fp16, fp32 or tf32; `all` means the nine pairs without tf32. A command takes fp32
or tf32, not both, because the setting holds for a whole process. The rollout dtype may be followed by a rounding of its
weights (`rollout.quantization.weights`), as in bf16/bf16+fp8; the default is the recipe's.

For each pair, the learner sends its weights to vLLM as after an update, vLLM generates, and the learner scores the
responses. Model, prompts (data.validation, else data.train), lengths and the `precision` section come from the recipe;
change them with `--set model.path=…` or `--set data.validation=…`. `--set rollout.stop_token_ids=[]` makes all
responses rollout.max_response_length tokens long, so that pairs are compared at the same length. Routes are compared if
the model has experts. For several ranks, start the command under torchrun; the recipe has the layout.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron_rl.commands.arguments import add_recipe
from megatron_rl.config.base import Dtype
from megatron_rl.config.precision import refuse_both_products
from megatron_rl.config.rollout import WeightType
from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.commands.mismatch_pairs import PairResult

ALL = ("bf16", "fp16", "fp32")  # dtypes of --pairs all
ROUNDINGS = get_args(WeightType)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--pairs",
        default="all",
        help="Measure these pairs of learner and rollout dtype, such as bf16/bf16,bf16/bf16+fp8, or all.",
    )
    parser.add_argument("--prompts", type=int, default=64, help="Use this number of prompts (default: 64).")
    parser.add_argument(
        "--samples", type=int, default=4, help="Sample this number of responses to each prompt (default: 4)."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="Take the weights of this learner checkpoint, a step_… folder (default: model.path).",
    )
    parser.add_argument("--out", type=Path, required=True, help="Write mismatch.json, .png and .html to this folder.")


def run(options: argparse.Namespace) -> int:
    # Imported here because the engines' libraries take seconds, which would delay --help.
    from megatron_rl.commands.mismatch_pairs import measure, write
    from megatron_rl.config import Recipe, load_recipe
    from megatron_rl.config.model_rules import precision_problems
    from megatron_rl.data import load_prompts, load_tokenizer
    from megatron_rl.learner.process_groups import shutdown
    from megatron_rl.model.architecture import read_architecture
    from megatron_rl.process.ranks import world_rank

    pairs = parse_pairs(options.pairs)
    overrides = [*options.overrides, f"rollout.num_samples={options.samples}"]
    recipe = load_recipe(options.recipe, overrides)
    architecture = read_architecture(recipe.model.path)
    if problems := precision_problems(recipe, architecture):
        raise InputError("; ".join(problems))
    values = recipe.model_dump() | {"routing": {"telemetry": architecture.is_moe}}
    recipe = Recipe.model_validate(values)
    tokenizer = load_tokenizer(str(recipe.model.path))
    prompts = load_prompts(recipe.data.validation or recipe.data.train, tokenizer, recipe.data.prompt)
    prompts = list(prompts)[: options.prompts]
    results = list(measure(recipe, prompts, pairs, options.checkpoint))
    if world_rank() == 0:
        write(options.out, f"Mismatch of {options.checkpoint or recipe.model.path.name}", results)
        print_table(results)
        print(f"wrote {options.out}/mismatch.json, mismatch.png, mismatch.html")
    shutdown()
    return EXIT_DONE


def parse_pairs(text: str) -> list[tuple[str, str]]:
    """Return the pairs of ``text``: `all` (of `ALL`) or `learner/rollout,…`.

    Raises `InputError` for another dtype or rounding, and for fp32 and tf32 in one command.
    """
    if text == "all":
        return list(itertools.product(ALL, ALL))
    pairs = [tuple(pair.strip().split("/")) for pair in text.split(",")]
    for pair in pairs:
        dtype, plus, rounding = pair[-1].partition("+")
        is_valid = {pair[0], dtype} <= set(get_args(Dtype)) and (rounding in ROUNDINGS if plus else True)
        if len(pair) != 2 or not is_valid:
            raise InputError(
                f"--pairs: {'/'.join(pair)!r}; expected all, or learner/rollout with {', '.join(get_args(Dtype))}, the "
                f"second optionally followed by +{', +'.join(ROUNDINGS)}"
            )
    refuse_both_products("--pairs", (dtype.partition("+")[0] for pair in pairs for dtype in pair))
    return pairs


def print_table(results: list[PairResult]) -> None:
    width = max(map(len, ("learner/rollout", *(result.name for result in results))))
    print(
        f"{'learner/rollout':>{width}}  log-ratio std  (from IQR)   rho std   rho max    "
        "k3 KL  1-Pearson  other routes  length"
    )
    for result in results:
        f = result.figures()
        print(
            f"{result.name:>{width}}  {f['sequence_log_ratio_std']:13.2e}  {f['sequence_log_ratio_iqr_std']:10.2e}  "
            f"{f['mismatch/rho_std']:8.2e}  "
            f"{f['mismatch/rho_max']:8.4f}  {f['rollout_corr/k3_kl']:7.1e}  {1 - f['pearson']:9.1e}  "
            f"{f.get('routes_differ_frac', float('nan')):12.2%}  {f['mean_length']:6.1f}"
        )
