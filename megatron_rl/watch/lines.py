"""A file of lines that another process writes: read on from the last whole line, whatever happens to it in between."""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_left
from pathlib import Path

READ_BYTES = 8 * 2**20  # of one poll, at least one line


class LineFollower:
    """Gives every whole line once, and says how many of the earlier ones still stand.

    A run that resumes cuts its files, or puts shorter ones in their place (`monitor.jsonl.drop_from`). So the end and
    the checksum of every line are kept, 16 bytes each, and the last line is compared at each poll: as every line has
    its step and its time, none comes again at the same place after others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends, self._sums = array("q"), array("q")
        self._seen: tuple[int, ...] | None = None
        self.size = 0  # bytes of the file at the last poll

    @property
    def count(self) -> int:
        """Lines that were given and stand."""
        return len(self._ends)

    @property
    def offset(self) -> int:
        """Bytes of the lines that were given."""
        return self._ends[-1] if self._ends else 0

    @property
    def is_behind(self) -> bool:
        """Whether the last poll left whole lines unread."""
        return self._seen is None and self.size > self.offset

    def forget(self) -> None:
        """Read the file from its start again."""
        self._keep(0)
        self._seen = None

    def span(self, line: int) -> tuple[int, int]:
        """Bytes [start, end) of a line that was given."""
        return (self._ends[line - 1] if line else 0), self._ends[line]

    def poll(self, max_bytes: int = READ_BYTES) -> tuple[int, list[bytes]]:
        """How many of the lines given so far still stand, and the lines after those, without their line feeds.

        A file that is missing has no lines. At most about ``max_bytes`` are read: see `is_behind`.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.forget()
            self.size = 0
            return 0, []
        try:
            status = os.fstat(descriptor)
            seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return len(self._ends), []
            self.size = status.st_size
            self._keep(self._standing(descriptor))
            kept = len(self._ends)
            lines, at_end = self._read(descriptor, max_bytes)
            self._seen = seen if at_end else None
            return kept, lines
        finally:
            os.close(descriptor)

    def _standing(self, descriptor: int) -> int:
        """Lines from the start that the file still has. Files are only cut and extended, so one search finds it."""

        def is_changed(line: int) -> bool:
            start, end = self.span(line)
            return zlib.crc32(os.pread(descriptor, end - start, start)) != self._sums[line]

        count = len(self._ends)
        if not count or not is_changed(count - 1):
            return count
        return bisect_left(range(count), True, key=is_changed)

    def _keep(self, lines: int) -> None:
        del self._ends[lines:], self._sums[lines:]

    def _read(self, descriptor: int, max_bytes: int) -> tuple[list[bytes], bool]:
        """New whole lines, and whether the file ended with them or with part of a line."""
        start = self.offset
        data = os.pread(descriptor, max_bytes, start)
        at_end = len(data) < max_bytes
        while b"\n" not in data and not at_end:  # a line longer than max_bytes
            more = os.pread(descriptor, max_bytes, start + len(data))
            data, at_end = data + more, len(more) < max_bytes
        lines = data.split(b"\n")[:-1]  # the rest is part of a line, or nothing
        for line in lines:
            start += len(line) + 1
            self._ends.append(start)
            self._sums.append(zlib.crc32(line + b"\n"))
        return lines, at_end
