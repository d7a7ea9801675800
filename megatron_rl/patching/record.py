"""The record in a patched tree: which patches are in it, and the diff that leads back to upstream's files.

A command first writes the record of what it wants beside the one that is there, then replaces files, then lets the new
record take the place of the old one. Whenever it is killed, each file is in a state that one of the two describes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

from megatron_rl.patching.series import Files, Patch, PatchError, Series, apply, blob, diff

_HEAD = "What `megatron-rl patch` changed here. It reads this file; `megatron-rl patch revert` takes all of it back.\n"


def place_of(series: Series) -> str:
    """Return the record's path."""
    return f"{series.pins['Root']}/patches.diff"


def wanted_place(series: Series) -> str:
    """Return the path of a running command's record."""
    return f"{place_of(series)}.wanted"


@dataclasses.dataclass(frozen=True)
class Record:
    """What a tree holds, or is to hold."""

    digests: dict[str, str]
    """The name of each patch, with a hash of its change."""
    upstream: str
    """The hash of upstream's files (`Series.tree_hash`)."""
    change: bytes
    blobs: dict[str, tuple[str, str]]
    """The hashes of each file before and after the change."""

    @classmethod
    def read(cls, content: bytes, path: Path) -> Record:
        """Parse the record at ``path``."""
        head, _, change = content.partition(b"\n\n")
        if not head.startswith(_HEAD.encode()[:20]):
            raise PatchError(f"{path}: is no record of patches; nothing was changed")
        digests = dict(re.findall(r"(?m)^Patch: (\S+) (\w+)$", head.decode()))
        upstream = "".join(re.findall(r"(?m)^Upstream: (\w+)$", head.decode()))
        parts = re.findall(rb"(?m)^diff --git a/(.+) b/\1\n(?:.+ file mode .+\n)?index (\w+)\.\.(\w+)", change)
        blobs = {path.decode(): (before.decode(), after.decode()) for path, before, after in parts}
        return cls(digests, upstream, b"\n" + change, blobs)

    def reverted(self, files: Files, paths: list[str]) -> Files:
        """``files`` with ``paths`` as they were before the change. PatchError: an edit is in the way."""
        return apply(self.change, files, paths, "patches.diff", reverse=True) if paths else files

    def fits(self, files: Files, path: str) -> bool:
        """Whether the file could be changed as it is: its changes are not in it."""
        try:
            apply(self.change, files, [path], "patches.diff")
        except PatchError:
            return False
        return True


def text_of(series: Series, patches: list[Patch], pristine: Files, wanted: Files) -> bytes:
    """The record of a tree that has ``wanted`` in place of ``pristine``, through these patches."""
    names = "".join(f"Patch: {patch.name} {digest(patch)}\n" for patch in patches)
    head = f"{_HEAD}Series: {series.name}\n{names}Upstream: {series.tree_hash(pristine)}\n\n"
    return head.encode() + diff(pristine, wanted)


def digest(patch: Patch) -> str:
    """A hash of what the patch changes; the text of its header is no part of it."""
    return hashlib.sha256(patch.diff).hexdigest()


def read_all(series: Series, root: Path) -> list[Record]:
    """The tree's record, if there is one; then that which a command wanted that did not come to its end."""
    paths = [root / place_of(series), root / wanted_place(series)]
    return [Record.read(path.read_bytes(), path) for path in paths if path.is_file()]


def matches(record: Record, path: str, content: bytes | None) -> str | None:
    """Whether the file is as `before` or `after` the change, by its hash; None: neither."""
    before, after = record.blobs[path]
    return {before: "before", after: "after"}.get(blob(content))
