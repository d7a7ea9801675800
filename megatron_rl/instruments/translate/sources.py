"""What a file of another project sets: verl's and slime's launch scripts, and configurations of verl and NeMo-RL.

Configurations inherit from others (`defaults`) and refer to their own values (`${policy.model_name}`). A file's parents
are read first, each from the folder of the file that names it, then the file over them; `_override_: true` in a section
drops what its parents have there. References are filled in last: keys, relative keys (`${.temperature}`), and the
functions add, mul, div and max. What depends on the machine, such as `${oc.env:NAME}`, is taken from ``variables``, or
stays in the text as `shell.unresolved_names` finds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import Script, read_script, readable, unresolved_names
from megatron_rl.instruments.translate.translation import Source

DEEPEST = 16  # files that inherit from each other, and references that lead to references
VERL = ("actor_rollout_ref", "algorithm", "trainer", "data", "reward", "reward_model", "critic", "distillation")
_OVERRIDE = re.compile(rf"\+*({'|'.join(VERL)}|custom_reward_function|ray_kwargs|model_engine|async_training)[\w.]*=")


def read_verl(path: Path, variables: Mapping[str, str]) -> Source:
    """What a launch script gives verl, or what verl's configuration at ``path`` says."""
    if path.suffix in (".yaml", ".yml"):
        nested, _ = _load(path, (), follows=False)
        if not set(nested) & set(VERL):
            raise InputError(f"{path}: none of verl's sections stands in it; expected {', '.join(VERL[:4])}")
        return _of_verl(path, dict(flattened(resolved(nested, variables))), [])
    script = read_script(path, variables)
    of_verl = [c for c in script.commands if any("verl" in w or "main_ppo" in w or "main_dapo" in w for w in c)]
    words = max(of_verl or script.commands or [[]], key=lambda c: sum(_OVERRIDE.match(word) is not None for word in c))
    given = [word.lstrip("+").partition("=") for word in words if _OVERRIDE.match(word)]
    values = {key: _value(text) for key, _, text in given}
    if not values:
        raise InputError(f"{path}: no command with overrides of verl in it (such as data.train_batch_size=1024)")
    empty = [key for key, value in values.items() if value == ""]
    notes = [f"{key}: empty where the script was followed; verl's default was taken" for key in empty]
    values |= dict.fromkeys(empty)
    values |= {word: True for word in words if word.startswith("verl.") and "async" in word}
    return _of_verl(path, _folded(values), [*script.notes, *notes])


def _of_verl(path: Path, values: dict[str, Any], notes: list[str]) -> Source:
    actor = "actor_rollout_ref.actor"
    is_megatron = values.get(f"{actor}.strategy") == "megatron" or any(
        key.startswith(f"{actor}.megatron.") for key in values
    )
    return Source("verl", path, values, is_megatron, notes=notes)


def read_slime(path: Path, variables: Mapping[str, str]) -> Source:
    """The arguments that the script at ``path`` gives slime; one without a value is True, one with several a list."""
    script = read_script(path, variables)
    mains = ("train.py", "train_async.py")
    starts = [(c, i) for c in script.commands for i, word in enumerate(c) if word.rsplit("/", 1)[-1] in mains]
    if not starts:
        raise InputError(f"{path}: no command that starts slime in it; expected one with {' or '.join(mains)}")
    command, at = max(starts, key=lambda start: len(start[0]))
    values = _arguments(command[at + 1 :], script)
    if not any(key in values for key in ("--hf-checkpoint", "--rollout-batch-size", "--prompt-data")):
        found = ", ".join(values) or "none"
        raise InputError(
            f"{path}: {command[at]} has no arguments of slime, such as --rollout-batch-size; found: {found}"
        )
    if (kind := values.pop("--loss-type", "policy_loss")) != "policy_loss":
        raise InputError(f"{path}: --loss-type {kind}; recipes are of reinforcement learning (policy_loss)")
    main = command[at].rsplit("/", 1)[-1]
    return Source("slime", path, values | ({main: True} if "async" in main else {}), True, notes=script.notes)


def read_nemo_rl(path: Path, variables: Mapping[str, str]) -> Source:
    """What NeMo-RL's configuration at ``path`` says. The other backend and what is not enabled are off."""
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"{path}: NeMo-RL's configurations are .yaml files; its scripts name one with --config")
    nested, files = _load(path, ())
    if "grpo" not in nested and "distillation" not in nested:
        sections = ", ".join(nested) or "nothing"
        raise InputError(
            f"{path}: no section grpo, and so no reinforcement learning by GRPO, nor distillation; found: {sections}"
        )
    values, notes = dict(flattened(resolved(nested, variables))), []
    if "grpo" not in nested:
        values = {re.sub(r"^distillation\.(?!topk)", "grpo.", key): value for key, value in values.items()}
        values |= {"grpo.adv_estimator.name": "opd", "on_policy_distillation.enabled": True}
        values["loss_fn.reference_policy_kl_penalty"] = 0
        values = {key: value for key, value in values.items() if not re.match(r"teacher\.(?!model_name$)", key)}
        notes.append("section distillation was read as section grpo, with the teacher alone")
    items = values.get("policy.scheduler")
    for item in items if isinstance(items, list) else []:
        name = f"policy.scheduler.{str(item.get('name', '')).rsplit('.', 1)[-1]}"
        values |= {f"{name}.{key}": value for key, value in (item.get("kwargs") or {}).items()}
    values.pop("policy.scheduler", None)
    closed = [key.removesuffix("enabled") for key, value in values.items() if key.endswith(".enabled") and not value]
    closed = [section for section in closed if not section.endswith(("colocated.", "checkpointing."))]
    is_megatron = values.get("policy.megatron_cfg.enabled") is True
    closed += (
        ["policy.dtensor_cfg.", "policy.optimizer.", "policy.scheduler."] if is_megatron else ["policy.megatron_cfg."]
    )
    notes += [f"read with what it inherits from: {', '.join(file.name for file in files[:-1])}"] if files[1:] else []
    return Source("NeMo-RL", path, values, is_megatron, {key for key in values if key.startswith(tuple(closed))}, notes)


def flattened(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested sections by their dotted keys; arguments of a chat template stay together."""
    for key, value in values.items():
        if isinstance(value, Mapping) and not key.endswith("chat_template_kwargs"):
            yield from flattened(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value or None if isinstance(value, Mapping) else value


def _folded(values: dict[str, Any]) -> dict[str, Any]:
    """Put arguments of a chat template, given one by one, together."""
    whole: dict[str, Any] = {}
    for key, value in values.items():
        head, mark, name = key.partition("chat_template_kwargs.")
        if mark:
            whole.setdefault(head + mark.rstrip("."), {})[name] = value
        else:
            whole[key] = value
    return whole


def _arguments(words: Sequence[str], script: Script) -> dict[str, Any]:
    given: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        unknown = unresolved_names(word)
        if re.match(r"--[A-Za-z]", word):
            key, separator, value = word.partition("=")
            key = key.replace("_", "-")
            given[key] = [_value(value)] if separator else []
        elif unknown and readable(word) == unknown[0] and re.fullmatch(r"\$\{\w+\[[@*]\]\}", unknown[0]):
            script.notes.append(f"{unknown[0]}: the script does not set this array, and so its arguments are not known")
        elif key and word not in ("&", "2>&1"):
            given[key].append(_value(word))
        elif word.strip():
            script.notes.append(f"{readable(word)}: stands before any argument, and was not understood")
    return {key: (values[0] if len(values) == 1 else values) if values else True for key, values in given.items()}


def _value(text: str) -> Any:
    if unresolved_names(text):
        return text
    try:
        value = parse(f"value: {text}")[0]["value"]
    except (yaml.YAMLError, InputError, ValueError):
        return text
    return value


def _load(path: Path, children: tuple[Path, ...], follows: bool = True) -> tuple[dict[str, Any], list[Path]]:
    """The values of ``path`` over those of its parents, if it ``follows`` them, and the files read."""
    if path.resolve() in children or len(children) >= DEEPEST:
        raise InputError(f"{path}: defaults: it inherits from itself, by way of {children[-1]}")
    try:
        values, _ = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        by = f"; {children[-1]} names it under `defaults`: give the file in its own folder" if children else ""
        raise InputError(f"{path}: cannot be read as YAML: {error}{by}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of sections, found {type(values).__name__}")
    if not follows:
        return values, [path]
    parents = values.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    files: list[Path] = []
    for parent in [parents] if isinstance(parents, str) else parents:
        inherited, read = _load(path.parent / str(parent), (*children, path.resolve()))
        merged, files = _merged(merged, inherited), [*files, *read]
    return _merged(merged, values), [*files, path]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = {} if value.get("_override_") is True else result.get(key)
            rest = {name: inner for name, inner in value.items() if name != "_override_"}
            result[key] = _merged(below if isinstance(below, Mapping) else {}, rest)
        else:
            result[key] = value
    return result


def resolved(values: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return ``values`` with their references filled in."""
    return _Resolver(values, variables).section(values, ())


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}


class _Resolver:
    def __init__(self, values: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.values, self.variables = values, variables

    def section(self, value: Any, place: tuple[str, ...], depth: int = 0) -> Any:
        """Return ``value``, found at the keys ``place``, with its references filled in."""
        if isinstance(value, Mapping):
            return {key: self.section(inner, (*place, str(key)), depth) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.section(inner, place, depth) for inner in value]
        return self._text(value, place, depth) if isinstance(value, str) else value

    def _text(self, text: str, place: tuple[str, ...], depth: int) -> Any:
        parts, at = [], 0
        while (start := text.find("${", at)) >= 0:
            end = _closing(text, start)
            if end < 0:
                break
            value = self._reference(text[start + 2 : end], place, depth)
            if start == 0 and end == len(text) - 1:
                return value
            parts += [text[at:start], str(value)]
            at = end + 1
        return "".join([*parts, text[at:]])

    def _reference(self, inside: str, place: tuple[str, ...], depth: int) -> Any:
        unknown = f"\ue000${{{inside}}}\ue001"
        if depth >= DEEPEST:
            return unknown
        inside = str(self._text(inside, place, depth + 1)) if "${" in inside else inside
        name, is_call, rest = inside.partition(":")
        if is_call:
            return self._call(name.strip(), [part.strip() for part in rest.split(",")], unknown)
        dots = len(name) - len(name.lstrip("."))
        path = name.lstrip(".").split(".")
        keys = [*place[: len(place) - dots], *path] if dots else path
        value: Any = self.values
        for key in keys:
            if not isinstance(value, Mapping) or key not in value:
                return unknown
            value = value[key]
        return self.section(value, tuple(keys), depth + 1)

    def _call(self, name: str, arguments: list[str], unknown: str) -> Any:
        if name == "oc.env":
            default = arguments[1] if len(arguments) > 1 else unknown
            return self.variables.get(arguments[0], default)
        try:
            result = _FUNCTIONS[name](*(float(argument) for argument in arguments))
        except (KeyError, ValueError, TypeError, ZeroDivisionError):
            return unknown
        return int(result) if math.isfinite(result) and result == int(result) else result


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"\$\{|\}").finditer(text, start):
        depth += 1 if match[0] == "${" else -1
        if depth == 0:
            return match.start()
    return -1
