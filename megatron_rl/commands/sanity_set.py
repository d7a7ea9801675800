"""Choose the problems for the sanity test of [FP16 §4]: neither unsolvable nor already solved ("perfectible").

    megatron-rl paper sanity-set RECIPE --out kept.jsonl [--samples 40] [--low 0.2] [--high 0.8] [--limit N]

The command samples each problem of the recipe's data.train with the recipe's model, prompt format, reward and `rollout`
section. It writes the problems with an accuracy in [low, high], with `accuracy` beside problem and answer. A run on
this set that does not reach 95% has a fault: check it with `megatron-rl paper sanity-verdict`.

Results are saved to OUT.progress.jsonl, one line per problem, so that the same command continues after an interruption.
Under torchrun each rank runs an engine on its share of the problems.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.commands.arguments import add_recipe
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.data import load_prompts, load_tokenizer
from megatron_rl.data.source import Problem, read_problems
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.monitor.validation import CORRECT
from megatron_rl.types import Group, Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--out", type=Path, required=True, help="Write the kept problems to this file (JSON lines).")
    parser.add_argument(
        "--samples", type=int, default=40, help="Sample this number of responses to each problem (default: 40)."
    )
    parser.add_argument("--low", type=float, default=0.2, help="Keep problems from this accuracy on (default: 0.2).")
    parser.add_argument("--high", type=float, default=0.8, help="Keep problems up to this accuracy (default: 0.8).")
    parser.add_argument("--limit", type=int, help="Sample only the first problems, this many.")
    parser.add_argument(
        "--problems-per-call", type=int, default=64, help="Save after this number of problems (default: 64)."
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.process.ranks import broadcast_object, world_rank

    if not 0 <= options.low <= options.high <= 1 or options.samples < 1:
        raise InputError(
            f"--low {options.low} --high {options.high} --samples {options.samples}: must have 0 ≤ low ≤ high ≤ 1"
        )
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
            sample(recipe, left, options.samples, options.problems_per_call, progress)
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


def num_correct(group: Group) -> int:
    return sum(rollout.raw_reward >= CORRECT for rollout in group.rollouts)


def sample(recipe: Recipe, prompts: list[Prompt], num_samples: int, per_call: int, progress: Path) -> None:
    """Sample and score ``prompts``, ``per_call`` at a time, and append to ``progress``. Every rank must call it."""
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
        for first in range(0, len(prompts), per_call):
            groups = generator.rollout(prompts[first : first + per_call], num_samples, policy_version=0, step=0)
            if rewarder is None:
                continue
            rewarder.score(groups)
            with progress.open("a") as file:
                for group in groups:
                    file.write(json.dumps({"id": group.prompt.id, "correct": num_correct(group)}) + "\n")
            print(f"{min(first + per_call, len(prompts))} of {len(prompts)} problems", flush=True)


def output_row(problem: Problem, accuracy: float) -> dict[str, Any]:
    """Return a row in the format of the data loader."""
    row: dict[str, Any] = {"id": problem.id.partition(":")[2]}
    row["problem" if isinstance(problem.question, str) else "prompt"] = problem.question
    row |= {"answer": problem.answer, "data_source": problem.data_source, "accuracy": accuracy}
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
