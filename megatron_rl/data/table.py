"""Tokenized prompts as Arrow columns in memory: as Python objects, 1.8 million would take 8 GB in every rank. A row
becomes a `Prompt` when it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

import numpy as np
import pyarrow as pa

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


@dataclass
class Facts:
    """Facts on all rows together."""

    sources: list[str] = field(default_factory=list)  # data sources in order of first occurrence
    num_dropped: int = 0
    fingerprint: str = ""
    digest: str = ""


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


class TableWriter:
    """Collects prompts into ``batches`` of `SCHEMA`."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self._columns: list[list[Any]] = [[] for _ in SCHEMA]
        self._digests = Digests()
        self._sources: dict[str, int] = {}
        self._seen: dict[bytes, int] = {}
        self.num_rows = self.num_dropped = 0
        self.odd: dict[int, dict[str, Any]] = {}  # extra columns that JSON cannot store, by row

    def add(self, prompt: Prompt) -> None:
        extra = json.dumps(prompt.extra, default=str) if prompt.extra else ""
        if extra and repr(json.loads(extra)) != repr(prompt.extra):
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

    def close(self) -> PromptSet:
        if self._columns[0]:
            self._flush()
        facts = Facts(list(self._sources), self.num_dropped, *self._digests.values())
        return PromptSet(self.batches, facts, odd=self.odd)

    def _flush(self) -> None:
        arrays = [pa.array(column, type=kind.type) for column, kind in zip(self._columns, SCHEMA)]
        self.batches.append(pa.record_batch(arrays, schema=SCHEMA))
        self._columns = [[] for _ in SCHEMA]


class PromptSet(Sequence[Prompt]):
    """Prompts in file order, read-only. `num_dropped`: prompts left out because of their length.

    ``rows``: selected rows of ``batches``, int64; None: all. ``odd``: extra columns by row that the batches cannot
    store.
    """

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        facts: Facts,
        *,
        rows: np.ndarray | None = None,
        odd: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        self._batches, self._facts, self._rows, self._odd = list(batches), facts, rows, odd or {}
        self._ends = list(accumulate(len(batch) for batch in self._batches))

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> PromptSet:
        """Return a set of the given prompts."""
        writer = TableWriter()
        for prompt in prompts:
            writer.add(prompt)
        return writer.close()

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

    def choose(self, rows: np.ndarray) -> PromptSet:
        """Return the prompts ``rows`` (int64) in that order."""
        rows = rows if self._rows is None else self._rows[rows]
        return PromptSet(self._batches, self._facts, rows=rows, odd=self._odd)

    @property
    def num_dropped(self) -> int:
        return self._facts.num_dropped

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
        digests = Digests()
        for prompt in self:
            digests.add(prompt)
        return digests.values()

    def _whole(self, parts: list[np.ndarray]) -> np.ndarray:
        column = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return column if self._rows is None else column[self._rows]
