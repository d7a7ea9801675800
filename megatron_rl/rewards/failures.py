"""Responses that could not be scored: an example and a count of each kind, and the limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.errors import Fault

MAX_KINDS = 8  # number of examples that a rank shares with the others
_WHAT = {"error": "failed", "limit": "went over its time or memory limit", "crash": "killed its worker process"}


class RewardFault(Fault):
    """Too many responses could not be scored, so their rewards would be meaningless."""


@dataclass(frozen=True)
class Failure:
    """Responses of one kind. ``prompt``, ``response`` and ``detail`` (a traceback, or "") are those of the first."""

    kind: str  # "error", "limit" or "crash"
    count: int
    prompt: str
    response: str
    detail: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for failures of the same kind: type of the exception, and the line that raised it."""
        lines = self.detail.strip().splitlines()
        places = [line.strip() for line in lines if line.startswith("  File ")]
        return self.kind, lines[-1].partition(":")[0] if lines else "", places[-1] if places else ""

    @property
    def text(self) -> str:
        """The failure for the log: prompt, response and traceback."""
        response = self.response if len(self.response) <= 200 else self.response[:200] + " …"
        head = f"the reward of prompt {self.prompt} {_WHAT[self.kind]} and counts as 0; the response was {response!r}"
        return head + (f"\n{self.detail.rstrip()}" if self.detail else "")

    @property
    def summary(self) -> str:
        """The failure in one line."""
        last = f": {self.detail.strip().splitlines()[-1]}" if self.detail.strip() else ""
        return f"the reward of prompt {self.prompt} {_WHAT[self.kind]}{last}"


def merge(failures: Iterable[Failure]) -> list[Failure]:
    """Return one `Failure` of each kind with the sum of the counts, ordered by first occurrence."""
    by_key: dict[tuple[str, str, str], Failure] = {}
    for failure in failures:
        first = by_key.get(failure.key)
        count = failure.count + (first.count if first else 0)
        example = first or failure
        by_key[failure.key] = Failure(example.kind, count, example.prompt, example.response, example.detail)
    return list(by_key.values())


def refuse_too_many(num_failed: int, num_scored: int, limit: float, failures: Sequence[Failure]) -> None:
    """Raise `RewardFault` if more than the share ``limit`` of the responses failed."""
    if num_failed <= limit * num_scored:
        return
    raise RewardFault(
        f"{num_failed} of {num_scored} responses could not be scored, more than reward.max_error_frac allows "
        f"({limit:g}); log.txt has an example of each kind; {failures[0].summary}"
    )
