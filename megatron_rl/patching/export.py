"""Write patch files from a git checkout with one commit for each patch, or afresh from a patched tree."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from megatron_rl.patching.errors import PatchError
from megatron_rl.patching.series import Files, Series, tree_hash

_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-renames")
_ZERO = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"


def from_checkout(series: Series, checkout: Path, base: str) -> list[str]:
    """One patch for each commit in `base..HEAD`, oldest first; their names.

    A commit keeps the file name of the patch with the same subject; others are named after their subject.
    """
    names = {patch.subject: patch.name for patch in series.patches}
    commits = _git(checkout, "rev-list", "--reverse", "--no-merges", f"{base}..HEAD").split()
    if not commits:
        raise PatchError(f"{checkout}: no commits in {base}..HEAD")
    texts: dict[str, str] = {}
    for commit in commits:
        subject, author, body = _git(checkout, "log", "-1", "--format=%s%x00%an <%ae>%x00%b", commit).split("\0")
        name = names.get(subject) or re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:60] + ".patch"
        if name in texts:
            raise PatchError(f"{checkout}: two commits would become {name}")
        diff = _without_index(_git(checkout, *_DIFF, f"{commit}~", commit, "--"))
        texts[name] = f"{_ZERO}From: {author}\nSubject: [PATCH] {subject}\n\n{body.strip()}\n---\n{diff}"
    _write(series.folder, texts)
    first = {path: _show(checkout, base, path) for path in Series.read(series.folder).paths}
    return _finish(series.folder, first, texts)


def refresh(series: Series, files: Files) -> list[str]:
    """The same patches with the line numbers and the context of a (newer) tree they apply to; their names."""
    state = first = series.pristine(files)
    texts: dict[str, str] = {}
    for patch in series.patches:
        after = patch.applied_to(state)
        head = (series.folder / patch.name).read_text().partition("\n---\n")[0]
        texts[patch.name] = f"{head}\n---\n{_diff(state, after)}"
        state = after
    _write(series.folder, texts)
    return _finish(series.folder, first, texts)


def _diff(old: Files, new: Files) -> str:
    """git's diff of two states of the files."""
    with tempfile.TemporaryDirectory() as folder:
        for side, files in (("a", old), ("b", new)):
            for path, content in files.items():
                if content is not None:
                    file = Path(folder, side, path)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
        diff = _git(Path(folder), *_DIFF, "--no-prefix", "--no-index", "a", "b", differences=True)
    # Sides that lack a file are called /dev/null in its place only.
    return re.sub(r"(?m)^diff --git [ab]/(.*) [ab]/\1$", r"diff --git a/\1 b/\1", _without_index(diff))


def _without_index(diff: str) -> str:
    """Blob hashes say nothing that the tree's hash in UPSTREAM does not, and change with every edit before them."""
    return re.sub(r"(?m)^index [0-9a-f]+\.\.[0-9a-f]+.*\n", "", diff)


def _write(folder: Path, texts: dict[str, str]) -> None:
    comments = [line for line in (folder / "series").read_text().splitlines() if line.startswith("#")]
    for path in folder.glob("*.patch"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "series").write_text("\n".join([*comments, *texts]) + "\n")


def _finish(folder: Path, pristine: Files, texts: dict[str, str]) -> list[str]:
    """Pin the hashes of the touched files before and after."""
    series = Series.read(folder)
    pins = {"Tree-Before": tree_hash(pristine), "Tree-After": tree_hash(series.patched(pristine))}
    text = (folder / "UPSTREAM").read_text()
    for key, value in pins.items():
        text = re.sub(rf"(?m)^{key}:.*$", f"{key}: {value}", text)
    (folder / "UPSTREAM").write_text(text)
    return list(texts)


def _git(checkout: Path, *arguments: str, differences: bool = False) -> str:
    """Output of git; with `differences`, status 1 says that there are some."""
    done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True)
    if done.returncode not in ((0, 1) if differences else (0,)):
        raise PatchError(f"git {arguments[0]} in {checkout}: {done.stderr.strip()}")
    return done.stdout


def _show(checkout: Path, commit: str, path: str) -> bytes | None:
    """The file as it was in `commit`."""
    done = subprocess.run(["git", "-C", str(checkout), "show", f"{commit}:{path}"], capture_output=True)
    return done.stdout if done.returncode == 0 else None
