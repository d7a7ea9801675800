"""Unified diffs: parse them and apply them strictly.

Strict means: the lines that a hunk removes and those around it must be there, byte for byte, at the line it names or at
exactly one other place in the file. There is no fuzz; text that could be meant in two places is an error.
"""

from __future__ import annotations

import dataclasses
import re

from megatron_rl.patching.errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"


@dataclasses.dataclass(frozen=True)
class Hunk:
    """One change: at (1-based) line `old_start`, the lines `old` become `new`. Lines keep their line ends."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        """The change back."""
        return Hunk(self.new_start, self.old_start, self.new, self.old)


@dataclasses.dataclass(frozen=True)
class FileChange:
    """All hunks of one file. `creates`: the file must not exist before; `deletes`: nor after."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False

    def reversed(self) -> FileChange:
        """The change back."""
        return FileChange(self.path, tuple(hunk.reversed() for hunk in self.hunks), self.deletes, self.creates)


def parse(diff: bytes, source: str) -> list[FileChange]:
    """The changes of a git diff; `source` names it in errors. Binary files, renames and modes are not supported."""
    changes: list[FileChange] = []
    lines = _split(diff)
    # What stands before is the message, which may quote a diff.
    position = next((number for number, line in enumerate(lines) if line.startswith(b"diff --git ")), len(lines))
    while position < len(lines):
        line = lines[position]
        if line.startswith((b"GIT binary patch", b"rename ", b"copy ", b"old mode", b"new mode", b"Binary files")):
            raise PatchError(f"{source}: {line.decode().strip()}: only changes of text are supported")
        if not line.startswith(b"--- "):
            position += 1
            continue
        old_path, new_path = _path(line), _path(lines[position + 1])
        position += 2
        hunks = []
        while position < len(lines) and lines[position].startswith(b"@@ "):
            hunk, position = _parse_hunk(lines, position, f"{source}: {new_path or old_path}")
            hunks.append(hunk)
        path = new_path or old_path
        if path is None or not hunks:
            raise PatchError(f"{source}: a file header without a path or without hunks")
        changes.append(FileChange(path, tuple(hunks), creates=old_path is None, deletes=new_path is None))
    if len({change.path for change in changes}) != len(changes):
        raise PatchError(f"{source}: a file is changed twice")
    return changes


def _path(line: bytes) -> str | None:
    name = line[4:].split(b"\t")[0].strip().decode()
    if name == "/dev/null":
        return None
    path = name.split("/", 1)[-1]
    if path.startswith("/") or ".." in path.split("/"):
        raise PatchError(f"a patch may not leave its tree: {name}")
    return path


def _parse_hunk(lines: list[bytes], position: int, where: str) -> tuple[Hunk, int]:
    header = _HUNK.match(lines[position])
    if header is None:
        raise PatchError(f"{where}: not a hunk header: {lines[position].decode(errors='replace').strip()}")
    old_start, old_count, new_start, new_count = (1 if text is None else int(text) for text in header.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    position += 1
    while len(old) < old_count or len(new) < new_count or lines[position : position + 1] == [_NO_NEWLINE + b"\n"]:
        if position >= len(lines):
            raise PatchError(f"{where}: the hunk at line {old_start} ends early")
        kind, text = lines[position][:1], lines[position][1:]
        if kind == b"\\":
            # The line before it, on whichever side it is, has no line end.
            for side, kinds in ((old, b" -"), (new, b" +")):
                if lines[position - 1][:1] in (kinds[:1], kinds[1:]):
                    side[-1] = side[-1].rstrip(b"\n")
        elif kind in (b" ", b"-", b"+"):
            if kind != b"+":
                old.append(text)
            if kind != b"-":
                new.append(text)
        else:
            raise PatchError(f"{where}: the hunk at line {old_start} holds a line that is not part of a diff")
        position += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchError(f"{where}: the hunk at line {old_start} has other line counts than its header says")
    return Hunk(old_start, new_start, tuple(old), tuple(new)), position


def apply(content: bytes | None, change: FileChange, source: str) -> bytes | None:
    """The file after `change` (None: no file). Raises PatchError that names `source`, file and hunk."""
    if change.creates:
        if content is not None:
            raise PatchError(f"{source}: {change.path} must not exist, but does")
        return b"".join(change.hunks[0].new)
    if content is None:
        raise PatchError(f"{source}: {change.path} does not exist")
    lines = _split(content)
    result: list[bytes] = []
    done, offset = 0, 0
    for number, hunk in enumerate(change.hunks, 1):
        # An empty side names the line *after* which it stands.
        stated = hunk.old_start - (1 if hunk.old else 0) + offset
        start = _find(lines, hunk, stated, done)
        if start is None:
            raise PatchError(
                f"{source}: {change.path}: hunk {number} of {len(change.hunks)} (line {hunk.old_start}) does not match"
            )
        offset += start - stated
        result += lines[done:start] + list(hunk.new)
        done = start + len(hunk.old)
    result += lines[done:]
    if change.deletes:
        if result:
            raise PatchError(f"{source}: {change.path} is to be deleted, but holds more than the patch says")
        return None
    return b"".join(result)


def _split(content: bytes) -> list[bytes]:
    """Lines by newline alone: splitlines() would also break at a carriage return."""
    parts = content.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _find(lines: list[bytes], hunk: Hunk, stated: int, first: int) -> int | None:
    """Where the hunk's old lines are: as stated, or else at the only place at or after `first`."""
    old = list(hunk.old)
    if stated >= first and lines[stated : stated + len(old)] == old:
        return stated
    if not old:
        return None
    places = [
        start
        for start in range(first, len(lines) - len(old) + 1)
        if lines[start] == old[0] and lines[start : start + len(old)] == old
    ]
    return places[0] if len(places) == 1 else None
