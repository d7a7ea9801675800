"""Validation figures of scored rollouts: avg@n and pass@k with confidence intervals, and the table of `eval`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.errors import InputError
from megatron_rl.types import Group

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


def success_rates(groups: Iterable[Group]) -> dict[str, float]:
    """Return, by prompt id, the share of scored responses that solved the problem, over all its groups."""
    solved: defaultdict[str, list[bool]] = defaultdict(list)
    for group in groups:
        solved[group.prompt.id] += [rollout.raw_reward >= CORRECT for rollout in group.scored]
    return {name: sum(outcomes) / len(outcomes) for name, outcomes in solved.items() if outcomes}


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
        metrics |= {f"val/{source}/{name}": value for name, value in _of_source(members).items()}
    return metrics


def numbers_of_k(n: int) -> list[int]:
    """Return the k for which pass@k is reported with n samples: 1, 2, 4, … and n."""
    return sorted({1 << power for power in range(n.bit_length())} | {n})


def _of_source(groups: Sequence[Group]) -> dict[str, float]:
    rewards = [[rollout.raw_reward for rollout in group.scored] for group in groups if group.scored]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    n = min(len(group.rollouts) for group in groups)
    figures = {f"avg@{n}": avg_at_n(rewards)} if rewards else {}
    if rewards and all(0.0 <= reward <= 1.0 for samples in rewards for reward in samples):
        low, high = confidence_interval([math.fsum(samples) / len(samples) for samples in rewards])
        figures |= {f"avg@{n}_ci95_low": low, f"avg@{n}_ci95_high": high}
    for k in numbers_of_k(n):
        counts = [(len(s), sum(reward >= CORRECT for reward in s)) for s in rewards if len(s) >= k]
        if not counts:
            continue
        figures[f"pass@{k}"] = math.fsum(pass_at_k(total, correct, k) for total, correct in counts) / len(counts)
    lengths = [rollout.length for rollout in rollouts]
    return figures | {
        "response_length/mean": math.fsum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "num_problems": float(len(groups)),
    }


ALL = "all"


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
    return rows if len(rows) == 1 else [*rows, _row(ALL, groups)]


def _row(file: str, groups: Sequence[Group]) -> FileRow:
    rewards = [[rollout.raw_reward for rollout in group.scored] for group in groups if group.scored]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rewards:
        return FileRow(file, len(groups), 0)
    n = min(len(samples) for samples in rewards)
    counts = [(len(samples), sum(reward >= CORRECT for reward in samples)) for samples in rewards]
    solved = {k: [pass_at_k(total, correct, k) for total, correct in counts] for k in numbers_of_k(n)}
    bounded = all(0.0 <= reward <= 1.0 for samples in rewards for reward in samples)
    means = [math.fsum(samples) / len(samples) for samples in rewards]
    return FileRow(
        file,
        len(groups),
        n,
        reward=avg_at_n(rewards),
        reward_ci95=confidence_interval(means) if bounded else None,
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
