"""Which state a tree is in, the way to another one, and what there is to say about it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.patching import record, releases
from megatron_rl.patching.record import Record
from megatron_rl.patching.replace import remove_leftovers, replace_files
from megatron_rl.patching.series import Files, Patch, PatchError, Series, content_of

APPLIED, PRISTINE, PARTIAL, UNFIT = "applied", "not applied", "partly applied", "does not fit"
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class State:
    """What a tree holds."""

    series: Series
    files: Files
    records: list[Record]
    back: dict[str, int | None]
    """By path, which of the records leads back to upstream's file; None: the file is upstream's."""
    current: int | None
    """The record that all files agree with; None: none is in force, or a command did not come to its end."""
    is_exact: bool
    """Whether every file is as a record says, to the last byte."""

    @cached_property
    def pristine(self) -> Files:
        """Upstream's files, with edits of others where no patch is."""
        files = self.files
        for number, made in enumerate(self.records):
            files = made.reverted(files, [path for path, back in self.back.items() if back == number])
        return files

    @property
    def is_torn(self) -> bool:
        """Whether some files are in one state and some in another."""
        return self.current is None and any(back is not None for back in self.back.values())

    @property
    def kept(self) -> set[str]:
        """The patches that stay, whatever others a command applies or reverts."""
        held = self.records[self.current or 0].digests if self.current is not None or self.is_torn else {}
        return {patch.name for patch in self.series.patches if patch.name in held}

    @cached_property
    def whole(self) -> set[str]:
        """The patches that the tree has as they are here."""
        held = self.records[self.current].digests if self.current is not None else {}
        return {patch.name for patch in self.series.patches if held.get(patch.name) == record.digest(patch)}

    @property
    def begun(self) -> set[str]:
        """The patches that some files have, or that the tree has in an older form."""
        held = {name for made in self.records for name in made.digests} if self.is_torn else self.kept
        return held - self.whole

    def reachable(self, purposes: Sequence[str] | None) -> list[Patch]:
        """The patches of these series that can be applied to this tree at all."""
        return [patch for patch in self.series.of(purposes) if self.series.reachable(patch, self.files)]

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
        """What of these series `--series` would apply: whole ones that fit, SERIES/PATCH up to what does not."""
        misfits, names = self.misfits(self.reachable(self.series.purposes)), []
        for purpose in dict.fromkeys(patch.purpose for patch in self.reachable(purposes) if patch.purpose):
            patches = self.reachable([purpose])
            first = next((i for i, patch in enumerate(patches) if patch.name in misfits), len(patches))
            if first == len(patches):
                names.append(purpose)
            elif first:
                names.append(patches[first - 1].path)
        return names

    def pinned(self) -> bool:
        """Whether upstream's files are those of the release that the series is proven on."""
        if self.is_exact and self.current is not None:  # then git is not needed
            return self.records[self.current].upstream == self.series.pins["Tree-Before"]
        return self.series.tree_hash(self.pristine) == self.series.pins["Tree-Before"]


def examine(series: Series, where: releases.Target) -> State:
    """Look at the tree. An installed package of the pinned version is held to the pinned upstream."""
    records = record.read_all(series, where.root)
    files = series.load(where.root)
    files |= {path: content_of(where.root / path) for made in records for path in made.blobs if path not in files}
    sides: dict[str, list[int | None]] = {}
    is_exact = True
    for path in sorted({path for made in records for path in made.blobs}):
        found = [(record.matches(made, path, files[path]), number) for number, made in enumerate(records)]
        sides[path] = [None if side == "before" else number for side, number in found if side]
        if not sides[path]:
            sides[path], is_exact = [_edited(series, where, records, files, path)], False
    current = next((n for n, made in enumerate(records) if _agree(sides, n, made)), None)
    back = {path: current if current in found else None if None in found else found[0] for path, found in sides.items()}
    state = State(series, files, records, back, current, is_exact)
    # A series without an archive is made on a branch: the release of that number may differ from it.
    if where.version == series.pins["Version"] and series.archives and not state.pinned():
        reasons = "".join(f"{reason}\n" for reason in state.misfits(state.reachable(None)).values())
        raise PatchError(f"{reasons}{where.root}: differs from upstream's {where.version}\n{_restore(series, where)}")
    return state


def _agree(sides: dict[str, list[int | None]], number: int, made: Record) -> bool:
    """Whether every file is as this record says: changed, or upstream's where it changes nothing."""
    return all((number if path in made.blobs else None) in found for path, found in sides.items())


def _edited(series: Series, where: releases.Target, records: list[Record], files: Files, path: str) -> int | None:
    """Which record leads back from a file that was edited where no patch is; None: its patches are not in it."""
    of_path = [number for number, made in enumerate(records) if path in made.blobs]
    for number in of_path:
        try:
            records[number].reverted(files, [path])
        except PatchError:
            continue
        return number
    if any(records[number].fits(files, path) for number in of_path):
        return None
    raise PatchError(
        f"{where.root / path}: was edited where patches have changed it, or replaced\n{_restore(series, where)}\n"
        f"If all files are upstream's again, remove {where.root / record.place_of(series)}."
    )


def _restore(series: Series, where: releases.Target) -> str:
    """How to bring back upstream's files where some are neither upstream's nor patched."""
    if where.version is not None:
        what = f"{where.root} holds edits or older patches; nothing was changed."
        return f"{what}\nReinstall it: {releases.reinstall(series.package, where.version)}"
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
        patches = state.reachable(series.purposes if revert and purposes is None else purposes)
        if purposes and not patches:
            missing = f"{series.name} has no {' or '.join(purposes)} for {where.root}"
            raise PatchError(f"{missing}: {_left_out(state, purposes)}")
        if revert:
            patches = [patch for patch in patches if patch.name in state.whole | state.begun]
        else:
            _expect_fit(state, where, patches, purposes)
        chosen = {patch.name for patch in patches}
        changed = _bring(state, where, state.kept - chosen if revert else state.kept | chosen)
    if not changed:
        return f"{'not applied' if revert else 'already applied'}, nothing to do"
    done = "reverted" if revert else "completed" if state.begun or state.whole & chosen else "applied"
    note = "" if state.pinned() else f" (its files are not those of {series.pins['Version']})"
    if not revert and (beyond := _beyond(state, purposes or ())):
        note += f"; without {', '.join(beyond)}: for a whole checkout"
    return f"{done}, {len(patches)} patches, {changed} files in {where.root}{note}"


def _bring(state: State, where: releases.Target, names: set[str]) -> int:
    """Give the tree upstream's files with these patches alone; how many files that changed."""
    series, root = state.series, where.root
    place, wanted_place = record.place_of(series), record.wanted_place(series)
    wanted = series.patched(state.pristine, names)
    held = [patch for patch in series.patches if patch.name in names]
    text = record.text_of(series, held, state.pristine, wanted) if names else None
    listed = where.record(state.pristine | {place: None}, wanted | {place: text})
    remove_leftovers(root, [*state.files, *listed[0], wanted_place])
    files = state.files
    if state.is_torn:
        replace_files(root, files, state.pristine)
        files = state.pristine
        _put_record(root, place, wanted_place, None)
    if text is not None and text != content_of(root / place):
        replace_files(root, {wanted_place: content_of(root / wanted_place)}, {wanted_place: text})
    try:
        replace_files(root, files | listed[0], wanted | listed[1])
    except BaseException:
        if not any(content_of(root / path) == wanted[path] != content for path, content in files.items()):
            (root / wanted_place).unlink(missing_ok=True)  # all is as it was
        raise
    _put_record(root, place, wanted_place, text)
    return sum(wanted[path] != content for path, content in state.files.items())


def _put_record(root: Path, place: str, wanted_place: str, text: bytes | None) -> None:
    if text is None:
        (root / place).unlink(missing_ok=True)
        (root / wanted_place).unlink(missing_ok=True)
    elif text == content_of(root / wanted_place):
        os.replace(root / wanted_place, root / place)
    else:
        (root / wanted_place).unlink(missing_ok=True)


def _expect_fit(state: State, where: releases.Target, patches: list[Patch], purposes: Sequence[str] | None) -> None:
    if reasons := state.misfits(patches):
        raise PatchError("\n".join([*reasons.values(), _advice(state, where, purposes)]))


def _beyond(state: State, purposes: Sequence[str]) -> list[str]:
    """The patches of these series that are for a whole checkout, where the tree is a package."""
    return [patch.path for patch in state.series.of(purposes) if not state.series.reachable(patch, state.files)]


def _left_out(state: State, purposes: Sequence[str]) -> str:
    """Why there is nothing of these series for the tree."""
    names = tuple(name.split("/")[0] for name in purposes)
    beyond = [f"{name} is for a whole checkout" for name in _beyond(state, purposes)]
    return "; ".join([*beyond, *(note for note in state.series.superseded if note.startswith(names))])


def report(series: Series, where: releases.Target, purposes: Sequence[str] | None = None) -> dict[str, Any]:
    """What `status` prints, as data: version, each series (those of ``purposes``, if they are named) and each patch.

    The state is that of these series (None: of those that are applied by default).
    """
    names = _names(series, purposes) if purposes else list(series.purposes) or [""]
    parts = {name: [part for part in purposes or () if part.startswith(f"{name}/")] or [name] for name in names}
    try:
        state = examine(series, where)
        groups = {name: _group(state, name, parts[name]) for name in names}
    except PatchError as error:
        state, groups = None, {name: {"state": UNKNOWN, "message": str(error)} for name in names}
    wanted = [name for name in groups if name in _names(series, purposes)]
    states = {groups[name]["state"] for name in wanted}
    return {
        "upstream": series.name,
        "version": where.version or releases.version_of(where.root) or series.pins["Version"],
        "root": str(where.root),
        "kind": where.kind,
        "state": next(iter(states)) if len(states) == 1 else UNKNOWN if states & {UNKNOWN, UNFIT} else PARTIAL,
        "message": "\n".join(dict.fromkeys(groups[name]["message"] for name in wanted if groups[name]["message"])),
        "series": groups,
        "superseded": [note for note in series.superseded if note.startswith(tuple(names))],
        "patches": [
            {
                "name": patch.name,
                "subject": patch.subject,
                "purpose": patch.purpose,
                "applied": state is not None and patch.name in state.whole,
                "reachable": state is None or series.reachable(patch, state.files),
            }
            for patch in series.patches
            if (patch.purpose or "") in names
        ],
    }


def _names(series: Series, purposes: Sequence[str] | None) -> list[str]:
    """The names of the series that ``purposes`` are of; an empty name for patches that are of none."""
    return [""] if not series.purposes else list(dict.fromkeys(p.purpose or "" for p in series.of(purposes)))


def _group(state: State, purpose: str, parts: list[str]) -> dict[str, str]:
    patches = state.reachable(parts if purpose else None)
    missing = [patch for patch in patches if patch.name not in state.whole]
    if not missing:
        return {"state": APPLIED if patches else UNFIT, "message": "" if patches else _left_out(state, [purpose])}
    if not state.pinned() and (reasons := state.misfits(patches)):
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
                + ("" if patch["reachable"] else " (for a whole checkout)")
                for patch in entry["patches"]
                if (patch["purpose"] or "") == name
            ]
        text += [f"  superseded: {note}" for note in entry["superseded"]]
    return text


def installed_status(folder: Path) -> list[str]:
    """`lines` of the packages of this interpreter's environment. What cannot be read is said in a line of its own."""
    try:
        installed = releases.of_installed_packages(folder)
        return lines(report(series, releases.find_target(series, None, True)) for series in installed)
    except (InputError, OSError) as error:
        return [f"unknown: {error}"]
