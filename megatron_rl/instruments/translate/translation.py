"""A translation under way: the values of a configuration of theirs, the recipe that grows from it, and the account."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_rl.config import Recipe
from megatron_rl.config.explain import expand, explain
from megatron_rl.config.foreign_keys import READ_FROM
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.recipe import dispatcher_problems
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import readable, unresolved_names
from megatron_rl.model.architecture import KNOWN_MODELS

MAX_UNKNOWN_SHOWN = 40


@dataclass(frozen=True)
class Line:
    theirs: str
    value: Any
    ours: str = ""
    ours_value: Any = None
    note: str = ""


@dataclass
class Translation:
    """A recipe made of another project's keys, with a report. ``values``: what the source sets. ``defaults``: the
    project's.

    ``own``: the keys that the source itself sets, where it inherits others; None: all of them.
    """

    project: str
    source: str
    values: dict[str, Any]
    defaults: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    translated: list[Line] = field(default_factory=list)
    lost: list[Line] = field(default_factory=list)
    guessed: list[Line] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    own: set[str] | None = None
    _seen: set[str] = field(default_factory=set)

    def get(self, theirs: str) -> Any:
        """Their value: as set, else their default, also where the set one is not known, which is said."""
        self._seen.add(theirs)
        value = self.values.get(theirs, self.defaults.get(theirs))
        if isinstance(value, str) and theirs in self.values and (names := unresolved_names(value)):
            default = self.defaults.get(theirs)
            name = re.sub(r"\W", "", names[0]) if re.fullmatch(r"\$\{?\w+\}?", names[0]) else ""
            remedy = f"; --variable {name}=VALUE says it" if name else ""
            taken = f"{self.project}'s default {shown(default)} was taken" if default is not None else "it is left out"
            self.note(f"{theirs}: {readable(value)} is known only where the script runs: {taken}{remedy}")
            self.values[theirs] = default
            return default
        return value

    def mark(self, theirs: Iterable[str]) -> None:
        """Count keys as read by a rule."""
        self._seen.update(theirs)

    def is_set(self, theirs: str) -> bool:
        return theirs in self.values

    def take(self, theirs: str, ours: str, convert: Callable[[Any], Any] | None = None, note: str = "") -> Any:
        """Translate one key with a counterpart of the same meaning; ``convert`` changes its unit or spelling."""
        value = self.get(theirs)
        result = value if convert is None or value is None else convert(value)
        if result is not None:
            self.put(theirs, ours, result, note)
        return result

    def put(self, theirs: str, ours: str, value: Any, note: str = "") -> None:
        """Set our key to what follows from theirs (several are divided by commas)."""
        keys = theirs.split(", ")
        self._seen.update(keys)
        self._set(ours, value)
        their_values = [self.values.get(key, self.defaults.get(key)) for key in keys]
        if not any(key in self.values for key in keys):
            note = f"{self.project}'s default{'; ' + note if note else ''}"
        self.translated.append(
            Line(theirs, their_values[0] if len(their_values) == 1 else their_values, ours, value, note)
        )

    def guess(self, ours: str, value: Any, why: str) -> None:
        """Set our key to what does not follow from theirs."""
        self._set(ours, value)
        self.guessed.append(Line("", None, ours, value, why))

    def lose(self, theirs: str, effect: str, value: Any = None) -> None:
        """Say what becomes other because our recipes have nothing of that kind."""
        self._seen.add(theirs)
        value = self.values.get(theirs, self.defaults.get(theirs)) if value is None else value
        self.lost.append(Line(theirs, value, note=effect))

    def known_path(self, theirs: str, fallback: str) -> Any:
        """Their path, though a part of it is known only where the script runs."""
        value = self.values.get(theirs, self.defaults.get(theirs, fallback))
        if isinstance(value, str) and unresolved_names(value):
            self.note(f"{theirs}: {readable(value)} is known only where the script runs; put the path in by hand")
            value = re.sub(r"\ue000.*?\ue001", "", value).strip("/") or fallback
        return value

    def engine_ranks(self, theirs: str) -> None:
        """Translate the ranks of an engine; vLLM here gives none of them a copy of a key/value head."""
        size = int(number(self.get(theirs)) or 1)
        shape = KNOWN_MODELS.get(Path(str(self.recipe["model"]["path"])).name, {})
        heads = math.gcd(size, shape.get("num_key_value_heads", size), shape.get("num_attention_heads", size))
        if heads == size:
            self.put(theirs, "rollout.tensor_parallel", size)
        else:
            self.lose(theirs, f"{size} ranks of an engine do not divide the model's heads")
            self.guess("rollout.tensor_parallel", heads, f"in place of {size}; there are more engines")

    def cut_of_fsdp(self, size: int) -> None:
        """Guess tensor parallelism in place of FSDP: ``size`` or fewer ranks, that divide the model's heads."""
        shape = KNOWN_MODELS.get(Path(str(self.recipe["model"]["path"])).name, {})
        size = math.gcd(size, shape.get("num_key_value_heads", size), shape.get("num_attention_heads", size))
        why = "FSDP cuts the model over all GPUs, Megatron by matrices; `megatron-rl plan` proposes other layouts"
        self.guess("learner.parallel.tensor", size, why)

    def dispatcher(self, theirs: str, deepep: str = "") -> None:
        """Translate Megatron's token dispatcher. ``deepep``: the key that turns DeepEP on, which only `flex` uses."""
        kind, on = self.get(theirs), bool(deepep) and self.get(deepep) is True
        if dispatcher_problems(ParallelConfig.model_construct(**self.recipe["learner"]["parallel"]), kind):
            self.lose(theirs, "not with this layout; learner.token_dispatcher alltoall gives the same numbers")
            return
        if kind in ("alltoall", "allgather", "flex"):
            self.put(theirs, "learner.token_dispatcher", kind)
        elif kind is not None:
            self.lose(theirs, "learner.token_dispatcher is alltoall, allgather or flex; numbers are the same")
        if kind == "flex" and not on:
            self.note("learner.token_dispatcher: flex uses DeepEP, which has to be installed")

    def fp32_router(self, theirs: str) -> None:
        """Translate Megatron's type of the router."""
        if (kind := self.get(theirs)) == "fp32":
            self.put(theirs, "precision.fp32_router", True)
        elif kind is not None:
            self.lose(theirs, "the router computes in the model's type, or in fp32 (precision.fp32_router)")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def rest(self, effects: list[tuple[str, str]], is_whole: bool) -> None:
        """Sort the keys that no rule read, by ``effects``: pattern and effect, "" where there is none.

        ``is_whole``: the source is a resolved configuration, with thousands of keys at their defaults.
        """
        unknown = []
        for key in sorted(set(self.values) - self._seen):
            value = self.values[key]
            effect = next((effect for pattern, effect in effects if re.fullmatch(pattern, key)), None)
            if effect == "" or value in (None, False, "", []) or key.endswith("_target_"):
                self.idle.append(key)
            elif effect is not None:
                self.lost.append(Line(key, value, note=effect))
            else:
                unknown.append(key)
        if is_whole and len(unknown) > MAX_UNKNOWN_SHOWN:
            sections = sorted({key.rpartition(".")[0] for key in unknown})
            self.note(f"{len(unknown)} further keys have no rule here; they stand in: {', '.join(sections)}")
            return
        self.lost += [Line(key, self.values[key], note="no rule here knows this key") for key in unknown]

    def _set(self, ours: str, value: Any) -> None:
        at = self.recipe
        *path, last = ours.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value

    def check(self) -> None:
        """Raise InputError where the recipe would not load."""
        try:
            Recipe.model_validate(self._filled())
        except ValidationError as error:
            raise InputError(
                f"{self.source}: its translation is not a valid recipe:\n{explain(error, Recipe)}\n\n{self.report()}"
            ) from error

    def _filled(self) -> dict[str, Any]:
        from megatron_rl.config.objective import with_max_response_length

        values = expand(parse(yaml.safe_dump(self.recipe))[0], Recipe)
        longest = values.get("rollout", {}).get("max_response_length", 1024)
        return {**values, "objective": with_max_response_length(values.get("objective"), longest)}

    def report(self) -> str:
        """What was translated, what has no counterpart, what is guessed, and what the source does not say."""
        version, commit, date = READ_FROM[self.project]
        parts = [f"{self.project} (rules read from {version}, {commit}, {date}): {Path(self.source).name}"]
        done = [
            f"{line.theirs}: {shown(line.value)} → {line.ours}: {shown(line.ours_value)}"
            + (f" ({line.note})" if line.note else "")
            for line in self.translated
        ]
        parts += _section("Translated", done)
        parts += _section(
            "Without counterpart", [f"{line.theirs}: {shown(line.value)}: {line.note}" for line in self.lost]
        )
        parts += _section("Guessed", [f"{line.ours}: {shown(line.ours_value)}: {line.note}" for line in self.guessed])
        parts += _section("Not known from the file", self.notes)
        own = [key for key in self.idle if self.own is None or key in self.own]
        if rest := len(self.idle) - len(own):
            own.append(f"{rest} keys of the files that it inherits from")
        parts += _section("Without effect here", [", ".join(own)] if own else [])
        told = {key for line in (*self.translated, *self.lost) for key in line.theirs.split(", ")} | set(self.idle)
        noted = "\n".join(self.notes)
        silent = sorted(key for key in self._seen & set(self.values) - told if key not in noted)
        parts += _section("Read with others, or as the default", [", ".join(silent)] if silent else [])
        return "\n".join(parts)

    def text(self) -> str:
        """The recipe as a file, with the report as its header."""
        header = "".join(f"# {line}".rstrip() + "\n" for line in self.report().splitlines())
        return header + yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True, width=110)


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def shown(value: Any) -> str:
    """A value on one line, shortened."""
    text = readable(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def flattened(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values of nested sections by their dotted keys; an empty section has none."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def number(value: Any) -> float | int | None:
    """A number, also one written as text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        return None
    return int(parsed) if re.fullmatch(r"[-+]?\d+", str(value).strip()) else parsed


def run_name(text: str, nodes: int, gpus: int) -> str:
    """A name that recipes may have, with the size of the job, from which `plan` reads it."""
    text = re.sub(r"[-_]?\b\d+n\d+g\b", "", readable(text))  # their own
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"
    return f"{name[:160]}-{nodes}n{gpus}g"
