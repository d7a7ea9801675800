"""What a run records of sampled responses: metrics of all of them, and a few to read in `samples.jsonl`.

Of held-out prompts: avg@n and pass@k with confidence intervals, and the table of `eval`.

A model's text is untrusted: the file is ASCII, and code that prints it must use `printable`.

Of responses that other ranks hold, the main rank needs a number of each and the text of the few that it shows.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.config.monitor import SamplesConfig
from megatron_rl.errors import InputError, printable, shown
from megatron_rl.monitor.run_directory import append_whole, drop_from
from megatron_rl.process.host import write_whole
from megatron_rl.process.ranks import gather_objects, gather_rows, world_rank, world_size
from megatron_rl.types import Group, Prompt, Rollout

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


MAX_CHARS, MAX_BYTES = 4000, 64 << 20  # of a text; of the file


def shorten(text: str, max_chars: int = MAX_CHARS) -> str:
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
            **describe(*pairs[place]),
            "rho": (ratios or {}).get(place),
        }
        for why, place in choose(groups, config.number)
    ]


def describe(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """Return one response with its figures; ``length`` in tokens, ``finish`` as in `Rollout.finish_reason`."""
    return {
        "prompt_id": prompt.id,
        "sample": rollout.sample,
        "reward": rollout.reward,
        "raw_reward": rollout.raw_reward,
        "finish": rollout.finish_reason,
        "length": rollout.length,
        "answer": shorten(prompt.answer),
        "prompt": shorten(prompt.text),
        "response": shorten(rollout.text),
    }


def rho_summary(rollout: Rollout) -> dict[str, float] | None:
    """Return mean, standard deviation, minimum and maximum of rho = po / mu over the response's tokens.

    If a part of the response is trained on (`rollout.function`), it is that part.

    Returns None if the learner kept no log-probs (`recorder.record_batches: off` with one update per batch).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if (log_rho := rollout.log_rho) is None or not len(log_rho):
            return None
        rho = np.exp(log_rho)
        if (mask := rollout.loss_mask) is not None and mask.any():
            rho = rho[mask]
        summary = {"mean": rho.mean(), "std": rho.std(), "min": rho.min(), "max": rho.max()}
    return {name: float(value) for name, value in summary.items()}


class SampleFile:
    """Appends samples to ``path``. At ``max_bytes`` it drops the older half."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes

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
        write_whole(self.path, b"".join(reversed(newest)))


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
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file; monitor.samples.every sets when a run writes samples") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
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
    holders = [r.owner if r.holder is None else r.holder for r in rollouts]
    places = [i % world_size() if holder is None else holder for i, holder in enumerate(holders)]
    rank = world_rank()
    local_rollouts = [r for r, place in zip(rollouts, places, strict=True) if place == rank]
    fractions = gather_rows([[repetition_fraction(r.tokens, ngram)] for r in local_rollouts], places, width=1)
    for rollout, value in zip(rollouts, fractions[:, 0].tolist(), strict=True):
        rollout.repetition = value


def share_samples(groups: Sequence[Group], places: Sequence[int]) -> dict[int, dict[str, float] | None]:
    """Bring the texts of the responses ``places`` to the main rank; returns `rho_summary` of each there. Collective."""
    if not places:
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts_and_ratios: dict[int, tuple[str | None, dict[str, float] | None]] = {}
    for place in places:
        rollout = rollouts[place]
        text = rollout.text if world_rank() == (rollout.owner or 0) else None
        rho = rho_summary(rollout) if world_rank() == (rollout.holder or 0) else None
        if text is not None or rho is not None:
            texts_and_ratios[place] = text, rho
    ratios: dict[int, dict[str, float] | None] = {}
    for place, (text, rho) in (item for share in gather_objects(texts_and_ratios) for item in share.items()):
        if text is not None and world_rank() == 0:
            rollouts[place].text = text
        ratios[place] = ratios.get(place) or rho
    return ratios


CORRECT = 1.0  # a rollout with at least this raw reward solved its problem
Z_95 = 1.959964  # two-sided 95% quantile of the normal distribution


def avg_at_n(rewards: Sequence[Sequence[float]]) -> float:
    """Return the mean over problems of their mean raw reward. ``rewards``: one list of samples per problem."""
    return math.fsum(math.fsum(samples) / len(samples) for samples in rewards) / len(rewards)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that k samples drawn without replacement contain a correct one: 1 − C(n−c, k) / C(n, k).

    Unbiased for any k ≤ n (Chen et al., arXiv 2107.03374, Eq. 1). Raises ValueError unless 0 ≤ c ≤ n, 1 ≤ k ≤ n.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= c <= n, found n = {num_samples}, c = {num_correct}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def confidence_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of ``means``, one value in [0, 1] per problem.

    The independent draws are the problems, not their samples. This is Wilson's interval for p (1 − p) / SE² effective
    trials (at least the number of problems), where SE is the standard error between problems. It has a width even if
    all problems have the same value, and stays inside [0, 1].
    """
    count = len(means)
    mean = min(max(math.fsum(means) / count, 0.0), 1.0)
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1) if count > 1 else 0.0
    trials = max(float(count), mean * (1 - mean) / (variance / count)) if variance > 0 else float(count)
    centre = (mean + Z_95**2 / (2 * trials)) / (1 + Z_95**2 / trials)
    half = Z_95 / (1 + Z_95**2 / trials) * math.sqrt(mean * (1 - mean) / trials + Z_95**2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(groups: Iterable[Group]) -> dict[str, float]:
    """Return the metrics ``val/<source>/…`` of each `data_source` in ``groups``.

    They are ``avg@n`` of raw rewards with ``avg@n_ci95_low`` and ``_high`` (if raw rewards are in [0, 1]); ``pass@k``
    for k = 1, 2, 4, … and n; ``response_length/{mean,max,clip_ratio}``; ``num_problems``. n is the smallest number of
    samples of a problem. Responses without a score leave the figures of rewards, and so do problems with fewer than k.
    """
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.rollouts:
            by_source[group.prompt.data_source or "all"].append(group)
    metrics: dict[str, float] = {}
    for source, members in sorted(by_source.items()):
        row = _row(source, members)
        avg = f"avg@{row.samples}"
        low, high = row.reward_ci95 or (math.nan, math.nan)
        figures = {avg: row.reward, f"{avg}_ci95_low": low, f"{avg}_ci95_high": high}
        figures |= {f"pass@{k}": value for k, value in row.pass_at.items()}
        figures |= {
            "response_length/mean": row.length,
            "response_length/max": float(max(rollout.length for group in members for rollout in group.rollouts)),
            "response_length/clip_ratio": row.truncated,
            "num_problems": float(row.problems),
        }
        metrics |= {f"val/{source}/{name}": value for name, value in figures.items() if not math.isnan(value)}
    return metrics


def numbers_of_k(n: int) -> list[int]:
    """Return the k for which pass@k is reported with n samples: 1, 2, 4, … and n."""
    return sorted({1 << power for power in range(n.bit_length())} | {n})


@dataclass(frozen=True)
class FileRow:
    """Figures of one file. Intervals are 95%, of a mean over problems; None if a value is outside [0, 1]."""

    file: str
    problems: int
    samples: int  # responses per problem (the minimum over problems)
    reward: float = math.nan  # mean raw reward
    reward_ci95: tuple[float, float] | None = None
    pass_at: dict[int, float] = field(default_factory=dict)  # by k
    pass_at_ci95: dict[int, tuple[float, float]] = field(default_factory=dict)
    length: float = math.nan  # mean response length in tokens
    truncated: float = math.nan  # share of responses that were cut

    def to_json(self) -> dict[str, Any]:
        """Return the row as `eval --output` writes it; missing figures are null."""
        row = asdict(self)
        for name in ("pass_at", "pass_at_ci95"):
            row[name] = {str(k): value for k, value in row[name].items()}
        absent = {name for name, value in row.items() if isinstance(value, float) and math.isnan(value)}
        return {name: None if name in absent else value for name, value in row.items()}


def check_names(sources: Sequence[DataSourceConfig]) -> None:
    """Raise `InputError` if two of ``sources`` have the same label: their prompts could not be told apart."""
    labels = [source.label for source in sources]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise InputError(f"data.validation: two files are named {twice[0]!r}; give each a `name`")


def file_rows(groups: Sequence[Group], sources: Sequence[DataSourceConfig]) -> list[FileRow]:
    """Return one row per source in order, and a row of all problems if there are several sources.

    A prompt belongs to the source with the longest label that its id begins with. `check_names` makes labels unique.
    """
    labels = [source.label for source in sources]
    members: dict[str, list[Group]] = {label: [] for label in labels}
    longest_first = sorted(labels, key=len, reverse=True)
    for group in groups:
        members[next(label for label in longest_first if group.prompt.id.startswith(f"{label}:"))].append(group)
    rows = [_row(source.path, members[source.label]) for source in sources]
    return rows if len(rows) == 1 else [*rows, _row("all", groups)]


def _row(file: str, groups: Sequence[Group]) -> FileRow:
    rewards = [[rollout.raw_reward for rollout in group.scored] for group in groups if group.scored]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return FileRow(file, len(groups), 0)
    n = min(len(group.rollouts) for group in groups if group.rollouts)
    counts = [(len(samples), sum(reward >= CORRECT for reward in samples)) for samples in rewards]
    solved = {k: [pass_at_k(total, correct, k) for total, correct in counts if total >= k] for k in numbers_of_k(n)}
    solved = {k: values for k, values in solved.items() if values}
    bounded = rewards and all(0.0 <= reward <= 1.0 for samples in rewards for reward in samples)
    return FileRow(
        file,
        len(groups),
        n,
        reward=avg_at_n(rewards) if rewards else math.nan,
        reward_ci95=confidence_interval([math.fsum(s) / len(s) for s in rewards]) if bounded else None,
        pass_at={k: math.fsum(values) / len(values) for k, values in solved.items()},
        pass_at_ci95={k: confidence_interval(values) for k, values in solved.items()},
        length=math.fsum(rollout.length for rollout in rollouts) / len(rollouts),
        truncated=sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    )


def table(rows: Sequence[FileRow]) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and its cells as text."""
    ks = sorted({k for row in rows for k in row.pass_at})
    header = ["file", "problems", "n", "reward", *(f"pass@{k}" for k in ks), "length", "truncated"]
    return header, [
        [
            row.file,
            str(row.problems),
            str(row.samples),
            _with_interval(row.reward, row.reward_ci95),
            *(_with_interval(row.pass_at.get(k, math.nan), row.pass_at_ci95.get(k)) for k in ks),
            _shown(row.length, ".1f"),
            _shown(row.truncated, ".4f"),
        ]
        for row in rows
    ]


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
    around = "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"
    return _shown(value, ".4f") + around


def _shown(value: float, digits: str) -> str:
    return "–" if math.isnan(value) else format(value, digits)
