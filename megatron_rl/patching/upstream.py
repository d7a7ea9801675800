"""The pinned upstream archive, the proof that a series fits it, and the export of patches."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.patching.releases import Target, line
from megatron_rl.patching.series import PURPOSES, Files, Patch, PatchError, Series, apply, run_git, write_files
from megatron_rl.patching.states import apply_or_revert, examine

SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 has filters


def fetch(series: Series, cache: Path, archive: str | None) -> Path:
    """Return the verified archive: `archive` if given, else from `cache`, else downloaded by pip."""
    if archive is not None:
        return _verified(series, Path(archive))
    for name in series.archives:
        if (cache / name).is_file():
            return _verified(series, cache / name)
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += _python_of(series)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        done = subprocess.run([*command, "-d", folder, series.requirement], capture_output=True, text=True)
        files = list(Path(folder).iterdir())
        if done.returncode != 0 or len(files) != 1:
            raise PatchError(f"pip download {series.requirement} failed:\n{done.stderr.strip()[-2000:]}")
        _verified(series, files[0])
        return files[0].rename(cache / files[0].name)


def _python_of(series: Series) -> list[str]:
    """Return the options by which pip selects the pinned wheel for any running Python."""
    tags = [re.search(r"-cp(\d)(\d+)-[^-]+-[^-]+\.whl$", name) for name in series.archives]
    versions = [f"{tag[1]}.{tag[2]}" for tag in tags if tag]
    return ["--python-version", versions[0]] if versions else []


def _verified(series: Series, path: Path) -> Path:
    if not path.is_file():
        raise PatchError(f"{path}: no such archive")
    if path.name not in series.archives:
        archives = ", ".join(series.archives) or "none"
        raise PatchError(f"{path.name} is not pinned in {series.name}/UPSTREAM; known archives: {archives}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != series.archives[path.name]:
        raise PatchError(f"{path}: SHA-256 is {digest}, UPSTREAM pins {series.archives[path.name]}; delete it")
    return path


def unpack(archive: Path, folder: Path, top: str) -> Path:
    """Unpack a wheel or an sdist and return the folder that contains `top`."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as sdist:
            sdist.extractall(folder, **SAFELY)
    for root in (folder, *sorted(folder.iterdir())):
        if (root / top).is_dir():
            return root
    raise PatchError(f"{archive.name}: holds no {top}/")


def check(
    series: Series,
    repository: Path,
    cache: Path,
    archive: str | None,
    tree: Path | None = None,
    purposes: Sequence[str] | None = None,
) -> str:
    """Prove the series on a copy of the pristine files of ``tree``, else of the archive; a line that says what was
    checked. A series for source trees alone has no archive: without a tree only its tests and its form are checked."""
    tests = {patch.trailers["Test"] for patch in series.patches if "Test" in patch.trailers}
    if missing := sorted(test for test in tests if not (repository / test).is_file()):
        raise PatchError(f"{series.name}: tests named in trailers do not exist: {', '.join(missing)}")
    if tree is None and not series.archives:
        return (
            f"skipped, read only ({len(series.patches)} patches, {len(series.paths)} files): prove it on "
            f"{series.pins['Source']} with `check --tree DIR {series.name}`"
        )
    with tempfile.TemporaryDirectory(prefix="patches-check-") as folder:
        if tree is not None:
            root, what = Path(folder), str(tree)
            write_files(root, examine(series, Target(tree, None)).pristine)
        else:
            source = fetch(series, cache, archive)
            root, what = unpack(source, Path(folder), series.pins["Root"]), source.name
        pristine = series.load(root)
        if (found := series.tree_hash(pristine)) != series.pins["Tree-Before"]:
            raise PatchError(
                f"{series.name}: {what} as it comes: the touched files hash to {found}, UPSTREAM says Tree-Before: "
                f"{series.pins['Tree-Before']}; after changing the series run `export`, which updates it"
            )
        purposes = list(series.purposes if purposes is None else purposes)
        proven = [patch for patch in series.of(purposes) if series.reachable(patch, pristine)]
        for purpose in dict.fromkeys(patch.purpose for patch in proven):
            there_and_back(pristine, [patch for patch in proven if patch.purpose == purpose])
        there_and_back(pristine, proven)
        apply_or_revert(series, Target(root, None), False, purposes or None)
        compile_changed(pristine, patched := series.load(root))
        apply_or_revert(series, Target(root, None), True)
        if series.load(root) != pristine:
            raise PatchError(f"{series.name}: reverting does not restore upstream's files")
        changed = sum(patched[path] != content for path, content in pristine.items())
        return f"{len(proven)} patches, {changed} files: apply to {what} and revert exactly"


def compile_changed(before: Files, after: Files) -> None:
    """Compile the Python files that differ."""
    for path, content in after.items():
        if content is not None and content != before[path] and path.endswith(".py"):
            compile(content, path, "exec")


def there_and_back(pristine: Files, patches: Sequence[Patch]) -> Files:
    """``pristine`` with ``patches``, each of which (but for rules) reverts to what it was applied to."""
    patched = pristine
    for patch in patches:
        before, patched = patched, patch.applied_to(patched)
        if patch.paths and patch.applied_to(patched, reverse=True) != before:
            raise PatchError(f"{patch.name}: does not revert to what it was applied to")
    return patched


# Write patch files from a git checkout with one commit per patch, or from a patched tree.


_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-renames")
_ZERO = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"


def from_checkout(series: Series, checkout: Path, base: str, purpose: str | None = None) -> list[str]:
    """One patch for each commit in `base..HEAD`, oldest first; their names.

    A commit keeps the file name of the patch with the same subject; others are named after their subject, and are of
    the series ``purpose``.
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
        change = _git(checkout, *_DIFF, f"{commit}~", commit, "--")
        # Without blob hashes: UPSTREAM has the tree's hash, and they change with every earlier edit.
        change = re.sub(r"(?m)^index [0-9a-f]+\.\.[0-9a-f]+.*\n", "", change)
        texts[name] = f"{_ZERO}From: {author}\nSubject: [PATCH] {subject}\n\n{body.strip()}\n---\n{change}"
    first = {path: _show(checkout, base, path) for path in _changed("".join(texts.values()))}
    _write(series, first, texts, purpose)
    folder, written = series.folder, Series.read(series.folder)
    pin = f"Tree-Before: {written.tree_hash({path: _show(checkout, base, path) for path in written.paths})}"
    text = (folder / "UPSTREAM").read_text()
    (folder / "UPSTREAM").write_text(re.sub(r"(?m)^Tree-Before:.*$", pin, text))
    return list(texts)


def _write(series: Series, pristine: Files, texts: dict[str, str], purpose: str | None = None) -> None:
    """Write the patch files and the list of them.

    A file that stands beside the list belongs to it alone. One of patches/megatron/ serves several releases: if its
    change is still the same, it keeps its text for all of them; if not, this release gets a file of its own.
    """
    folder, lines = series.folder, []
    comments = [line for line in (folder / "series").read_text().splitlines() if line.startswith("#")]
    patches, state = {patch.name: patch for patch in series.patches}, pristine
    for path in folder.glob("*.patch"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        known = patches.get(name)
        group = known.purpose if known else purpose
        if group is None and series.purposes:
            raise PatchError(f"{name} is new: name the series that it is for (--series {'|'.join(PURPOSES)})")
        head, _, change = text.partition("\n---\n")
        after = apply(f"\n{change}".encode(), state, _changed(change), name)
        if group is None:
            (folder / name).write_text(text)
            lines.append(name)
        elif known and _same(known, state, after):
            lines.append(f"{group}/{name}")
            if (old := series.files[name].read_text().partition("\n---\n"))[0] != head:
                series.files[name].write_text(f"{head}\n---\n{old[2]}")
        else:
            if known and name in _shared(series):
                name = f"{name.removesuffix('.patch')}-{line(series.pins['Version'])}.patch"
            (folder.parent / "megatron" / group).mkdir(parents=True, exist_ok=True)
            (folder.parent / "megatron" / group / name).write_text(text)
            lines.append(f"{group}/{name}")
        state = after
    (folder / "series").write_text("\n".join([*comments, *lines]) + "\n")


def _changed(diff: str) -> list[str]:
    return re.findall(r"(?m)^diff --git a/(.+) b/\1$", diff)


def _same(patch: Patch, state: Files, after: Files) -> bool:
    """Whether ``patch`` makes ``after`` of ``state``."""
    try:
        return patch.applied_to({path: state.get(path) for path in patch.paths} | state) == after
    except PatchError:
        return False


def _shared(series: Series) -> set[str]:
    """The patch files that other releases list, too."""
    others = (path for path in series.folder.parent.glob("*/series") if path.parent != series.folder)
    return {text.rpartition("/")[2].strip() for path in others for text in path.read_text().splitlines()}


def _git(checkout: Path, *arguments: str) -> str:
    done = run_git(checkout, *arguments)
    if done.returncode != 0:
        raise PatchError(f"git {arguments[0]} in {checkout}: {done.stderr.decode().strip()}")
    return done.stdout.decode()


def _show(checkout: Path, commit: str, path: str) -> bytes | None:
    """The file as it was in `commit`."""
    done = run_git(checkout, "show", f"{commit}:{path}")
    return done.stdout if done.returncode == 0 else None
