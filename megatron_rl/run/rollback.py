"""How often a run went back (alarm action `rollback`), in a file that outlives the steps that were undone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.process.ranks import on_main_rank


class Rollbacks:
    """The rollbacks of one run, at most ``most``. ``file``: rollbacks.json in the run directory. Collective."""

    def __init__(self, file: Path, most: int) -> None:
        self._file, self.most = file, most
        self._events: list[dict[str, Any]] = on_main_rank(self._read)
        self.count = len(self._events)  # and those of the run whose checkpoint this one began from

    @property
    def is_spent(self) -> bool:
        return self.count >= self.most

    def add(self, alarms: list[str], at: int, to: int) -> None:
        """Note that the run goes back from the end of step ``at`` to the checkpoint of step ``to``."""
        self.count += 1
        self._events.append({"alarms": alarms, "at": at, "to": to, "time": round(time.time(), 3)})
        on_main_rank(self._write)

    def halvings_due(self, before: int) -> int:
        """How often the rate of a checkpoint is still to be halved that was written after ``before`` rollbacks."""
        self.count = max(self.count, before)
        return self.count - before

    def _read(self) -> list[dict[str, Any]]:
        if not self._file.is_file():
            return []
        try:
            return [{**event} for event in json.loads(self._file.read_text())]
        except (ValueError, TypeError) as error:
            raise InputError(f"{self._file}: not the list of rollbacks of a run ({error}); restore it") from error

    def _write(self) -> None:
        partial = self._file.with_name(f".partial-{self._file.name}")
        partial.write_text(json.dumps(self._events, indent=2) + "\n")
        os.replace(partial, self._file)
