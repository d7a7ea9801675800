"""Everything that a run needs before its engines: `train` and `check` both start here, so that they agree.

Recipe, model, layout, tokenizer, prompts and reward are loaded as the run will use them, and the reward is called once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.check import CheckedRecipe, check_recipe
from megatron_rl.checkpoint.hf_folder import resolve_stop_token_ids
from megatron_rl.checkpoint.manifest import list_checkpoints
from megatron_rl.config import Recipe
from megatron_rl.config.recipe import section_problems
from megatron_rl.config.sections import BatchConfig
from megatron_rl.data import PromptSet, check_vocabulary, load_tokenizer, load_train, load_validation
from megatron_rl.errors import InputError, shown
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.monitor.sinks import missing_clients
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.rewarder import Trial
from megatron_rl.run.identity import begin_step, compare, contents, has_begun, is_complete, refuse

SHOWN_CHARACTERS, SHOWN_SOURCES, SHOWN_TOKENS = 300, 8, 24  # of a prompt; of the data sources; at each end of a prompt
TRIED_GOLDS = 200  # of the training set and of the validation set


@dataclass(frozen=True)
class Prepared:
    """A recipe that can be run, as far as can be known without engines. ``report``: what, value; for a person.

    ``recipe``: with `num_steps` in the place of `num_epochs`.
    """

    recipe: Recipe
    checked: CheckedRecipe
    tokenizer: Any
    train: PromptSet
    validation: PromptSet
    rewarder: Rewarder
    report: list[tuple[str, str]]


@contextlib.contextmanager
def prepare(recipe: Recipe, world_size: int | None) -> Iterator[Prepared]:
    """Check and load; the rewarder's workers end on leaving. ``world_size``: ranks of the job, None where not known.

    Raises `InputError` for whatever keeps the recipe from being run.
    """
    checked = check_recipe(recipe, world_size)
    if problems := missing_clients(recipe.monitor.sinks):
        raise InputError("\n".join([f"recipe {recipe.name}:", *(f"  {problem}" for problem in problems)]))
    tokenizer = load_tokenizer(str(recipe.model.path))
    if recipe.rollout.function is not None:
        from megatron_rl.rollout.conversation import load_talk  # needs torch, which `check` can do without

        load_talk(recipe.rollout.function, tokenizer)
    train = load_train(recipe.data, tokenizer)
    if (prompts := recipe.batch.prompts_of_a_round) > len(train):
        oversampled = "oversample.factor" if recipe.batch.oversample else "prompts"
        key = "generation_prompts" if recipe.batch.generation_prompts else oversampled
        raise InputError(
            f"batch.{key}: {prompts} prompts a step, but data.train has {len(train)}; a step would "
            f"sample a prompt twice. Lower batch.{key} or add data"
        )
    recipe, notes = in_steps(recipe, len(train))
    has_validation = bool(recipe.data.validation)
    validation = load_validation(recipe.data, recipe.validation, tokenizer) if has_validation else PromptSet.of(())
    for prompts_of_a_kind in (train, validation):
        check_vocabulary(prompts_of_a_kind, checked.architecture.vocab_size)
    first = [*train.first_of_each_source(), *validation.first_of_each_source()]
    names = {prompt.data_source for prompt in first}
    with Rewarder(recipe.reward, recipe.rollout.max_response_length, names) as rewarder:
        trial = rewarder.try_on(first)
        about_data = [
            _data_line(train, validation, recipe.data.prompt.max_length, recipe.validation.limit),
            *(("repeats", note) for note in _repeats(recipe.batch, recipe.data.weights, train)),
            *_trial_lines(trial, _ends(recipe.model.path, recipe.rollout.stop_token_ids, tokenizer), tokenizer),
        ]
        report = [*checked.report, *notes, *about_data]
        yield Prepared(recipe, checked, tokenizer, train, validation, rewarder, report)


def in_steps(recipe: Recipe, num_prompts: int) -> tuple[Recipe, list[tuple[str, str]]]:
    """Return ``recipe`` with the steps that `num_epochs` takes over ``num_prompts``, and what to say of it."""
    if recipe.num_epochs is None:
        return recipe, []
    steps = math.ceil(recipe.num_epochs * num_prompts / recipe.batch.prompts)
    counted = recipe.model_copy(update={"num_steps": steps, "num_epochs": None})
    if problems := section_problems(counted):
        raise InputError("\n".join([f"recipe {recipe.name}:", *(f"  {problem}" for problem in problems)]))
    each = f"{num_prompts} prompts, {recipe.batch.prompts} a step"
    return counted, [("steps", f"num_epochs {recipe.num_epochs:g} over {each}: {counted.length}")]


def report(
    recipe: Recipe, world_size: int | None, offline: bool = False, free_gib: float | None = None
) -> list[tuple[str, str]]:
    """What `check` prints. ``offline``: model, data and the package transformers may be absent; what depends on them is
    then left out.

    ``free_gib``: memory for the comparison of the learner's model with transformers'; None: they are not compared.
    """
    files = [recipe.model.path, *(Path(source.path) for source in (*recipe.data.train, *recipe.data.validation))]
    can_tokenize = find_spec("transformers") is not None
    if offline and not (can_tokenize and all(path.exists() for path in files)):
        lines = check_recipe(recipe, world_size, offline=True).report
        return lines if can_tokenize else [*lines, ("not tried", "prompts and reward: transformers is not installed")]
    with prepare(recipe, world_size) as prepared:
        there = [*_golds(prepared), *_conversations(prepared), *_run_there(prepared)]
    if free_gib is not None:
        from megatron_rl.learner.compare_logits import witness

        prompt = list(prepared.train.first_of_each_source()[0].tokens)
        there.append(("witness", witness(recipe.model.path, prepared.checked.architecture, prompt, free_gib)))
    return [*prepared.report, *there]


def _golds(prepared: Prepared) -> list[tuple[str, str]]:
    """Which gold answers of a sample are not met by a right answer in another spelling."""
    kinds = [prompts for prompts in (prepared.train, prepared.validation) if len(prompts)]
    sample = [prompts[i] for prompts in kinds for i in range(0, len(prompts), -(-len(prompts) // TRIED_GOLDS))]
    lines = prepared.rewarder.unmet(sample)
    more = [f"and {len(lines) - SHOWN_SOURCES} more"] if len(lines) > SHOWN_SOURCES else []
    return [("golds", f"of {len(sample)} tried: {'; '.join([*lines[:SHOWN_SOURCES], *more])}")] if lines else []


def _conversations(prepared: Prepared) -> list[tuple[str, str]]:
    """How conversations of `rollout.function` go without an engine."""
    recipe, vocab_size = prepared.recipe, prepared.checked.architecture.vocab_size
    if recipe.rollout.function is None:
        return []
    from megatron_rl.rollout.conversation import load_talk
    from megatron_rl.rollout.generator import Sampling
    from megatron_rl.rollout.rehearsal import rehearse

    talk = load_talk(recipe.rollout.function, prepared.tokenizer)
    stops = resolve_stop_token_ids(recipe.rollout.stop_token_ids, recipe.model.path)
    prompt, sampling = prepared.train.first_of_each_source()[0], Sampling.from_config(recipe.rollout)
    return [("turns", rehearse(talk, prompt, sampling, stops, vocab_size))]


def _run_there(prepared: Prepared) -> list[tuple[str, str]]:
    """What `train` would go on from. Raises `InputError` where it would refuse to."""
    recipe = prepared.recipe
    directory = RunDirectory(recipe.run_dir)
    directory.check()
    if not has_begun(directory):
        return []
    comparison = compare(directory, recipe, contents(recipe, prepared.train, prepared.validation))
    refuse(directory, comparison)
    if is_complete(directory, recipe.num_steps):
        return [("there", f"{directory.root} is complete: nothing is left to do")]
    checkpoints = list_checkpoints(directory.checkpoints)
    step = begin_step(directory, checkpoints[-1] if checkpoints else None, recipe.num_steps)
    return [("there", f"{directory.root} goes on from step {step}"), *(("", line) for line in comparison.lines)]


def _data_line(train: PromptSet, validation: PromptSet, max_length: int, limit: int | None) -> tuple[str, str]:
    longest = max(train.lengths.max(initial=0), validation.lengths.max(initial=0))
    return (
        "data",
        f"{_count(train)} to train on ({_names(train)}), {_count(validation)} to validate on"
        + (f", the first {limit} of them used" if limit else "")
        + f"; the longest has {longest} of at most {max_length} tokens",
    )


def _trial_lines(trial: Trial, ends: str, tokenizer: Any) -> list[tuple[str, str]]:
    value = f"{trial.reward:g} for the response {_short(trial.response)}"
    tokens = tokenizer.convert_ids_to_tokens(trial.prompt.tokens)
    cut = ["…"] if len(tokens) > 2 * SHOWN_TOKENS else []
    tokens = [*tokens[:SHOWN_TOKENS], *cut, *tokens[-SHOWN_TOKENS:]] if cut else tokens
    return [
        ("prompt", f"{trial.prompt.id}: {_short(trial.prompt.text)}, {len(trial.prompt.tokens)} tokens{ends}"),
        ("tokens", " ".join(map(str, tokens))),
        ("answer", _short(trial.prompt.answer)),
        ("reward", value if trial.reward > 0 else f"{value}: a right answer is not rewarded"),
    ]


def _repeats(batch: BatchConfig, weights: Mapping[str, float] | None, train: PromptSet) -> list[str]:
    """What to say where a step asks for a prompt more than once. Each time it is sampled with other random numbers."""
    again = "; each is sampled anew, but its groups count as if they were different prompts"
    repeats = []
    for name, rows in train.rows_of_names(list(weights)).items() if weights else ():
        asked = weights[name] / sum(weights.values()) * batch.prompts_of_a_round
        if len(rows) and asked > len(rows):
            repeats.append(
                f"data.train: source {name} has {len(rows)} prompts, and a step asks for about {asked:.0f} of its "
                f"(weight {weights[name]:g}): each comes up to {math.ceil(asked / len(rows))} times in a step{again}. "
                "Lower its weight or batch.prompts, or add data"
            )
    most = batch.prompts_of_a_round * batch.max_generations
    if not repeats and batch.filter_groups and most > len(train):
        repeats.append(
            f"batch.max_generations: a step may ask for {most} prompts, and data.train has {len(train)}: later rounds "
            f"then ask for prompts again{again}"
        )
    return repeats


def _ends(model: Path, stop_token_ids: list[int] | None, tokenizer: Any) -> str:
    """What to say where responses do not end with the tokenizer's own end of sequence."""
    stops, own = resolve_stop_token_ids(stop_token_ids, model), tokenizer.eos_token_id
    if own is None or own in stops:
        return ""
    return f"; responses end with tokens {stops}, not with the tokenizer's {tokenizer.eos_token!r} ({own})"


def _names(prompts: PromptSet) -> str:
    names = prompts.data_sources
    return ", ".join(shown(name, 60)[1:-1] for name in names[:SHOWN_SOURCES]) + (
        f" and {len(names) - SHOWN_SOURCES} more" if len(names) > SHOWN_SOURCES else ""
    )


def _count(prompts: PromptSet) -> str:
    repeated = len(prompts) - prompts.num_different
    notes = [f"{prompts.num_dropped} too long, left out"] if prompts.num_dropped else []
    notes += [f"{prompts.num_cut} cut to the longest length"] if prompts.num_cut else []
    notes += [f"{repeated} of them repeat another row"] if repeated else []
    return f"{len(prompts)} prompts" + (f" ({'; '.join(notes)})" if notes else "")


def _short(text: str) -> str:
    """On one line, control characters as escapes."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else repr(text[:SHOWN_CHARACTERS]) + " …"
