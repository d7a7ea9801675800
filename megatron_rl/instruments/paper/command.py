"""Measurements of papers with a model of yours: `paper mismatch`, `sanity-set` and `sanity-verdict`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron_rl.arguments import COUNT, SHARE, add_recipe, output, output_file
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.base import Dtype
from megatron_rl.config.learner import refuse_both_products
from megatron_rl.config.rollout import WeightType
from megatron_rl.config.yaml12 import parse
from megatron_rl.data import load_prompts, load_tokenizer
from megatron_rl.data.source import Problem, read_problems
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.monitor.run_directory import read_metrics
from megatron_rl.monitor.samples import CORRECT
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from megatron_rl.instruments.paper.mismatch_pairs import PairResult


ALL = ("bf16", "fp16", "fp32")  # dtypes of --pairs all
ROUNDINGS = get_args(WeightType)


def add_mismatch(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--pairs",
        default="all",
        help="Measure these pairs of learner and rollout dtype, such as bf16/bf16,bf16/bf16+fp8, or all.",
    )
    parser.add_argument("--prompts", type=COUNT, default=64, help="Use this number of prompts (default: 64).")
    parser.add_argument(
        "--samples", type=COUNT, default=4, help="Sample this number of responses to each prompt (default: 4)."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="Take the weights of this learner checkpoint, a step_… folder (default: model.path).",
    )
    parser.add_argument("--out", type=output, required=True, help="Write mismatch.json and .png to this folder.")


def run_mismatch(options: argparse.Namespace) -> int:
    """Measure the training-inference mismatch of a checkpoint by pairs of dtypes [FP16 §3.5]; write JSON and PNG.

        megatron-rl paper mismatch RECIPE [--pairs all | bf16/bf16,bf16/bf16+fp8,tf32/tf32] [--prompts 64] \\
            [--samples 4] [--checkpoint RUN/checkpoints/step_00000100] [--set KEY.PATH=VALUE …] --out DIR

    A pair is learner/rollout, each bf16, fp16, fp32 or tf32; `all` means the nine pairs without tf32. A command takes
    fp32 or tf32, not both, because the setting holds for a whole process. The rollout dtype may be followed by a
    rounding of its weights (`rollout.quantization.weights`), as in bf16/bf16+fp8; the default is the recipe's.

    For each pair, the learner sends its weights to vLLM as after an update, vLLM generates, and the learner scores the
    responses. Model, prompts (data.validation, else data.train), lengths and the `precision` section come from the
    recipe; change them with `--set model.path=…` or `--set data.validation=…`. `--set rollout.stop_token_ids=[]` makes
    all responses rollout.max_response_length tokens long, so that pairs are compared at the same length. Routes are
    compared if the model has experts. For several ranks, start the command under torchrun; the recipe has the layout.
    """
    # Imported here because the engines' libraries take seconds, which would delay --help.
    from megatron_rl.config.model_rules import precision_problems
    from megatron_rl.instruments.paper.mismatch_pairs import measure, write
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
        print(f"wrote {options.out}/mismatch.json, mismatch.png")
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
    from megatron_rl.process.host import format_table

    header = ["learner/rollout", "log-ratio std", "from IQR", "rho std", "rho max", "k3 KL", "1-Pearson"]
    rows = []
    for result in results:
        f = result.figures()
        names = ("sequence_log_ratio_std", "sequence_log_ratio_iqr_std", "mismatch/rho_std", "mismatch/rho_max")
        numbers = [*(f[name] for name in names), f["rollout_corr/k3_kl"], 1 - f["pearson"]]
        routes = f"{f['routes_differ_frac']:.2%}" if "routes_differ_frac" in f else "–"
        rows.append([result.name, *(f"{x:.2e}" for x in numbers), routes, f"{f['mean_length']:.1f}"])
    print(format_table([*header, "other routes", "length"], rows))


def add_sanity_set(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--out", type=output_file, required=True, help="Write the kept problems to this file (JSON lines)."
    )
    parser.add_argument(
        "--samples", type=COUNT, default=40, help="Sample this number of responses to each problem (default: 40)."
    )
    parser.add_argument("--low", type=SHARE, default=0.2, help="Keep problems from this accuracy on (default: 0.2).")
    parser.add_argument("--high", type=SHARE, default=0.8, help="Keep problems up to this accuracy (default: 0.8).")
    parser.add_argument("--limit", type=COUNT, help="Sample only the first problems, this many.")


def run_sanity_set(options: argparse.Namespace) -> int:
    """Choose the problems for the sanity test of [FP16 §4]: neither unsolvable nor already solved ("perfectible").

        megatron-rl paper sanity-set RECIPE --out kept.jsonl [--samples 40] [--low 0.2] [--high 0.8] [--limit N]

    The command samples each problem of the recipe's data.train with the recipe's model, prompt format, reward and
    `rollout` section. It writes the problems with an accuracy in [low, high], with `accuracy` beside problem and
    answer. A run on this set that does not reach 95% has a fault: check it with `megatron-rl paper sanity-verdict`.

    Results are saved to OUT.progress.jsonl, one line per problem, so that the same command continues after an
    interruption. Under torchrun each rank runs an engine on its share of the problems.
    """
    from megatron_rl.process.ranks import broadcast_object, world_rank

    if options.low > options.high:
        raise InputError(f"--low {options.low:g} is above --high {options.high:g}; no problem is between them")
    recipe = load_recipe(options.recipe, options.overrides)
    problems = [problem for source in recipe.data.train for problem in read_problems(source)][: options.limit]
    problem_ids = {problem.id for problem in problems}
    prompts = load_prompts(recipe.data.train, load_tokenizer(str(recipe.model.path)), recipe.data.prompt)
    progress, expected = options.out.with_name(options.out.name + ".progress.jsonl"), settings(recipe, options.samples)
    with job(recipe):
        # One rank reads and writes the file and broadcasts its content.
        done = broadcast_object(read_progress(progress, expected) if world_rank() == 0 else {})
        left = [prompt for prompt in prompts if prompt.id in problem_ids and prompt.id not in done]
        if left:
            sample(recipe, left, options.samples, progress)
        if world_rank() == 0:
            correct = {
                name: number for name, number in read_progress(progress, expected).items() if name in problem_ids
            }
            num_kept, sampled = write_kept(options.out, problems, correct, options.samples, options.low, options.high)
            print(f"sampled {len(left)} problems, {sampled - len(left)} before")
            print(
                f"kept {num_kept} of {sampled} problems (accuracy {options.low:g} to {options.high:g}): {options.out}"
            )
    return EXIT_DONE


def settings(recipe: Recipe, num_samples: int) -> dict[str, Any]:
    """Return the settings that accuracies depend on; progress of other settings is not continued."""
    rollout = recipe.rollout
    return {
        "model": str(recipe.model.path),
        "dtype": rollout.dtype,
        "samples": num_samples,
        "temperature": rollout.temperature,
        "max_response_length": rollout.max_response_length,
        "seed": rollout.seed,
        "template": recipe.data.prompt.template,
        "reward": recipe.reward.name,
    }


def read_progress(file: Path, expected: dict[str, Any]) -> dict[str, int]:
    """Return correct samples by problem id, of an earlier run. Raises `InputError` if its settings differ."""
    if not file.exists():
        file.write_text(json.dumps({"settings": expected}) + "\n")
        return {}
    lines = file.read_text().splitlines()
    stored = json.loads(lines[0])["settings"]
    if stored != expected:
        different = sorted(key for key in expected if stored.get(key) != expected[key])
        raise InputError(
            f"{file}: made with other settings ({', '.join(f'{k}: {stored.get(k)!r}' for k in different)}); delete it "
            "to start anew, or choose another --out"
        )
    done = {}
    for line in lines[1:]:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break  # the last line, incomplete after an interruption
        done[row["id"]] = row["correct"]
    # Remove the incomplete line, so that the next one starts on a new line.
    rows = [json.dumps({"settings": expected}), *(json.dumps({"id": k, "correct": v}) for k, v in done.items())]
    file.write_text("\n".join(rows) + "\n")
    return done


PER_CALL = 64  # problems that are sampled, scored and saved together


def sample(recipe: Recipe, prompts: list[Prompt], num_samples: int, progress: Path) -> None:
    """Sample and score ``prompts``, `PER_CALL` at a time, and append to ``progress``. Every rank must call it."""
    from megatron_rl.learner.process_groups import resolve_device
    from megatron_rl.process.ranks import world_rank
    from megatron_rl.rewards import Rewarder
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    tokenizer = load_tokenizer(str(recipe.model.path))
    with ExitStack() as stack:
        sources = {prompt.data_source for prompt in prompts}
        rewarder = None
        if world_rank() == 0:
            rewarder = stack.enter_context(Rewarder(recipe.reward, recipe.rollout.max_response_length, sources))
        generator = VllmGenerator(
            recipe.rollout,
            recipe.model.path,
            max_prompt_length=recipe.data.prompt.max_length,
            device=resolve_device(recipe.runtime.device).type,
            decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
            precision=recipe.precision,
        )
        stack.callback(generator.close)
        for first in range(0, len(prompts), PER_CALL):
            groups = generator.rollout(prompts[first : first + PER_CALL], num_samples, policy_version=0, step=0)
            if rewarder is None:
                continue
            rewarder.score(groups)
            with progress.open("a") as file:
                for group in groups:
                    correct = sum(rollout.raw_reward >= CORRECT for rollout in group.rollouts)
                    file.write(json.dumps({"id": group.prompt.id, "correct": correct}) + "\n")
            print(f"{min(first + PER_CALL, len(prompts))} of {len(prompts)} problems", flush=True)


def output_row(problem: Problem, accuracy: float) -> dict[str, Any]:
    """Return a row in the format of the data loader."""
    row: dict[str, Any] = {"id": problem.id.partition(":")[2]}
    row["problem" if isinstance(problem.question, str) else "prompt"] = problem.question
    row |= {"answer": problem.answer, "data_source": problem.data_source, "accuracy": accuracy}
    row |= {"tools": problem.tools} if problem.tools else {}
    return row | ({"extra_info": problem.extra} if problem.extra else {})


def write_kept(
    file: Path, problems: list[Problem], correct: dict[str, int], num_samples: int, low: float, high: float
) -> tuple[int, int]:
    """Write the problems with low ≤ accuracy ≤ high; return (number kept, number sampled)."""
    rows = []
    for problem in problems:
        if problem.id in correct:
            accuracy = correct[problem.id] / num_samples
            if low <= accuracy <= high:
                rows.append(output_row(problem, accuracy))
    partial = file.with_name(file.name + ".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    partial.replace(file)
    return len(rows), len(correct)


@contextmanager
def job(recipe: Recipe) -> Iterator[None]:
    """Join the job's other ranks, if there are any, and leave them at the end."""
    from megatron_rl.learner.process_groups import initialize, shutdown

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        initialize(recipe.learner.parallel, recipe.runtime.device, recipe.seed, recipe.rollout.hang_limit_s)
    try:
        yield
    finally:
        shutdown()


EXIT_FAILED = 1
PASSED = 0.95  # training accuracy above this


def add_sanity_verdict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Judge this run directory.")


def run_sanity_verdict(options: argparse.Namespace) -> int:
    """Say whether a run passed the sanity test of [FP16 §4]: training accuracy on a perfectible set above 95%.

        megatron-rl paper sanity-verdict RUN [RUN …]

    Training accuracy is critic/score/mean (rewards before shaping), averaged over a pass over the problems; the best
    pass counts. Prints one line per run. Exit status: 0 all passed, 1 one failed, 2 not readable.
    """
    results = [verdict(path) for path in options.runs]
    for _, line in results:
        print(line)
    return EXIT_DONE if all(passed for passed, _ in results) else EXIT_FAILED


def best_epoch(scores: list[float], steps_per_epoch: int) -> tuple[float, int]:
    """Return (highest mean of ``steps_per_epoch`` consecutive scores, its last step). `InputError` for fewer."""
    if len(scores) < steps_per_epoch:
        raise InputError(f"{len(scores)} steps recorded, one pass over the problems takes {steps_per_epoch}")
    means = [
        sum(scores[end - steps_per_epoch : end]) / steps_per_epoch for end in range(steps_per_epoch, len(scores) + 1)
    ]
    best = max(range(len(means)), key=means.__getitem__)
    return means[best], best + steps_per_epoch - 1


def verdict(run: Path) -> tuple[bool, str]:
    """Return (passed, the line to print) for one run directory."""
    for name in ("recipe.resolved.yaml", "metrics.jsonl"):
        if not (run / name).is_file():
            raise InputError(f"{run}: no {name}; expected a run directory")
    recipe = Recipe.model_validate(parse((run / "recipe.resolved.yaml").read_text())[0])
    if recipe.batch.filter_groups:
        raise InputError(f"{run}: batch.filter_groups leaves solved problems out of the score; run with false")
    num_problems = sum(1 for source in recipe.data.train for _ in read_problems(source))
    rows = read_metrics(run / "metrics.jsonl")
    scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    try:
        accuracy, step = best_epoch(scores, -(-num_problems // recipe.batch.prompts))
    except InputError as error:
        raise InputError(f"{run}: {error}") from error
    passed = accuracy > PASSED
    return passed, (
        f"{'PASS' if passed else 'FAIL'}  {run.name}: training accuracy {accuracy:.3f} at step {step} of {len(scores)} "
        f"({'above' if passed else 'not above'} {PASSED:g}; {num_problems} problems)"
    )
