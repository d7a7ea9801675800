"""Which state a tree is in, the way to another one, and what there is to say about it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.patching import target
from megatron_rl.patching.errors import PatchError
from megatron_rl.patching.series import Files, Series, tree_hash

APPLIED, PRISTINE, PARTIAL = "applied", "not applied", "partly applied"


def state_of(series: Series, files: Files) -> tuple[str, Files]:
    """The state of the touched files, and upstream's files. Raises PatchError if a file is neither."""
    if tree_hash(files) == series.pins["Tree-Before"]:
        return PRISTINE, files
    pristine = series.pristine(files)
    if files == series.patched(pristine):
        return APPLIED, pristine
    return (PRISTINE if files == pristine else PARTIAL), pristine


def upstream_files(series: Series, where: target.Target, files: Files) -> tuple[str, Files]:
    """`state_of`, with an installed package held to the pinned upstream."""
    try:
        state, pristine = state_of(series, files)
    except PatchError as error:
        raise PatchError(f"{error}\n{_advice(series, where)}") from None
    if where.version is not None and tree_hash(pristine) != series.pins["Tree-Before"]:
        raise PatchError(f"{where.root}: differs from upstream's {where.version}\n{_advice(series, where)}")
    return state, pristine


def _advice(series: Series, where: target.Target) -> str:
    what = f"{where.root} is neither upstream nor patched with this series (an older one?); nothing was changed."
    if where.version is None:
        return f"{what}\nCheck it out afresh."
    return f"{what}\nReinstall it: pip install --no-deps --force-reinstall {series.pins['Package']}"


def apply_or_revert(series: Series, where: target.Target, revert: bool) -> str:
    """Bring the tree to the wanted state; what was done, in words."""
    with target.locked(where.root):
        files = series.load(where.root)
        state, pristine = upstream_files(series, where, files)
        wanted = pristine if revert else series.patched(pristine)
        record = where.record(pristine, series.patched(pristine), revert)
        changed = target.replace_files(where.root, files | record[0], wanted | record[1])
    if not changed:
        return f"{'not applied' if revert else 'already applied'}, nothing to do"
    done = "reverted" if revert else "completed" if state == PARTIAL else "applied"
    pinned = tree_hash(pristine) == series.pins["Tree-Before"]
    note = "" if pinned else f" (its files are not those of {series.pins['Version']})"
    return f"{done}, {len(series.patches)} patches, {len(files)} files in {where.root}{note}"


def report(series: Series, where: target.Target) -> dict[str, object]:
    """What `status` prints, as data: state, version and each patch."""
    files = series.load(where.root)
    message = ""
    try:
        state = upstream_files(series, where, files)[0]
    except PatchError as error:
        state, message = "unknown", str(error)
    applied = series.applied(files)
    patches = [{"name": p.name, "subject": p.subject, "applied": applied[p.name]} for p in series.patches]
    return {
        "upstream": series.name,
        "version": where.version or series.pins["Version"],
        "root": str(where.root),
        "state": state,
        "tree": tree_hash(files),
        "message": message,
        "patches": patches,
    }


def names(folder: Path) -> list[str]:
    """The series below ``folder``."""
    return sorted(path.parent.name for path in folder.glob("*/UPSTREAM"))


def of_installed_packages(folder: Path) -> list[Series]:
    """One series for each package: that for its installed version, else the first, of which `target.find` says why not.

    A series for source trees alone (UPSTREAM: `Package: none`) is used only when it is named.
    """
    chosen: dict[str, Series] = {}
    for name in names(folder):
        series = Series.read(folder / name)
        if not series.needs_tree and (series.package not in chosen or target.is_installed(series)):
            chosen[series.package] = series
    return list(chosen.values())


def lines(reports: Iterable[dict[str, object]]) -> list[str]:
    """Reports for a person: a line for each series, and one for each of its patches."""
    text = []
    for entry in reports:
        text.append(f"{entry['upstream']} {entry['version']} in {entry['root']}: {entry['state']}")
        text += [
            f"  {'+' if patch['applied'] else '-'} {patch['name']}: {patch['subject']}" for patch in entry["patches"]
        ]
    return text


def installed_status(folder: Path) -> list[str]:
    """`lines` of the packages of this interpreter's environment. What cannot be read is said in a line of its own."""
    try:
        return lines(report(series, target.find(series, None, True)) for series in of_installed_packages(folder))
    except (PatchError, OSError) as error:
        return [f"unknown: {error}"]
