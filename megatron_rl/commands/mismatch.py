"""Training-inference mismatch of a checkpoint, per pair of learner and rollout dtype [FP16 §3.5]: JSON, PNG and HTML.

    megatron-rl mismatch RECIPE [--pairs all | bf16/bf16,bf16/bf16+fp8] [--prompts 64] [--samples 4] \
        [--checkpoint RUN/checkpoints/step_00000100] [--set KEY.PATH=VALUE …] --out DIR

A pair is learner/rollout, and the rollout dtype may have a rounding of its weights (`rollout.quantization.weights`)
behind it: bf16/bf16+fp8. Without one the recipe's holds. For every pair the learner's weights go to vLLM as after an
update, vLLM generates, the learner scores what was generated. Model, prompts (data.validation, else data.train),
lengths and the `precision` section are the recipe's; `--set model.path=…`, `--set data.validation=…` point it
elsewhere. `--set rollout.stop_token_ids=[]` makes all responses as long as rollout.max_response_length, so that pairs
compare at the same length. Routes are compared where the model has experts. Several ranks: under torchrun, laid out as
the recipe says.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron_rl.commands.arguments import add_recipe
from megatron_rl.config.quantization import WeightType
from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.commands.mismatch_pairs import PairResult

DTYPES = ("bf16", "fp16", "fp32")
ROUNDINGS = get_args(WeightType)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--pairs", default="all", help="all, or learner/rollout dtypes: bf16/bf16,bf16/bf16+fp8")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts (default 64)")
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt (default 4)")
    parser.add_argument("--checkpoint", type=Path, help="a learner checkpoint (step_…); default: model.path")
    parser.add_argument("--out", type=Path, required=True, help="folder for mismatch.{json,png,html}")


def run(options: argparse.Namespace) -> int:
    # Imported here: the engines' libraries take seconds, which --help does without.
    from megatron_rl.checkpoint.architecture import read_architecture
    from megatron_rl.commands.mismatch_pairs import measure, write
    from megatron_rl.config import Recipe, load_recipe
    from megatron_rl.config.model_rules import precision_problems
    from megatron_rl.data import load_prompts, load_tokenizer
    from megatron_rl.learner.process_groups import shutdown
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
    """`all` (of dtypes) or `learner/rollout,…`. Raises `InputError` on another dtype or rounding."""
    if text == "all":
        return list(itertools.product(DTYPES, DTYPES))
    pairs = [tuple(pair.strip().split("/")) for pair in text.split(",")]
    for pair in pairs:
        dtype, plus, rounding = pair[-1].partition("+")
        known = {pair[0], dtype} <= set(DTYPES) and (rounding in ROUNDINGS if plus else True)
        if len(pair) != 2 or not known:
            raise InputError(
                f"--pairs: {'/'.join(pair)!r}; expected all, or learner/rollout with {', '.join(DTYPES)}, the "
                f"second with +{', +'.join(ROUNDINGS)} or nothing behind it"
            )
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
