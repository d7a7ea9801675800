"""Which series fit which releases, proven on trees and on wheels; a table for docs/patches.md."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.patching import releases, upstream
from megatron_rl.patching.series import PURPOSES, Files, Patch, PatchError, Series


def table(patches: Path, trees: Sequence[str], cache: Path) -> str:
    """A Markdown table of ``trees`` (folders, or wheels), else of the archives that the releases pin.

    A cell says how many patches of the series go on and off; below, each that does not says why.
    """
    rows, notes = [], []
    if not trees:
        known = [Series.read(patches / name) for name in releases.names(patches)]
        trees = [str(upstream.fetch(series, cache, None)) for series in known if series.purposes and series.archives]
    for tree in map(Path, trees):
        with _opened(tree) as root:
            commit = releases.commit_of(root)
            kind = "wheel" if tree.is_file() else f"tree {commit}" if commit else "tree"
            name = f"{releases.version_of(root)} ({kind})"
            cells, reasons = _row(releases.for_tree(patches, root), root)
        rows.append(f"| {name} | {' | '.join(cells)} |")
        notes += [f"- {name}: {reason}" for reason in reasons]
    head = ["| release | " + " | ".join(PURPOSES) + " |", "|---" * (len(PURPOSES) + 1) + "|"]
    return "\n".join([*head, *rows, *([""] if notes else []), *dict.fromkeys(notes)])


@contextlib.contextmanager
def _opened(tree: Path) -> Iterator[Path]:
    """The root of a tree, or of a wheel that is unpacked meanwhile."""
    with tempfile.TemporaryDirectory(prefix="patches-matrix-") as folder:
        root = upstream.unpack(tree, Path(folder), "megatron/core") if tree.is_file() else tree.resolve()
        if not (root / "megatron" / "core").is_dir():
            raise PatchError(f"{tree}: neither a wheel nor a folder that holds megatron/core/")
        yield root


def _row(series: Series, root: Path) -> tuple[list[str], list[str]]:
    """A cell for each purpose, and why patches are not in it."""
    pristine, cells, reasons = series.pristine(series.load(root)), [], []
    for purpose in PURPOSES:
        listed = series.of([purpose])
        patches = [patch for patch in listed if series.reachable(patch, pristine)]
        beyond = [f"{patch.name} is for a whole checkout" for patch in listed if patch not in patches]
        misfits = _misfits(pristine, patches)
        notes = [
            f"{key.lower()}: {note}"
            for key in ("Superseded", "Lacking")
            for note in series.notes[key]
            if note.startswith(purpose)
        ]
        reasons += beyond + misfits + notes
        fitting = len(patches) - len(misfits)
        cells.append(f"{fitting} of {len(patches)}" if misfits else str(fitting) if patches else "–")
    return cells, reasons


def _misfits(pristine: Files, patches: list[Patch]) -> list[str]:
    """Why those of ``patches`` that do not go on and off, one after the other, do not."""
    files, reasons = pristine, []
    for patch in patches:
        try:
            after = upstream.there_and_back(files, [patch])
            upstream.compile_changed(files, after)
        except (PatchError, SyntaxError) as error:
            reasons.append(str(error))
        else:
            files = after
    return reasons
