"""Tokenized prompts as Arrow columns, in memory or mapped from a file. A row becomes a `Prompt` when it is read.

1.8 million prompts take 8 GB in every rank as Python objects; as a mapped file they are in a node's page cache once.

Large files are tokenized once, then mapped by any number of processes and later runs. An entry is a folder. Its name is
a hash of all that determines its contents: the data files' hashes, the tokenizer, template, chat settings and limits.
One process writes it under a lock while the others wait, and renames it when it is complete. The entry holds the size
and checksum of its table. You may delete any entry at any time.
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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from megatron_rl.process.host import write_whole
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("tokens", pa.large_list(pa.int32())),
        ("answer", pa.large_string()),
        ("text", pa.large_string()),
        ("source", pa.int32()),  # number of the data source in `Facts.sources`
        ("extra", pa.large_string()),  # JSON
        ("first", pa.int64()),  # number of the first row with the same tokens, answer and data source
    ]
)
ROWS_OF_A_BATCH = 8192
VARIABLE = "MEGATRON_RL_CACHE"
FORMAT = 3  # format 2 took messages as JSON text for the question
_TABLE, _META = "prompts.arrow", "meta.json"
_POLL_S, _SAID_AFTER_S = 0.1, 1.0
_SETTLED_S = 2.0  # a file changed so recently may change again without a new time stamp


@dataclass
class Facts:
    """Facts on all rows together."""

    sources: list[str] = field(default_factory=list)  # data sources in order of first occurrence
    num_dropped: int = 0
    fingerprint: str = ""
    digest: str = ""
    num_cut: int = 0


class Digests:
    """The two hashes of prompts in order: `fingerprint` of checkpoints, `digest` of run directories."""

    def __init__(self) -> None:
        self._fingerprint, self._digest = hashlib.sha256(), hashlib.sha256()

    def add(self, prompt: Prompt) -> None:
        about = repr((prompt.id, list(prompt.tokens), prompt.answer))
        self._fingerprint.update(about.encode("utf-8", "surrogatepass"))
        more = [prompt.id, prompt.answer, prompt.data_source, len(prompt.tokens), prompt.extra]
        self._digest.update(json.dumps(more, default=str, sort_keys=True).encode())
        self._digest.update(np.asarray(prompt.tokens, dtype=np.int64).tobytes())

    def values(self) -> tuple[str, str]:
        return self._fingerprint.hexdigest()[:16], self._digest.hexdigest()[:16]


class NotStorable(Exception):
    """Raised for a row that a file of prompts cannot store exactly."""


class TableWriter:
    """Collects prompts into record batches of `SCHEMA`. With ``to_file``, extra columns must be JSON."""

    def __init__(self, write: Callable[[pa.RecordBatch], Any], to_file: bool) -> None:
        self._write, self._to_file = write, to_file
        self._columns: list[list[Any]] = [[] for _ in SCHEMA]
        self._digests = Digests()
        self._sources: dict[str, int] = {}
        self._seen: dict[bytes, int] = {}
        self.num_rows = self.num_dropped = self.num_cut = 0
        self.odd: dict[int, dict[str, Any]] = {}  # extra columns that JSON cannot store, by row

    def add(self, prompt: Prompt) -> None:
        extra = json.dumps(prompt.extra, default=str) if prompt.extra else ""
        if extra and repr(json.loads(extra)) != repr(prompt.extra):
            if self._to_file:
                raise NotStorable(f"prompt {prompt.id!r} has an extra_info that JSON does not hold (dates, bytes)")
            self.odd[self.num_rows] = prompt.extra
        source = self._sources.setdefault(prompt.data_source, len(self._sources))
        about = hashlib.blake2b(np.asarray(prompt.tokens, dtype=np.int32).tobytes(), digest_size=16)
        about.update(repr((prompt.answer, source)).encode())
        first = self._seen.setdefault(about.digest(), self.num_rows)
        row = (prompt.id, prompt.tokens, prompt.answer, prompt.text, source, extra, first)
        for column, value in zip(self._columns, row):
            column.append(value)
        self._digests.add(prompt)
        self.num_rows += 1
        if len(self._columns[0]) == ROWS_OF_A_BATCH:
            self._flush()

    def close(self) -> Facts:
        if self._columns[0]:
            self._flush()
        fingerprint, digest = self._digests.values()
        return Facts(list(self._sources), self.num_dropped, fingerprint, digest, self.num_cut)

    def _flush(self) -> None:
        arrays = [pa.array(column, type=kind.type) for column, kind in zip(self._columns, SCHEMA)]
        self._write(pa.record_batch(arrays, schema=SCHEMA))
        self._columns = [[] for _ in SCHEMA]


class PromptSet(Sequence[Prompt]):
    """Prompts in file order, read-only. `num_dropped`: prompts left out because of their length; `num_cut`: cut.

    ``rows``: selected rows of ``batches``, int64; None: all. ``memo``: file that stores the hashes of this selection.
    ``odd``: extra columns by row that the batches cannot store.
    """

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        facts: Facts,
        *,
        rows: np.ndarray | None = None,
        memo: Path | None = None,
        odd: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        self._batches, self._facts, self._rows, self._memo, self._odd = list(batches), facts, rows, memo, odd or {}
        self._ends = list(accumulate(len(batch) for batch in self._batches))

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> PromptSet:
        """Return a set of the given prompts."""

        def build(writer: TableWriter) -> None:
            for prompt in prompts:
                writer.add(prompt)

        return in_memory(build)

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return [self._prompt(i) for i in chosen]
        return self._prompt(chosen)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._prompt, range(len(self)))

    def _prompt(self, index: int) -> Prompt:
        row = index if self._rows is None else int(self._rows[index])
        number = bisect_right(self._ends, row)
        batch = self._batches[number]
        i = row - (self._ends[number] - len(batch))
        name, tokens, answer, text, source, extra, _ = batch.columns
        return Prompt(
            name[i].as_py(),
            tokens[i].values.to_numpy().tolist(),
            answer[i].as_py(),
            text[i].as_py(),
            self._facts.sources[source[i].as_py()],
            self._odd.get(row) or json.loads(extra[i].as_py() or "{}"),
        )

    def choose(self, rows: np.ndarray, name: str) -> PromptSet:
        """Return the prompts ``rows`` (int64) in that order. ``name``: name of the selection, unique in this set."""
        memo = None if self._memo is None else self._memo.with_name(f"{self._memo.stem}-{name}.json")
        rows = rows if self._rows is None else self._rows[rows]
        return PromptSet(self._batches, self._facts, rows=rows, memo=memo, odd=self._odd)

    @property
    def num_dropped(self) -> int:
        return self._facts.num_dropped

    @property
    def num_cut(self) -> int:
        return self._facts.num_cut

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each prompt, [prompts] int64."""
        return self._whole([np.diff(batch.column("tokens").offsets.to_numpy()) for batch in self._batches])

    @cached_property
    def first_rows(self) -> np.ndarray:
        """A number per prompt, [prompts] int64: equal for the same tokens, answer and data source."""
        return self._whole([batch.column("first").to_numpy() for batch in self._batches])

    @property
    def num_different(self) -> int:
        """Number of distinct prompts."""
        return len(np.unique(self.first_rows))

    @property
    def data_sources(self) -> list[str]:
        """All `data_source` that occur, sorted."""
        return sorted(prompt.data_source for prompt in self.first_of_each_source())

    def first_of_each_source(self) -> list[Prompt]:
        """Return the first prompt of each data source, in order."""
        numbers = self._whole([batch.column("source").to_numpy() for batch in self._batches])
        return [self[int(i)] for i in sorted(np.unique(numbers, return_index=True)[1])]

    def beyond(self, vocab_size: int) -> Prompt | None:
        """Return the first prompt with a token of ``vocab_size`` or above; None if there is none."""
        largest = [batch.column("tokens").values.to_numpy().max(initial=0) for batch in self._batches]
        if max(largest, default=0) < vocab_size:
            return None
        return next((prompt for prompt in self if max(prompt.tokens) >= vocab_size), None)

    def named(self, names: Iterable[str]) -> dict[str, Prompt]:
        """Return prompts by id; ids that the set lacks are left out."""
        import pyarrow.compute as pc  # takes 0.1 s to import

        name_array, by_name = pa.array(sorted(set(names)), type=pa.large_string()), {}
        ids = pa.chunked_array([batch.column("id") for batch in self._batches], type=pa.large_string())
        hits = self._whole([pc.is_in(ids, name_array).to_numpy(zero_copy_only=False)])
        for i in np.flatnonzero(hits):
            prompt = self[int(i)]
            by_name[prompt.id] = prompt
        return by_name

    def rows_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return the row of each prompt in this set, [ids] int64; -1 if it is not in the set."""
        import pyarrow.compute as pc  # takes 0.1 s to import

        id_array = pa.array(ids, type=pa.large_string())
        own_ids = pa.chunked_array([batch.column("id") for batch in self._batches], type=pa.large_string())
        places = self._whole([pc.index_in(own_ids, id_array).fill_null(-1).to_numpy()])
        rows = np.full(len(ids), -1, dtype=np.int64)
        present = np.flatnonzero(places >= 0)
        rows[places[present]] = present
        return rows

    def rows_of_names(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the rows of each source by name, int64. A row's id begins with the name of its source and a colon.

        If several names fit an id, the row belongs to the longest.
        """
        import pyarrow.compute as pc  # takes 0.1 s to import

        ids = pa.chunked_array([batch.column("id") for batch in self._batches], type=pa.large_string())
        left, by_name = np.ones(len(self), dtype=bool), {}
        for name in sorted(names, key=len, reverse=True):
            begins = self._whole([pc.starts_with(ids, pattern=f"{name}:").to_numpy(zero_copy_only=False)])
            by_name[name] = np.flatnonzero(begins & left)
            left &= ~begins
        return {name: by_name[name] for name in names}

    @property
    def fingerprint(self) -> str:
        return self._hashes[0]

    @property
    def digest(self) -> str:
        return self._hashes[1]

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        if self._rows is None:
            return self._facts.fingerprint, self._facts.digest
        if self._memo is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                stored = json.loads(self._memo.read_text(encoding="utf-8"))
                return str(stored["fingerprint"]), str(stored["digest"])
        digests = Digests()
        for prompt in self:
            digests.add(prompt)
        hashes = digests.values()
        if self._memo is not None:
            remember(self._memo, json.dumps(dict(zip(("fingerprint", "digest"), hashes))))
        return hashes

    def _whole(self, parts: list[np.ndarray]) -> np.ndarray:
        column = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return column if self._rows is None else column[self._rows]


def in_memory(build: Callable[[TableWriter], None]) -> PromptSet:
    """Return the set that ``build`` writes."""
    batches: list[pa.RecordBatch] = []
    writer = TableWriter(batches.append, to_file=False)
    build(writer)
    facts = writer.close()
    return PromptSet(batches, facts, odd=writer.odd)


def remember(path: Path, text: str) -> None:
    """Write the whole file or nothing. Does nothing if the folder is not writable."""
    with suppress(OSError):
        write_whole(path, text)


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
