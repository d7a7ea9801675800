"""What a run records of sampled responses: metrics of all of them, and a few to read in `samples.jsonl`.

A model's text is untrusted: the file is ASCII, and code that prints it must use `printable`.

Of responses that other ranks hold, the main rank needs a number of each and the text of the few that it shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.monitor import SamplesConfig
from megatron_rl.errors import InputError, printable, shown
from megatron_rl.monitor.run_directory import append_whole, drop_from
from megatron_rl.process.ranks import gather_objects, gather_rows, world_rank, world_size
from megatron_rl.types import Batch, Group, Prompt, Rollout
from megatron_rl.types import Sequence as Trained

# Odd multiplier of the polynomial hash over n-grams, modulo 2^64 (Knuth's MMIX constant). Two different n-grams collide
# with probability of about 2^-64, which does not matter for a fraction.
_HASH_MULTIPLIER = np.uint64(6364136223846793005)
REPETITION_NGRAM = 8
"""Length in tokens of the n-grams that response/repetition_frac counts."""


def repetition_fraction(tokens: Sequence[int], ngram: int = REPETITION_NGRAM) -> float:
    """Return the share of n-grams that occurred earlier in the response: 0 for none, near 1 for an endless loop.

    ``tokens`` [R]. Returns 0 for a response with fewer than two n-grams.
    """
    num_ngrams = len(tokens) - ngram + 1
    if num_ngrams < 2:
        return 0.0
    ids = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
    hashes = np.zeros(num_ngrams, dtype=np.uint64)
    for offset in range(ngram):
        hashes = hashes * _HASH_MULTIPLIER + ids[offset : offset + num_ngrams]
    return 1.0 - len(np.unique(hashes)) / num_ngrams


def rollout_metrics(groups: Sequence[Group], ngram: int = REPETITION_NGRAM) -> dict[str, float]:
    """Return `critic/rewards/*`, `critic/score/mean`, `response_length/*`, `response/*` and `groups/*` of a step.

    Rewards are after shaping, scores before, both of the responses that have one; lengths in tokens, the stop token
    included; `clip_ratio` is the share of responses cut at the length limit; `groups/no_signal_frac` the share of
    groups whose rewards are all equal.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    scored = [rollout for group in groups for rollout in group.scored]
    rewards = np.array([rollout.reward for rollout in scored])
    lengths = np.array([rollout.length for rollout in rollouts])
    repeats = np.array(
        [repetition_fraction(r.tokens, ngram) if r.repetition is None else r.repetition for r in rollouts]
    )
    of_rewards = (
        {
            "critic/rewards/mean": float(rewards.mean()),
            "critic/rewards/max": float(rewards.max()),
            "critic/rewards/min": float(rewards.min()),
            "critic/score/mean": float(np.mean([rollout.raw_reward for rollout in scored])),
        }
        if scored
        else {}
    )
    return of_rewards | {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(np.mean([rollout.truncated for rollout in rollouts])),
        "response/repetition_frac": float(repeats.mean()),
        "response/repetitive_responses": float((repeats > 0.5).mean()),
        "groups/no_signal_frac": float(np.mean([len(set(group.rewards)) <= 1 for group in groups])),
    }


def shorten(text: str, max_chars: int) -> str:
    """Return ``text``; if it is too long, its beginning and end with a note of how many characters are left out."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, max_chars // 2
    return f"{text[:head]} […{len(text) - max_chars} characters…] {text[len(text) - tail :]}"


def choose(groups: Sequence[Group], number: int) -> list[tuple[str, int]]:
    """Return the responses to show, as (reason, place in the order of groups and their rollouts).

    They are the best and worst rewarded, the longest, then the first ones; each response at most once.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return []
    places = range(len(rollouts))
    labelled_places = [
        ("best", max(places, key=lambda i: rollouts[i].reward)),
        ("worst", min(places, key=lambda i: rollouts[i].reward)),
        ("longest", max(places, key=lambda i: rollouts[i].length)),
        *(("next", i) for i in places[: number + 3]),
    ]
    chosen: dict[int, str] = {}
    for why, place in labelled_places:
        chosen.setdefault(place, why)
    return [(why, place) for place, why in list(chosen.items())[:number]]


def collect(
    step: int,
    groups: Sequence[Group],
    config: SamplesConfig,
    ratios: Mapping[int, dict[str, float] | None] | None = None,
) -> list[dict]:
    """Return the samples of a step. ``ratios``: `rho_summary` by place, if the batch was trained on."""
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
    """Return one response with its figures; ``length`` in tokens, ``finish`` as in `Rollout.finish_reason`."""
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
    """Return mean, standard deviation, minimum and maximum of rho = po / mu over the response's tokens.

    If a part of the response is trained on (`rollout.function`), it is that part.

    Returns None if the learner kept no log-probs (`recorder.record_batches: off` with one update per batch).
    """
    logprobs = sequence.current_logprobs if sequence.old_logprobs is None else sequence.old_logprobs
    if logprobs is None or not len(logprobs):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        rho = np.exp(logprobs.astype(np.float64) - sequence.inference_logprobs)
        if sequence.loss_mask is not None and sequence.loss_mask.any():
            rho = rho[sequence.loss_mask]
        summary = {"mean": rho.mean(), "std": rho.std(), "min": rho.min(), "max": rho.max()}
    return {name: float(value) for name, value in summary.items()}


class SampleFile:
    """Appends samples to ``path``. At ``max_mib`` it drops the older half."""

    def __init__(self, path: Path, max_mib: float) -> None:
        self.path, self.max_bytes = path, int(max_mib * 2**20)

    def resume_at(self, step: int) -> None:
        """Drop the samples of ``step`` and later."""
        drop_from(self.path, step)

    def write(self, samples: Sequence[dict[str, Any]]) -> None:
        """Append ``samples``; any that exceeds half the largest size is skipped. Raises OSError for a full disk."""
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
        newest: list[bytes] = []
        room = self.max_bytes // 2
        for line in reversed(self.path.read_bytes().splitlines(keepends=True)):
            if (room := room - len(line)) < 0:
                break
            newest.append(line)
        partial = self.path.with_name(f".partial-{self.path.name}")
        partial.write_bytes(b"".join(reversed(newest)))
        os.replace(partial, self.path)


def _encode(sample: dict[str, Any]) -> bytes:
    """Return one line of ASCII JSON; NaN and infinities become null."""
    finite = {
        key: {name: number if np.isfinite(number) else None for name, number in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in sample.items()
    }
    return json.dumps(finite).encode("ascii") + b"\n"


def read_samples(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a run, the oldest first. Skips an incomplete last line; `InputError` for no file."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read ({error.strerror}); monitor.samples.every sets when samples are written"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            yield _checked(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                return
            raise InputError(
                f"{file}, line {number}: not a sample ({shown(error)}); delete or repair the line"
            ) from error


def _checked(sample: Any) -> dict[str, Any]:
    """Return ``sample`` with the types that `render` takes. Raises ValueError, KeyError or TypeError for others."""
    record = {"step": sample["step"], "response": sample["response"], "prompt": sample["prompt"], **sample}
    if type(record["step"]) is not int:
        raise ValueError(f"step {shown(record['step'], 60)} is not a whole number")
    if not isinstance(record.get("rho"), dict | None):
        raise ValueError(f"rho {shown(record['rho'], 60)} is not an object")
    return record


def render(sample: dict[str, Any]) -> str:
    """Return a sample as text for a terminal: a line of figures, the prompt, the response."""
    rho = sample.get("rho")
    numbers = "" if not rho else ", rho " + " ".join(f"{key} {_number(value)}" for key, value in rho.items())
    head = (
        f"step {sample['step']}, {sample.get('why', 'sample')}: {sample.get('prompt_id')}/{sample.get('sample')}, "
        f"reward {_number(sample.get('reward'))}, {sample.get('length')} tokens, ended by {sample.get('finish')}"
        f"{numbers}, answer {sample.get('answer')!r}"
    )
    return printable(f"{head}\nprompt:   {_indented(sample['prompt'])}\nresponse: {_indented(sample['response'])}\n")


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.4g}" if isinstance(value, float | int) else shown(value, 60)


def _indented(text: Any) -> str:
    """Return the text indented, so that its lines are not mistaken for the header of another sample."""
    return str(text).replace("\n", "\n          ")


def share_repetition(groups: Sequence[Group], ngram: int = REPETITION_NGRAM) -> None:
    """Fill `Rollout.repetition` on every rank; each computes it for the responses that it holds. Collective."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    places = [i % world_size() if r.owner is None else r.owner for i, r in enumerate(rollouts)]
    rank = world_rank()
    mine = [r for r, place in zip(rollouts, places, strict=True) if place == rank]
    fractions = gather_rows([[repetition_fraction(r.tokens, ngram)] for r in mine], places, width=1)
    for rollout, value in zip(rollouts, fractions[:, 0].tolist(), strict=True):
        rollout.repetition = value


def share_samples(
    groups: Sequence[Group], batch: Batch | None, places: Sequence[int]
) -> dict[int, dict[str, float] | None]:
    """Bring the texts of the responses ``places`` to the main rank; returns `rho_summary` of each there. Collective.

    ``batch``: of these groups, in the same order, as the learner left it.
    """
    if not places:
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    mine: dict[int, tuple[str | None, dict[str, float] | None]] = {}
    for place in places:
        text = rollouts[place].text if _speaks(rollouts[place].owner) else None
        sequence = batch.sequences[place] if batch is not None else None
        rho = rho_summary(sequence) if sequence is not None and _speaks(sequence.holder) else None
        if text is not None or rho is not None:
            mine[place] = text, rho
    ratios: dict[int, dict[str, float] | None] = {}
    for place, (text, rho) in (item for share in gather_objects(mine) for item in share.items()):
        _tell(rollouts[place], text)
        ratios[place] = ratios.get(place) or rho
    return ratios


def _speaks(rank: int | None) -> bool:
    return world_rank() == (rank or 0)


def _tell(rollout: Rollout, text: str | None) -> None:
    if text is not None and world_rank() == 0:
        rollout.text = text
