"""Which state a tree is in, the way to another one, and what there is to say about it.

Files of a tree are changed all, or none of them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.patching import releases
from megatron_rl.patching.series import Files, Patch, PatchError, Series

TEMPORARY_PREFIX = ".patches-new-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def replace_files(root: Path, old: Files, new: Files) -> list[str]:
    """Turn `old` into `new`; the paths that changed.

    A folder beside the old one gets the new files, and links to all others; then the two change places in one step.
    Whenever the process is killed, the tree has all changes or none. Where the file system cannot exchange folders,
    files are replaced one by one: a process killed in between leaves each file old or new, and the next `apply` or
    `revert` finishes the job.

    A file of another top folder (pip's list of files) is replaced first.
    """
    changed = [path for path in sorted(old) if old[path] != new[path]]
    _remove_leftovers(root, old)
    try:
        for top in sorted({path.split("/")[0] for path in changed}, key=lambda top: not top.endswith(".dist-info")):
            paths = [path for path in changed if path.split("/")[0] == top]
            folder = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
            if len(paths) == 1 or not _exchange(root, folder, {path: new[path] for path in paths}):
                _replace_one_by_one(root, {path: old[path] for path in paths}, new)
    finally:
        _remove_leftovers(root, old)
    for path in changed:
        _drop_bytecode(root / path)
    return changed


def _exchange(root: Path, folder: Path, new: Files) -> bool:
    """Put a copy of ``folder`` with the files ``new`` in its place; False: the file system cannot."""
    place = root / folder
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or not place.is_dir() or place.is_symlink():
        return False
    copy = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=place.parent))
    try:
        byte_code = {(root / path).parent / "__pycache__" / Path(path).stem for path in new}
        _link(place, copy, {root / path for path in new}, byte_code)
        for path, content in new.items():
            if content is not None:
                target = copy / Path(path).relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                _put(target, _write_beside(target, content, (root / path)))
        return rename(_AT_FDCWD, os.fsencode(copy), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE) == 0
    except OSError:  # a device, a full disk: the tree is as it was
        return False
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _link(source: Path, copy: Path, but: set[Path], byte_code: set[Path]) -> None:
    """Fill the folder ``copy`` with links to what ``source`` holds."""
    shutil.copystat(source, copy)
    with os.scandir(source) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink():
                os.symlink(os.readlink(path), copy / entry.name)
            elif entry.is_dir():
                (copy / entry.name).mkdir()
                _link(path, copy / entry.name, but, byte_code)
            elif path not in but and path.parent / entry.name.split(".")[0] not in byte_code:
                os.link(path, copy / entry.name)


def _replace_one_by_one(root: Path, old: Files, new: Files) -> None:
    """Everything is written and synced before the first file changes; an error or Ctrl-C in between restores `old`."""
    temporaries = {}
    touched: list[str] = []
    try:
        for path in old:
            if (content := new[path]) is not None:
                temporaries[path] = _write_beside(root / path, content, root / path)
        for path in old:
            touched.append(path)
            _put(root / path, temporaries.get(path))
    except BaseException:
        for path in touched:
            content = old[path]
            _put(root / path, None if content is None else _write_beside(root / path, content, root / path))
        raise


def _write_beside(path: Path, content: bytes, model: Path) -> Path:
    """A synced file in the same folder (so that renaming is atomic) with the mode of ``model``, which it replaces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    with open(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    # mkstemp makes files private; a new source file is as readable as its neighbours.
    os.chmod(name, model.stat().st_mode & 0o7777 if model.exists() else 0o644)
    return Path(name)


def _put(path: Path, temporary: Path | None) -> None:
    if temporary is None:
        path.unlink(missing_ok=True)
    else:
        # A rename, not a write: pip and uv may share one file between environments by hard links.
        os.replace(temporary, path)


def _remove_leftovers(root: Path, files: Files) -> None:
    """Remove temporary files and folders of this run, or of one that was killed."""
    for folder in {parent for path in files for parent in (root / path).parents if parent.is_relative_to(root)}:
        for leftover in folder.glob(TEMPORARY_PREFIX + "*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _drop_bytecode(path: Path) -> None:
    """Byte code is matched by size and second of change: too coarse for a file just replaced."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


APPLIED, PRISTINE, PARTIAL, UNFIT = "applied", "not applied", "partly applied", "does not fit"
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class State:
    """What a tree holds."""

    series: Series
    files: Files
    pristine: Files
    """Upstream's files."""
    whole: frozenset[str]
    """The patches that are in all files that they touch."""
    begun: frozenset[str]
    """The patches that are in some of them only."""

    def reachable(self, purposes: Sequence[str] | None) -> list[Patch]:
        """The patches of these series that can be applied to this tree at all."""
        return [patch for patch in self.series.of(purposes) if self.series.reachable(patch, self.pristine)]

    def misfits(self, patches: Iterable[Patch]) -> dict[str, str]:
        """Why each of ``patches`` that does not fit upstream's files does not."""
        files, reasons = self.pristine, {}
        for patch in patches:
            try:
                files = patch.applied_to(files)
            except PatchError as error:
                reasons[patch.name] = str(error)
        return reasons

    def fitting(self, purposes: Sequence[str] | None) -> list[str]:
        """What of these series `--series` would apply: those that fit whole, and SERIES/PATCH up to what does not fit.

        The patches of `cpu` are of use together alone.
        """
        misfits, names = self.misfits(self.reachable(self.series.purposes)), []
        for purpose in dict.fromkeys(patch.purpose for patch in self.reachable(purposes) if patch.purpose):
            patches = self.reachable([purpose])
            first = next((i for i, patch in enumerate(patches) if patch.name in misfits), len(patches))
            if first == len(patches):
                names.append(purpose)
            elif first and purpose != "cpu":
                names.append(patches[first - 1].path)
        return names

    def pinned(self) -> bool:
        """Whether upstream's files are those of the release that the series is proven on."""
        return self.series.tree_hash(self.pristine) == self.series.pins["Tree-Before"]


def examine(series: Series, where: releases.Target) -> State:
    """Look at the tree. An installed package of the pinned version is held to the pinned upstream."""
    files = series.load(where.root)
    try:
        pristine, held = series.undo(files)
    except PatchError as error:
        raise PatchError(f"{error}\n{_restore(series, where)}") from None
    whole = {p.name for p in series.patches if all(p.name in held[path] for path in p.paths)}
    begun = set().union(*held.values()) - whole
    state = State(series, files, pristine, frozenset(whole), frozenset(begun))
    # A series without an archive is made on a branch: the release of that number may differ from it.
    if where.version == series.pins["Version"] and series.archives and not state.pinned():
        reasons = "".join(f"{reason}\n" for reason in state.misfits(state.reachable(None)).values())
        raise PatchError(f"{reasons}{where.root}: differs from upstream's {where.version}\n{_restore(series, where)}")
    return state


def _restore(series: Series, where: releases.Target) -> str:
    """How to bring back upstream's files where some are neither upstream's nor patched."""
    if where.version is not None:
        pip = f"pip install --no-deps --force-reinstall {series.package}=={where.version}"
        return f"{where.root} holds edits or older patches; nothing was changed.\nReinstall it: {pip}"
    if other := _other_series(series, where):
        return other
    what = f"{where.root} ({where.kind}) holds edits of patched lines, or older patches; nothing was changed."
    if (where.root / ".git").exists():
        return f"{what}\nBring the file back, and try again: git -C {where.root} checkout -- FILE"
    return f"{what}\nBring the file back from {series.pins['Source']}, and try again."


def _other_series(series: Series, where: releases.Target) -> str:
    """The advice to take the patches for this tree, if others than these are for it; else nothing."""
    version = releases.version_of(where.root)
    what = f"{where.root} ({where.kind}): {series.name} is proven on {series.pins['Version']}; nothing was changed."
    for name, other in releases.others(series).items():
        if version is not None and releases.line(version) == releases.line(other):
            return f"{what}\nThe patches for this tree are {name}: leave out the name, and they are found."
    return ""


def _advice(state: State, where: releases.Target, purposes: Sequence[str] | None) -> str:
    """What to do about upstream's files that patches do not fit."""
    series = state.series
    if where.version is None and (other := _other_series(series, where)):
        return other
    what = f"{where.root} ({where.kind}): {series.name} is proven on {series.pins['Version']}; nothing was changed."
    if fitting := state.fitting(purposes):
        what = f"{what}\nThese fit; take those: --series {','.join(fitting)}"
    elif where.version is None:
        what = f"{what}\nNone of what was named fits: nothing of it can be applied to this tree."
    if where.version is not None and series.archives:
        package = f"{series.package}=={series.pins['Version']}"
        what = f"{what}\nOr install the release on which all fit: pip install --no-deps {package}"
    return what


def apply_or_revert(series: Series, where: releases.Target, revert: bool, purposes: Sequence[str] | None = None) -> str:
    """Bring the tree to the wanted state; what was done, in words.

    ``purposes``: the series to apply (None: the default ones) or to revert (None: all). Others stay as they are.
    """
    with releases.locked_tree(where.root):
        state = examine(series, where)
        named = series.purposes if revert and purposes is None else purposes
        patches = state.reachable(named)
        if purposes and not patches:
            raise PatchError(
                f"{series.name} has no {' or '.join(purposes)} for {where.root}: {why_not(state, purposes)}"
            )
        if revert:
            patches = [patch for patch in patches if patch.name in state.whole | state.begun]
        else:
            _expect_fit(state, where, patches, purposes)
        chosen = {patch.name for patch in patches}
        names = state.whole - chosen if revert else state.whole | chosen
        wanted = series.patched(state.pristine, names)
        record = where.record(state.pristine, wanted)
        changed = replace_files(where.root, state.files | record[0], wanted | record[1])
    if not changed:
        return f"{'not applied' if revert else 'already applied'}, nothing to do"
    done = "reverted" if revert else "completed" if state.begun or state.whole & chosen else "applied"
    note = "" if state.pinned() else f" (its files are not those of {series.pins['Version']})"
    if not revert:
        note += "".join(f"; nothing of {name}: {why_not(state, [name])}" for name in _without_patches(state, purposes))
    touched = {path for patch in patches for path in patch.paths}
    return f"{done}, {len(patches)} patches, {len(touched)} files in {where.root}{note}"


def _without_patches(state: State, purposes: Sequence[str] | None) -> list[str]:
    """Those of the named series of which the tree gets nothing."""
    return [name for name in purposes or () if state.series.purposes and not state.reachable([name])]


def _expect_fit(state: State, where: releases.Target, patches: list[Patch], purposes: Sequence[str] | None) -> None:
    if reasons := state.misfits(patches):
        raise PatchError("\n".join([*reasons.values(), _advice(state, where, purposes)]))


def why_not(state: State, purposes: Sequence[str]) -> str:
    """Why there is nothing of these series for the tree."""
    notes = [
        note
        for key in ("Lacking", "Superseded")
        for note in state.series.notes[key]
        if note.startswith(tuple(name.split("/")[0] for name in purposes))
    ]
    beyond = [p.name for p in state.series.of(purposes) if not state.series.reachable(p, state.pristine)]
    return "; ".join([f"{name} is for a whole checkout" for name in beyond] + notes) or "it lists none"


def report(series: Series, where: releases.Target, purposes: Sequence[str] | None = None) -> dict[str, Any]:
    """What `status` prints, as data: state, version, each series and each patch.

    The state is that of the series ``purposes`` (None: of those that are applied by default).
    """
    files = series.load(where.root)
    state, groups = _groups(series, where, files, purposes)
    applied = {p.name: p.name in state.whole for p in series.patches} if state else _applied(series, files)
    wanted = [name for name in groups if name in _default(series, purposes)]
    states = {groups[name]["state"] for name in wanted}
    return {
        "upstream": series.name,
        "version": where.version or releases.version_of(where.root) or series.pins["Version"],
        "root": str(where.root),
        "kind": where.kind,
        "state": next(iter(states)) if len(states) == 1 else UNKNOWN if states & {UNKNOWN, UNFIT} else PARTIAL,
        "tree": series.tree_hash(files),
        "message": "\n".join(dict.fromkeys(groups[name]["message"] for name in wanted if groups[name]["message"])),
        "series": groups,
        "superseded": series.notes["Superseded"],
        "lacking": series.notes["Lacking"],
        "patches": [
            {"name": p.name, "subject": p.subject, "purpose": p.purpose, "applied": applied[p.name]}
            for p in series.patches
        ],
    }


def _applied(series: Series, files: Files) -> dict[str, bool]:
    try:
        return series.applied(files)
    except PatchError:
        return dict.fromkeys((patch.name for patch in series.patches), False)


def _default(series: Series, purposes: Sequence[str] | None) -> list[str]:
    return [""] if not series.purposes else list(dict.fromkeys(p.purpose or "" for p in series.of(purposes)))


def _groups(
    series: Series, where: releases.Target, files: Files, purposes: Sequence[str] | None
) -> tuple[State | None, dict[str, dict[str, str]]]:
    """The state of each series, or of the part of it that ``purposes`` names; of patches that are of none, under an
    empty name."""
    names = series.purposes or ("",)
    parts = {name: [part for part in purposes or () if part.startswith(f"{name}/")] for name in names}
    known = {"Tree-Before": PRISTINE, "Tree-After": APPLIED, None: None}[series.known_by_hash(files)]
    if known:
        default = _default(series, None)
        return None, {n: {"state": known if n in default else PRISTINE, "message": ""} for n in names}
    try:
        state = examine(series, where)
    except PatchError as error:
        return None, {name: {"state": UNKNOWN, "message": str(error)} for name in names}
    return state, {name: _group(state, name, parts[name] or [name]) for name in names}


def _group(state: State, purpose: str, parts: list[str]) -> dict[str, str]:
    patches = state.reachable(parts if purpose else None)
    missing = [patch for patch in patches if patch.name not in state.whole]
    if not missing:
        return {"state": APPLIED if patches else UNFIT, "message": "" if patches else why_not(state, [purpose])}
    if reasons := state.misfits(patches):
        part = [f"what stands before it fits: --series {name}" for name in state.fitting([purpose]) if purpose]
        return {"state": UNFIT, "message": "\n".join([*reasons.values(), *part])}
    begun = len(missing) < len(patches) or any(patch.name in state.begun for patch in missing)
    return {"state": PARTIAL if begun else PRISTINE, "message": ""}


def lines(reports: Iterable[dict[str, Any]]) -> list[str]:
    """Reports for a person: a line for each upstream, for each of its series, and for each patch."""
    text = []
    for entry in reports:
        text.append(f"{entry['upstream']} {entry['version']} in {entry['root']} ({entry['kind']}): {entry['state']}")
        for name, group in entry["series"].items():
            if name:
                text.append(f"  {name}: {group['state']}{', but fits' if group['state'] == PRISTINE else ''}")
            reasons = group["message"].splitlines() if group["state"] == UNFIT else []  # of others, said once
            text += [f"      {reason}" for reason in reasons]
            text += [
                f"  {'+' if patch['applied'] else '-'} {patch['name']}: {patch['subject']}"
                for patch in entry["patches"]
                if (patch["purpose"] or "") == name
            ]
        text += [f"  superseded: {note}" for note in entry["superseded"]]
        text += [f"  lacking: {note}" for note in entry["lacking"]]
    return text


def installed_status(folder: Path) -> list[str]:
    """`lines` of the packages of this interpreter's environment. What cannot be read is said in a line of its own."""
    try:
        installed = releases.of_installed_packages(folder)
        return lines(report(series, releases.find_target(series, None, True)) for series in installed)
    except (InputError, OSError) as error:
        return [f"unknown: {error}"]
