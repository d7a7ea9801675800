"""Standard output and error of a program that outlives whoever reads them: a pipe, a terminal of a closed session."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError

_NEEDED_DESCRIPTORS = 256  # an engine, its processes and a run's files


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as it may have. InputError where that is too few for a run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and most < _NEEDED_DESCRIPTORS:
        raise InputError(
            f"this process may open {most} files, and a run needs {_NEEDED_DESCRIPTORS}; raise the limit "
            "(`ulimit -n 4096`, or LimitNOFILE of the service that starts it)"
        )


class _Lasting(io.FileIO):
    """A descriptor that takes everything: once nobody can read it, it becomes /dev/null."""

    def __init__(self, descriptor: int, on_loss: Any) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._on_loss = on_loss

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # also for libraries and child processes to come
            os.close(null)
            self._on_loss(self.fileno(), error)
            return len(data)


@contextlib.contextmanager
def outlasting_readers(hint: str) -> Iterator[None]:
    """Within, a write to standard output or error never fails. The first one that would have is said on the other,
    with ``hint``: where the lines can be read instead."""
    streams = {1: sys.stdout, 2: sys.stderr}
    names = {1: "standard output", 2: "standard error"}

    def on_loss(descriptor: int, error: OSError) -> None:
        other = 3 - descriptor
        text = f"{names[descriptor]} cannot be written any more ({error.strerror}); the run goes on: {hint}\n"
        with contextlib.suppress(OSError):
            os.write(other, text.encode())

    try:
        if all(stream.fileno() == descriptor for descriptor, stream in streams.items()):
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(
                    io.BufferedWriter(_Lasting(descriptor, on_loss)),
                    encoding=stream.encoding,
                    errors=stream.errors,
                    line_buffering=stream.line_buffering or descriptor == 2,
                )
                for descriptor, stream in streams.items()
            )
    except (OSError, ValueError):  # no files: a test's
        pass
    replaced = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in replaced:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = streams.values()


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``: a reader finds the former file or the whole new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)
