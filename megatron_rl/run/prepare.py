"""Everything that a run needs before its engines: `train` and `check` both start here, so that they agree.

`check_recipe` needs no engine and no tokenizer. `prepare` goes on from there: recipe, model, layout, tokenizer, prompts
and reward are loaded as the run will use them, and the reward is called once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights, resolve_stop_token_ids
from megatron_rl.checkpoint.manifest import list_checkpoints
from megatron_rl.config import Recipe
from megatron_rl.config.base import how_to_download
from megatron_rl.config.model_rules import (
    beyond_exact,
    contract,
    cpu_problems,
    cuda_problems,
    layout_problems,
    model_problems,
    refuse_recipe,
    smallest_world,
)
from megatron_rl.config.objective import label_of, parts_without_effect, user_functions
from megatron_rl.config.recipe import has_mismatch, section_problems
from megatron_rl.config.teacher_rules import teacher_memory_problems
from megatron_rl.data import PromptSet, check_source, check_vocabulary, load_tokenizer, load_train, load_validation
from megatron_rl.data.prompts import chat_template
from megatron_rl.errors import InputError, shown
from megatron_rl.model.architecture import (
    KNOWN_MODELS,
    Architecture,
    how_to_get,
    read_architecture,
    read_object,
    shape_of,
    unknown_config_keys,
)
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.monitor.sinks import missing_clients
from megatron_rl.process.devices import default_device
from megatron_rl.rewards import Rewarder, check_function, check_reward
from megatron_rl.rewards.rewarder import Trial
from megatron_rl.run.identity import begin_step, compare, contents, has_begun, is_complete, refuse

if TYPE_CHECKING:
    from megatron_rl.rollout.conversation import Talk

SHOWN_CHARACTERS, SHOWN_SOURCES, SHOWN_TOKENS = 300, 8, 24  # of a prompt; of the data sources; at each end of a prompt
TRIED_GOLDS = 200  # of the training set and of the validation set


@dataclass(frozen=True)
class CheckedRecipe:
    architecture: Architecture
    world_size: int | None
    report: list[tuple[str, str]]  # (name, value) for a person to read


def check_recipe(recipe: Recipe, world_size: int | None = None, *, offline: bool = False) -> CheckedRecipe:
    """Check model, layout, batch arithmetic, lengths, precision and data files of ``recipe`` in seconds, without a GPU.

    Args:
        world_size: ranks of the job; None if unknown: only check what is independent of the number of ranks.
        offline: use the shape of a known model (`KNOWN_MODELS`) if its folder is absent, and skip absent
            data files.

    Raises:
        InputError: lists every problem, one per line.
    """
    architecture, assumed = shape_of(recipe.model.path) if offline else (_architecture(recipe.model.path), False)
    absent = [f"model {recipe.model.path} (its shape is known)"] if assumed else []
    device = recipe.runtime.device
    if device == "auto":  # a machine without a GPU may be where the job is submitted
        here = default_device()
        device = None if here == "cpu" else here
    problems = model_problems(recipe, architecture, world_size, device)
    folder_notes: list[str] = []
    if not assumed:
        try:
            folder_notes = check_folder(recipe.model.path, architecture, recipe.rollout.stop_token_ids)
        except InputError as error:
            problems.append(str(error))
    trials = [partial(check_reward, recipe.reward, recipe.rollout.max_response_length)]
    if recipe.rollout.function is not None:
        trials.append(partial(check_function, recipe.rollout.function, "rollout.function"))
    if user_functions(recipe.objective):
        from megatron_rl.objective.trial import check_user_functions  # needs torch, which `check` can do without

        trials.append(partial(check_user_functions, recipe.objective))
    for trial in trials:
        try:
            trial()
        except InputError as error:
            problems.append(str(error))
    not_read: list[str] = []
    for kind in ("train", "validation"):
        for source in getattr(recipe.data, kind):
            if offline and not Path(source.path).exists():
                absent.append(f"data.{kind} {source.path}")
                continue
            try:
                if unused := check_source(source).unused:
                    names = ", ".join(shown(name, 60)[1:-1] for name in unused)
                    not_read.append(f"data.{kind} {source.path}: {names}")
            except InputError as error:
                problems.append(f"data.{kind}: {error}")
    for key, path in second_models(recipe).items():
        if not path.is_dir():
            absent.append(f"{key} {path}")
            problems += [] if offline else [f"{key}: {path}: no such folder; give a checkpoint in Hugging Face layout"]
        elif _is_on_learner(recipe, key):
            with _about(key, problems):
                fits = layout_problems(recipe.learner.parallel, read_architecture(path), world_size)
                problems += [f"{key}: {path}: {problem}" for problem in fits]
    refuse_recipe(recipe, problems)
    report = _report(recipe, architecture, world_size)
    if folder_notes:
        report.append(("folder", "; ".join(folder_notes)))
    on_cuda = cuda_problems(recipe.rollout, architecture) + teacher_memory_problems(recipe)
    either = {"on a CPU": cpu_problems(recipe.rollout, architecture), "on CUDA": on_cuda}
    for where, lacks in either.items() if device is None else ():
        if lacks:
            report.append((where, f"this recipe cannot run: {'; '.join(lacks)}"))
    if not_read:
        report.append(("not read", "; ".join(not_read)))
    if absent:
        report.append(("not here", ", ".join(absent)))
    return CheckedRecipe(architecture, world_size, report)


def _architecture(path: Path) -> Architecture:
    """Return `read_architecture`. The error for a missing folder explains how to download it or check without it."""
    if path.exists():
        return read_architecture(path)
    command = how_to_get(path)
    download = f"download it with `{command}`" if command else "download a checkpoint in Hugging Face layout there"
    if not command and (cache := how_to_download(str(path), "model")):
        download += f", or, if it is a name of the Hugging Face hub, into its cache with `{cache}`"
    raise InputError(
        f"model.path: {path}: no such folder; {download}. `megatron-rl check RECIPE --offline` checks the rest of the "
        f"recipe without it, for models whose shape is known: {', '.join(KNOWN_MODELS)}"
    )


def check_folder(path: Path, architecture: Architecture, stop_token_ids: list[int] | None) -> list[str]:
    """Compare the model's folder with the learner's model: headers of tensors, end-of-sequence ids.

    ``stop_token_ids``: those of `rollout`; None where the model's own count. Returns notes, such as unread keys. Raises
    `InputError` for files that the engines would read as another model.
    """
    extras = check_weights(HFFolder(path), architecture)
    stops = resolve_stop_token_ids(stop_token_ids, path)
    notes = [f"names, shapes and types of its tensors are the learner's, responses end with tokens {stops}", *extras]
    if unknown := unknown_config_keys(path):
        notes.append(f"config.json has keys that no engine here is known to read: {', '.join(unknown)}")
    return notes


def _report(recipe: Recipe, a: Architecture, world_size: int | None) -> list[tuple[str, str]]:
    parallel, rollout = recipe.learner.parallel, recipe.rollout
    experts = f", {a.num_experts} experts top-{a.experts_per_token}" if a.is_moe else ", dense"
    smallest = smallest_world(parallel, rollout)
    data = (world_size or smallest) // (parallel.tensor * parallel.pipeline * parallel.context)
    context = f"context {parallel.context}, " if parallel.context > 1 else ""
    idle = parts_without_effect(recipe.objective, recipe.batch.minibatches, has_mismatch(recipe))
    return [
        ("model", f"{a.model_type}: {a.num_layers} layers, width {a.hidden_size}{experts}"),
        (
            "layout",
            (f"{world_size} ranks" if world_size else f"{smallest} ranks or a multiple, which --ranks checks")
            + f": tensor {parallel.tensor}, pipeline {parallel.pipeline}, {context}"
            f"expert {parallel.expert}, data {data}",
        ),
        (
            "step",
            f"{recipe.batch.prompts} prompts × {rollout.num_samples} samples = {recipe.num_sequences} sequences, "
            f"{recipe.batch.minibatches} update(s) of {recipe.num_sequences // recipe.batch.minibatches}",
        ),
        ("run", f"{recipe.length}, into {recipe.run_dir}"),
        *((row.aspect, str(row)) for row in contract(recipe, a)),
        *([("routing", recipe.routing.describe())] if recipe.routing.is_on else []),
        (
            "objective",
            f"{recipe.objective.advantage}, {label_of(recipe.objective.policy_term, 'name')}, "
            f"{'+'.join(label_of(c, 'mode') for c in recipe.objective.correction) or 'no correction'}, "
            f"{recipe.objective.aggregation}",
        ),
        *([("no effect", "; ".join(idle))] if idle else []),
    ]


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
    refuse_recipe(recipe, missing_clients(recipe.monitor.sinks))
    tokenizer = load_tokenizer(str(recipe.model.path))
    if recipe.rollout.function is not None:
        talk_of(recipe, tokenizer)
    train = load_train(recipe.data, tokenizer)
    if (prompts := recipe.batch.prompts_of_a_round) > len(train):
        key = "generation_prompts" if recipe.batch.generation_prompts else "prompts"
        raise InputError(
            f"batch.{key}: {prompts} prompts a step, but data.train has {len(train)}; a step would "
            f"sample a prompt twice. Lower batch.{key} or add data"
        )
    recipe, notes = in_steps(recipe, len(train))
    has_validation = bool(recipe.data.validation)
    validation = load_validation(recipe.data, recipe.validation, tokenizer) if has_validation else PromptSet.of(())
    for prompts_of_a_kind in (train, validation):
        check_vocabulary(prompts_of_a_kind, checked.architecture.vocab_size)
    check_second_models(recipe, tokenizer, checked.architecture.vocab_size, set(train.data_sources))
    first = [*train.first_of_each_source(), *validation.first_of_each_source()]
    names = {prompt.data_source for prompt in first}
    with Rewarder(recipe.reward, recipe.rollout.max_response_length, names) as rewarder:
        trial = rewarder.try_on(first)
        about_data = [
            _data_line(train, validation, recipe.data.prompt.max_length, recipe.validation.limit),
            *_trial_lines(trial, _ends(recipe.model.path, recipe.rollout.stop_token_ids, tokenizer), tokenizer),
        ]
        report = [*checked.report, *notes, *about_data]
        yield Prepared(recipe, checked, tokenizer, train, validation, rewarder, report)


def second_models(recipe: Recipe) -> dict[str, Path]:
    """Folders of models beside the policy's, by the keys that name them."""
    models = {"reference": recipe.reference, **({} if recipe.teacher is None else recipe.teacher.models)}
    paths = {f"{key}.path": model.path for key, model in models.items() if model is not None}
    return {key: path for key, path in paths.items() if path not in (None, recipe.model.path)}


def _is_on_learner(recipe: Recipe, key: str) -> bool:
    """Whether the learner's ranks hold the second model that ``key`` names."""
    return key == "reference.path" or (key == "teacher.path" and recipe.teacher.engine == "learner")


@contextlib.contextmanager
def _about(key: str, problems: list[str]) -> Iterator[None]:
    """Inside, what is wrong with a model's folder is a problem of ``key``: readers of folders call it model.path."""
    try:
        yield
    except InputError as error:
        problems.append(f"{key}: {str(error).removeprefix('model.path: ')}")


def _folder_problems(recipe: Recipe, path: Path, on_learner: bool) -> list[str]:
    """Why an engine cannot hold the second model of the folder ``path``."""
    architecture = read_architecture(path)
    check_weights(HFFolder(path), architecture)
    is_exact = on_learner and recipe.rollout.engine == "exact"
    beyond = beyond_exact(architecture, recipe.learner.parallel.tensor) if is_exact else None
    return [f"{path}: rollout.engine: exact, but {beyond}, which it does not compute"] if beyond else []


def check_second_models(recipe: Recipe, tokenizer: Any, vocab_size: int, data_sources: set[str]) -> None:
    """Raise `InputError` where a second model reads other tokens than the policy writes, or teaches nothing."""
    problems = []
    for key, path in second_models(recipe).items():
        with _about(key, problems):
            config, other = read_object(path / "config.json"), load_tokenizer(str(path))
            size = config.get("text_config", config).get("vocab_size")
            exactly = _is_on_learner(recipe, key)
            if not isinstance(size, int) or size < vocab_size or (exactly and size > vocab_size):
                problems.append(
                    f"{key}: {path / 'config.json'} has vocab_size {shown(size, 60)}, the policy's {vocab_size}; use a "
                    f"model with as many{'' if exactly else ' or more, which can read all tokens of the policy'}"
                )
            elif differing := set(other.get_vocab().items()) ^ set(tokenizer.get_vocab().items()):
                text, number = min(differing, key=lambda pair: pair[::-1])
                problems.append(
                    f"{key}: {path} has another tokenizer than the policy's model: {len(differing)} entries differ, "
                    f"the first is {shown(text, 60)} with id {number}; it would read other text than was written; use "
                    "a model of the same tokenizer"
                )
            elif exactly or recipe.teacher.models[key.removesuffix(".path")].engine == "vllm":
                problems += [f"{key}: {problem}" for problem in _folder_problems(recipe, path, exactly)]
    for i, teacher in enumerate(recipe.teacher.by_source if recipe.teacher is not None else ()):
        if unknown := sorted(set(teacher.data_sources) - data_sources):
            problems.append(
                f"teacher.by_source.{i}.data_sources: {', '.join(unknown)} is of no training prompt; theirs are "
                f"{', '.join(sorted(data_sources)[:SHOWN_SOURCES])}"
            )
    refuse_recipe(recipe, problems)


def talk_of(recipe: Recipe, tokenizer: Any) -> Talk:
    """Return `rollout.function`, with the chat template of its endpoints: the prompts', else the tokenizer's."""
    from megatron_rl.rollout.conversation import load_talk  # needs torch, which `check` can do without

    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    template = chat_template(tokenizer, recipe.data.prompt) or own
    return load_talk(recipe.rollout.function, tokenizer, template, recipe.data.prompt.chat_template_args)


def in_steps(recipe: Recipe, num_prompts: int) -> tuple[Recipe, list[tuple[str, str]]]:
    """Return ``recipe`` with the steps that `num_epochs` takes over ``num_prompts``, and what to say of it."""
    if recipe.num_epochs is None:
        return recipe, []
    steps = math.ceil(recipe.num_epochs * num_prompts / recipe.batch.prompts)
    counted = recipe.model_copy(update={"num_steps": steps, "num_epochs": None})
    refuse_recipe(recipe, section_problems(counted))
    each = f"{num_prompts} prompts, {recipe.batch.prompts} a step"
    return counted, [("steps", f"num_epochs {recipe.num_epochs:g} over {each}: {counted.length}")]


def report(
    recipe: Recipe, world_size: int | None, offline: bool = False, free_gib: float | None = None
) -> list[tuple[str, str]]:
    """What `check` prints. ``offline``: model, data and the package transformers may be absent; what depends on them is
    then left out.

    ``free_gib``: memory for the comparison of the learner's model with transformers'; None: they are not compared.
    """
    files = [
        recipe.model.path,
        *second_models(recipe).values(),
        *(Path(source.path) for source in (*recipe.data.train, *recipe.data.validation)),
    ]
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
    from megatron_rl.rollout.generator import Sampling
    from megatron_rl.rollout.rehearsal import rehearse

    talk = talk_of(recipe, prepared.tokenizer)
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
    notes += [f"{repeated} of them repeat another row"] if repeated else []
    return f"{len(prompts)} prompts" + (f" ({'; '.join(notes)})" if notes else "")


def _short(text: str) -> str:
    """On one line, control characters as escapes."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else repr(text[:SHOWN_CHARACTERS]) + " …"
