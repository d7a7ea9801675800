"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True)
class Outcome:
    """``reason``: what was found, or why nothing was looked at. ``fix``: what is likely to help, where it failed.

    ``figures``: what was measured; JSON-able, name → value or name → (name → value).
    """

    status: Status
    reason: str
    fix: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def passed(reason: str, **figures: Any) -> Outcome:
    return Outcome("pass", reason, figures=figures)


def failed(reason: str, fix: str, **figures: Any) -> Outcome:
    return Outcome("fail", reason, fix, figures)


def not_run(reason: str) -> Outcome:
    return Outcome("not run", reason)


@dataclass(frozen=True)
class Result:
    """The outcome of one check on one node. ``log``: the end of what it printed, where it failed."""

    name: str
    question: str
    outcome: Outcome
    seconds: float
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        found = {"name": self.name, "question": self.question, **asdict(self.outcome)}
        return found | {"seconds": round(self.seconds, 2)} | ({"log": self.log} if self.log else {})
