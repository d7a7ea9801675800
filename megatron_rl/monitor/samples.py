"""`samples.jsonl`: a few responses of a run as they were sampled, for a person to read.

What a model wrote is hostile text: the file is ASCII, and whoever prints it goes through `printable`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.monitor import SamplesConfig
from megatron_rl.errors import InputError
from megatron_rl.monitor.jsonl import append_whole, drop_from
from megatron_rl.types import Group, Prompt, Rollout
from megatron_rl.types import Sequence as Trained

# Control characters of terminals but for line feed and tab, characters that turn the direction of text, line separators
# that are no line feed, and halves of surrogate pairs.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def printable(text: str) -> str:
    """``text`` with every character that could do something to a terminal or a page written as an escape."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def shorten(text: str, max_chars: int) -> str:
    """``text``, or its beginning and its end with a note of how many characters are left out in between."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, max_chars // 2
    return f"{text[:head]} […{len(text) - max_chars} characters…] {text[len(text) - tail :]}"


def choose(groups: Sequence[Group], number: int) -> list[tuple[str, int]]:
    """Which of a step's responses to show, and why: places in the order of groups and their rollouts.

    The best and the worst rewarded, the longest, then the first ones; no response twice.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return []
    places = range(len(rollouts))
    wanted = [
        ("best", max(places, key=lambda i: rollouts[i].reward)),
        ("worst", min(places, key=lambda i: rollouts[i].reward)),
        ("longest", max(places, key=lambda i: rollouts[i].length)),
        *(("next", i) for i in places[: number + 3]),
    ]
    chosen: dict[int, str] = {}
    for why, place in wanted:
        chosen.setdefault(place, why)
    return [(why, place) for place, why in list(chosen.items())[:number]]


def collect(
    step: int,
    groups: Sequence[Group],
    config: SamplesConfig,
    ratios: Mapping[int, dict[str, float] | None] | None = None,
) -> list[dict]:
    """The samples of a step. ``ratios``: `rho_summary` by place, where a batch was learned from."""
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return [
        {
            "step": step,
            "why": why,
            **describe(*pairs[place], config.max_chars),
            "rho": (ratios or {}).get(place),
        }
        for why, place in choose(groups, config.number)
    ]


def describe(prompt: Prompt, rollout: Rollout, max_chars: int) -> dict[str, Any]:
    """One response and what there is to know of it; ``length`` in tokens, ``finish`` as `Rollout.finish_reason`."""
    return {
        "prompt_id": prompt.id,
        "sample": rollout.sample,
        "reward": rollout.reward,
        "raw_reward": rollout.raw_reward,
        "finish": rollout.finish_reason,
        "length": rollout.length,
        "answer": shorten(prompt.answer, max_chars),
        "prompt": shorten(prompt.text, max_chars),
        "response": shorten(rollout.text, max_chars),
    }


def rho_summary(sequence: Trained) -> dict[str, float] | None:
    """Mean, standard deviation and extremes of rho = po / mu over the response's tokens.

    None where the learner kept no log-probs (`recorder.record_batches: off` with one update per batch).
    """
    kept = sequence.current_logprobs if sequence.old_logprobs is None else sequence.old_logprobs
    if kept is None or not len(kept):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        rho = np.exp(kept.astype(np.float64) - sequence.inference_logprobs)
        found = {"mean": rho.mean(), "std": rho.std(), "min": rho.min(), "max": rho.max()}
    return {name: float(value) for name, value in found.items()}


class SampleFile:
    """Appends samples to ``path``, which never grows beyond ``max_mib``: the older half goes to make room."""

    def __init__(self, path: Path, max_mib: float) -> None:
        self.path, self.max_bytes = path, int(max_mib * 2**20)

    def resume_at(self, step: int) -> None:
        """Drop the samples of ``step`` and later."""
        drop_from(self.path, step)

    def write(self, samples: Sequence[dict[str, Any]]) -> None:
        """Append them, each whole; those that do not fit into half the size are left out. OSError for a full disk."""
        data = b""
        for sample in samples:
            line = _encode(sample)
            if len(data) + len(line) <= self.max_bytes // 2:
                data += line
        if self.path.exists() and self.path.stat().st_size + len(data) > self.max_bytes:
            self._make_room()
        if data:
            append_whole(self.path, data)

    def _make_room(self) -> None:
        kept: list[bytes] = []
        room = self.max_bytes // 2
        for line in reversed(self.path.read_bytes().splitlines(keepends=True)):
            if (room := room - len(line)) < 0:
                break
            kept.append(line)
        partial = self.path.with_name(f".partial-{self.path.name}")
        partial.write_bytes(b"".join(reversed(kept)))
        os.replace(partial, self.path)


def _encode(sample: dict[str, Any]) -> bytes:
    """One line of ASCII. Numbers that JSON does not have are null."""
    finite = {
        key: {name: number if np.isfinite(number) else None for name, number in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in sample.items()
    }
    return json.dumps(finite).encode("ascii") + b"\n"


def read_samples(file: Path) -> Iterator[dict[str, Any]]:
    """The samples of a run's file, the oldest first. A torn last line is left out; `InputError` where there is none."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read ({error.strerror}); monitor.samples.every says when they are written"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            sample = json.loads(line)
            yield {"step": sample["step"], "response": sample["response"], "prompt": sample["prompt"], **sample}
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return
            raise InputError(f"{file}, line {number}: not a sample ({error!r}); delete or repair the line") from error


def render(sample: dict[str, Any]) -> str:
    """A sample for a terminal: one line about it, the prompt, the response."""
    rho = sample.get("rho")
    numbers = "" if not rho else ", rho " + " ".join(f"{key} {_number(value)}" for key, value in rho.items())
    head = (
        f"step {sample['step']}, {sample.get('why', 'sample')}: {sample.get('prompt_id')}/{sample.get('sample')}, "
        f"reward {_number(sample.get('reward'))}, {sample.get('length')} tokens, ended by {sample.get('finish')}"
        f"{numbers}, answer {sample.get('answer')!r}"
    )
    return printable(f"{head}\nprompt:   {_indented(sample['prompt'])}\nresponse: {_indented(sample['response'])}\n")


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.4g}" if isinstance(value, float | int) else repr(value)


def _indented(text: Any) -> str:
    """Lines of the text below its first one cannot be mistaken for lines about another sample."""
    return str(text).replace("\n", "\n          ")
