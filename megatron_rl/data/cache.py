"""Tokenized prompts on disk: tokenized once, then mapped by any number of processes and later runs.

An entry is a folder. Its name is a hash of all that determines its contents: the data files' hashes, the tokenizer,
template, chat settings and limits. One process writes it under a lock while the others wait, and renames it when it is
complete. The entry holds the size and checksum of its table. You may delete any entry at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_rl.data.table import SCHEMA, Facts, NotStorable, PromptSet, TableWriter, remember

logger = logging.getLogger(__name__)

VARIABLE = "MEGATRON_RL_CACHE"
FORMAT = 2  # format 1 wrote answers such as 1e-05
_TABLE, _META = "prompts.arrow", "meta.json"
_POLL_S, _SAID_AFTER_S = 0.1, 1.0
_SETTLED_S = 2.0  # a file changed so recently may change again without a new time stamp


class NotCached(Exception):
    """Raised when prompts cannot be kept on disk, with the reason."""


class _Damaged(Exception):
    """Raised when an entry is damaged, with what is wrong."""


def cache_folder(setting: str) -> Path | None:
    """Return the folder of `data.cache`; None if there is no cache."""
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting)
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_rl"


class PromptCache:
    """The cache entries in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "prompts"

    def load(self, key: Callable[[], dict[str, Any]], build: Callable[[TableWriter], None], what: str) -> PromptSet:
        """Return the entry of ``key()``; build it first if it is missing or damaged. ``what`` names it in messages.

        Raises `NotCached` with the reason if the folder cannot be used or the rows cannot be stored.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotCached(f"{self.folder}: {error.strerror}") from error
        cache_key = key()
        name = _name_of(cache_key)
        entry = self.folder / name
        with contextlib.suppress(_Damaged):  # logged by the process that builds it again
            if (prompts := _open(entry)) is not None:
                return prompts
        try:
            with _locked(self.folder / f".lock-{name}", what):
                try:
                    if (prompts := _open(entry)) is not None:
                        return prompts
                    logger.warning("%s: tokenized once, into %s", what, entry)
                except _Damaged as damage:
                    logger.warning("%s: %s is damaged (%s); tokenized again", what, entry, damage)
                self._build(entry, cache_key, build)
                if key() != cache_key:
                    shutil.rmtree(entry)
                    raise NotCached("a file changed while it was read")
                return _open(entry) or _vanished(entry)
        except (OSError, _Damaged) as error:
            raise NotCached(f"{entry}: {getattr(error, 'strerror', None) or error}") from error
        except NotStorable as reason:
            raise NotCached(str(reason)) from reason

    def file_digest(self, path: Path) -> str:
        """Return the SHA-256 of a file; a stored one is used if size, inode and time stamps are unchanged."""
        state = _state(path)
        memo = self.folder / f"file-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(memo.read_text(encoding="utf-8"))
            if stored["state"] == state:
                return str(stored["sha256"])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        settled = time.time() - path.stat().st_mtime > _SETTLED_S
        if settled and _state(path) == state:
            remember(memo, json.dumps({"path": str(path.resolve()), "state": state, "sha256": digest}))
        return digest

    def _build(self, entry: Path, key: dict[str, Any], build: Callable[[TableWriter], None]) -> None:
        partial = entry.with_name(f".partial-{entry.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            table = partial / _TABLE
            with pa.OSFile(str(table), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as file:
                writer = TableWriter(file.write_batch, to_file=True)
                build(writer)
                facts = writer.close()
            with pa.memory_map(str(table)) as mapped:
                size, checksum = mapped.size(), zlib.crc32(mapped.read_buffer())
            meta = {"format": FORMAT, "size": size, "crc32": checksum, "facts": asdict(facts), "made_of": key}
            (partial / _META).write_text(json.dumps(meta, indent=1, default=str), encoding="utf-8")
            if entry.exists():
                shutil.rmtree(entry)
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _open(entry: Path) -> PromptSet | None:
    """Return the entry, mapped into memory; None if there is none."""
    if not entry.is_dir():
        return None
    try:
        meta = json.loads((entry / _META).read_text(encoding="utf-8"))
        mapped = pa.memory_map(str(entry / _TABLE))
        if mapped.size() != meta["size"]:
            raise _Damaged(f"{_TABLE} has {mapped.size()} bytes of {meta['size']}")
        if zlib.crc32(mapped.read_buffer()) != meta["crc32"]:
            raise _Damaged(f"{_TABLE} does not have the checksum that it was written with")
        file = pa.ipc.open_file(mapped)
        batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        return PromptSet(batches, Facts(**meta["facts"]), memo=entry / "chosen")
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error


def _vanished(entry: Path) -> PromptSet:
    raise NotCached(f"{entry}: another process deleted it")


def _name_of(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _state(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns]


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock ``path``. Ranks 0 and 1 of a node log that they wait. Raises OSError if locks do not work."""
    with path.open("w") as file:
        started, is_logged = time.monotonic(), os.environ.get("LOCAL_RANK", "0") not in ("0", "1")
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_logged and time.monotonic() - started > _SAID_AFTER_S:
                    logger.warning("%s: waiting for the process that tokenizes it", what)
                    is_logged = True
            time.sleep(_POLL_S)
        yield
