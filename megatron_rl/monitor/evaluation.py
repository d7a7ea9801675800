"""The table of `eval`: one row per file of held-out problems, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.errors import InputError
from megatron_rl.monitor.validation import CORRECT, avg_at_n, confidence_interval, numbers_of_k, pass_at_k
from megatron_rl.types import Group

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
    rewards = [[rollout.raw_reward for rollout in group.rollouts] for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
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
