"""What a study fixed before its first run, kept beside its runs: a changed file or another commit is refused, or said.

The record is ``root/registered.json``: what decides of the study file with its SHA-256, the commit, and amendments with
their reasons. Words, labels and drawings may change freely.
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
from megatron_rl.lab.jobs import LoadedStudy
from megatron_rl.lab.study import Study
from megatron_rl.monitor.environment import git_state, name_of_code

FILE = "registered.json"


@dataclass
class Registration:
    """What stood when the first run began, and what was changed since."""

    study: dict[str, Any]  # `Study.commitment`
    sha256: str
    code: str  # `code_version`
    num_finished: int = 0  # runs that were finished already: those of an older folder
    amendments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def in_force(self) -> dict[str, Any]:
        return self.amendments[-1]["study"] if self.amendments else self.study

    def save(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_text(json.dumps(vars(self), indent=1) + "\n")

    def said(self, study: Study) -> Iterator[str]:
        """One sentence for whatever a reader must know about when things were fixed."""
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
    """Dotted keys, down to two levels, in which two commitments differ."""
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
    """Version, or commit, with "+changes" where tracked files differ from it."""
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
    """Note what the study fixes, before the first run; or hold the study and the code against what was noted.

    Raises `InputError` where values are pending, where what decides was changed and ``amend`` gives no reason, and
    where the code is another and ``other_code`` does not allow it.
    """
    if loaded.study.pending:
        open_values = "\n".join(f"  {value}" for value in loaded.study.pending)
        raise InputError(f"study {loaded.path}: pending: pilots have still to set\n{open_values}\n  set them first")
    commitment, code = loaded.study.commitment(), code_version()
    found = read_registration(root)
    if found is None:
        found = Registration(commitment, sha256_of(commitment), code, num_finished)
        found.save(root)
        return found
    if keys := changed_keys(found.in_force, commitment):
        if amend is None:
            raise InputError(
                f"study {loaded.path}: {', '.join(keys)} changed since the first run of {root} ({FILE} there); restore "
                "them, give another folder with --out, or run with --amend REASON, which every report then says"
            )
        found.amendments.append(
            {
                "sha256": sha256_of(commitment),
                "study": commitment,
                "keys": keys,
                "reason": amend,
                "num_finished": num_finished,
            }
        )
        found.save(root)
    if code != found.code and not other_code:
        raise InputError(
            f"{root}: the runs there were begun with code {found.code}, this is {code}; check that commit out, give "
            "another folder with --out, or run with --other-code, and the report says which runs are of which"
        )
    return found
