"""The study's fixed parts, written before its first run. Later changes of file or commit are refused or reported.

The record is ``root/registered.json``: the decisive parts of the study file with their SHA-256, the commit, and
amendments with reasons. Words, labels and drawings may change freely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_rl
from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.jobs import LoadedStudy
from megatron_rl.instruments.lab.study import Study
from megatron_rl.monitor.environment import git_state, name_of_code

FILE = "registered.json"


@dataclass
class Registration:
    """The fixed parts of a study when its first run began, and later amendments."""

    study: dict[str, Any]  # `Study.commitment`
    sha256: str
    code: str  # `code_version`
    num_finished: int = 0  # runs of an older folder that were already finished
    amendments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def in_force(self) -> dict[str, Any]:
        return self.amendments[-1]["study"] if self.amendments else self.study

    def save(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_text(json.dumps(vars(self), indent=1) + "\n")

    def said(self, study: Study) -> Iterator[str]:
        """Yield sentences for the report on when the study was fixed and changed."""
        yield f"Fixed before the runs: study {self.sha256[:12]}, code {self.code}."
        if self.num_finished:
            yield f"{self.num_finished} runs were finished before the study was registered."
        for amendment in self.amendments:
            yield (
                f"Changed after {amendment['num_finished']} finished runs ({', '.join(amendment['keys'])}): "
                f"{amendment['reason']}."
            )
        if keys := changed_keys(self.in_force, study.commitment()):
            yield f"**The study file was changed after the runs began, and not amended: {', '.join(keys)}.**"


def sha256_of(commitment: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(commitment, sort_keys=True).encode()).hexdigest()


def changed_keys(before: Any, after: Any, at: str = "") -> list[str]:
    """Return the dotted keys, down to two levels, in which two commitments differ."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict) and at.count(".") < 2:
        return [
            key
            for name in sorted(before.keys() | after.keys())
            for key in changed_keys(before.get(name), after.get(name), f"{at}.{name}" if at else name)
        ]
    return [at]


def code_version() -> str:
    """Return the version or commit, with "+changes" if tracked files differ."""
    state = git_state(Path(megatron_rl.__file__).parent)
    if state is None:
        return megatron_rl.__version__
    return name_of_code(state)


def read_registration(root: Path) -> Registration | None:
    file = root / FILE
    return Registration(**json.loads(file.read_text())) if file.is_file() else None


def register(
    loaded: LoadedStudy, root: Path, num_finished: int, amend: str | None = None, other_code: bool = False
) -> Registration:
    """Write the study's fixed parts to disk before the first run; afterwards compare study and code with them.

    Raises `InputError` if values are pending, if a decisive part changed and ``amend`` gives no reason, or if the code
    changed and ``other_code`` is false.
    """
    if loaded.study.pending:
        open_values = "\n".join(f"  {value}" for value in loaded.study.pending)
        raise InputError(
            f"study {loaded.path}: pending: these values are still to be set by pilots\n{open_values}\n  set them first"
        )
    commitment, code = loaded.study.commitment(), code_version()
    registration = read_registration(root)
    if registration is None:
        registration = Registration(commitment, sha256_of(commitment), code, num_finished)
        registration.save(root)
        return registration
    if keys := changed_keys(registration.in_force, commitment):
        if amend is None:
            raise InputError(
                f"study {loaded.path}: {', '.join(keys)} changed since the first run of {root} ({FILE} there); restore "
                "them, give another folder with --out, or run with --amend REASON; all reports then state the reason"
            )
        registration.amendments.append(
            {
                "sha256": sha256_of(commitment),
                "study": commitment,
                "keys": keys,
                "reason": amend,
                "num_finished": num_finished,
            }
        )
        registration.save(root)
    if code != registration.code and not other_code:
        raise InputError(
            f"{root}: the runs there were begun with code {registration.code}, this is {code}; check that commit out, "
            "give another folder with --out, or run with --other-code: the report then names the code of each run"
        )
    return registration
