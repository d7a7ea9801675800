"""Keep the patches to upstream projects applied: status, check, apply, revert, export.

    python tools/patches.py status                 what is applied to the packages of this interpreter's environment
    python tools/patches.py apply                  apply every series there; a tree already patched is left alone
    python tools/patches.py revert                 back to upstream's files, byte for byte
    python tools/patches.py check                  prove that each series fits a pristine upstream, without touching any
    python tools/patches.py export --tree DIR --base TAG megatron-core
                                                   patch files from the commits TAG..HEAD of a git checkout
    ... --tree DIR megatron-core                   work on a git checkout or an unpacked source tree instead

A series that no package holds the files of (UPSTREAM: `Package: none`) is used only when it is named, with --tree.
Of several series for one package, the one for the installed version is used; `check` proves all of them.

To change a series, give it a git checkout: tag the pristine tree, `git am` the patches in the order of `series`, amend
or add commits (one for each patch, with the trailers Origin, Forwarded, Drop-When and Test), then export. Where a newer
upstream has only moved the text, `export --tree DIR` without --base renews line numbers and context.

A series is applied all or nothing: if one hunk does not match, no file changes and the message names patch, file and
hunk. Exit status: 0 done (status: applied), 1 not applied, 2 error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_rl.patching import export, target, upstream
from megatron_rl.patching.errors import PatchError
from megatron_rl.patching.series import Files, Series, tree_hash

REPOSITORY = Path(__file__).resolve().parents[2]
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
    """Bring the tree to the wanted state; a line that says what was done."""
    with target.locked(where.root):
        files = series.load(where.root)
        state, pristine = upstream_files(series, where, files)
        wanted = pristine if revert else series.patched(pristine)
        record = where.record(pristine, series.patched(pristine), revert)
        changed = target.replace_files(where.root, files | record[0], wanted | record[1])
    if not changed:
        return f"{series.name}: {'not applied' if revert else 'already applied'}, nothing to do"
    done = "reverted" if revert else "completed" if state == PARTIAL else "applied"
    pinned = tree_hash(pristine) == series.pins["Tree-Before"]
    note = "" if pinned else f" (its files are not those of {series.pins['Version']})"
    return f"{series.name}: {done}, {len(series.patches)} patches, {len(files)} files in {where.root}{note}"


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


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["status", "check", "apply", "revert", "export"])
    parser.add_argument("upstream", nargs="*", help="folders below patches/; default: all for packages")
    parser.add_argument("--tree", help="a git checkout or an unpacked source tree, instead of the installed package")
    parser.add_argument("--base", help="export: the commit or tag of the checkout that is pristine upstream")
    parser.add_argument("--archive", help="check: use this archive instead of downloading it")
    parser.add_argument("--allow-global", action="store_true", help="patch a package outside of a virtual environment")
    parser.add_argument("--json", action="store_true", help="status: print data")
    parser.add_argument("--patches", default=REPOSITORY / "patches", type=Path, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def _choose(options: argparse.Namespace, known: list[str]) -> list[str]:
    """The series that are named; without names, all that the command can do something with."""
    if options.upstream or options.command == "check":
        return options.upstream or known
    chosen: dict[str, str] = {}  # package → the series for its installed version, else the first: `find` says why not
    for name in known:
        series = Series.read(options.patches / name)
        if not series.needs_tree and (series.package not in chosen or target.is_installed(series)):
            chosen[series.package] = name
    return list(chosen.values())


def run(options: argparse.Namespace) -> int:
    """Run one command on every chosen series; the exit status."""
    known = sorted(path.parent.name for path in options.patches.glob("*/UPSTREAM"))
    chosen = _choose(options, known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise PatchError(f"no such upstream: {', '.join(unknown)}; there are: {', '.join(known)}")
    if options.tree is not None and len(chosen) != 1:
        raise PatchError(f"--tree is one tree: name one upstream of {', '.join(known)}")
    reports = []
    for name in chosen:
        series = Series.read(options.patches / name)
        if options.command == "check":
            tree = options.tree and target.find(series, options.tree, options.allow_global).root
            cache = REPOSITORY / ".cache" / "patches"
            print(f"{name}: {upstream.check(series, REPOSITORY, cache, options.archive, tree)}")
        elif options.command == "export":
            if options.tree is None:
                raise PatchError("export reads a checkout or a tree: name it with --tree")
            where = target.find(series, options.tree, options.allow_global)
            if options.base:
                names = export.from_checkout(series, where.root, options.base)
            else:
                names = export.refresh(series, series.load(where.root))
            print(f"{name}: wrote {len(names)} patches")
        elif options.command == "status":
            reports.append(report(series, target.find(series, options.tree, options.allow_global)))
        else:
            where = target.find(series, options.tree, options.allow_global)
            print(apply_or_revert(series, where, options.command == "revert"))
    if options.command == "status":
        _print(reports, options.json)
        return 0 if all(entry["state"] == APPLIED for entry in reports) else 1
    return 0


def _print(reports: list[dict[str, object]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(reports, indent=2))
        return
    for entry in reports:
        print(f"{entry['upstream']} {entry['version']} in {entry['root']}: {entry['state']}")
        for patch in entry["patches"]:
            print(f"  {'+' if patch['applied'] else '-'} {patch['name']}: {patch['subject']}")
        if entry["message"]:
            print(entry["message"], file=sys.stderr)


def main() -> int:
    """Entry point: errors become one message and status 2."""
    try:
        return run(arguments())
    except (PatchError, OSError) as error:
        print(f"patches: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
