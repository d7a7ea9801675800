"""The command `patch`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.patching import releases, states, upstream
from megatron_rl.patching.series import PURPOSES, PatchError, Series
from megatron_rl.shipped import checkout, shipped

EXIT_NOT_APPLIED = 1


def add_patch(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="status|check|apply|revert|export")
    texts = {
        "status": "Show which patches are applied.",
        "check": "Prove that each series fits a pristine upstream.",
        "apply": "Apply every series, or those named.",
        "revert": "Restore upstream's files.",
        "export": "Write patch files from a git checkout.",
    }
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "upstream",
            nargs="*",
            help="Use these folders below patches/ (default: those for the tree, or for installed packages).",
        )
        action.add_argument("--series", help=f"Take these series alone, commas between them: {', '.join(PURPOSES)}.")
        action.add_argument(
            "--tree", help="Work on this git checkout or unpacked source tree instead of the installed package."
        )
        action.add_argument(
            "--allow-global", action="store_true", help="Work on a package outside of a virtual environment as well."
        )
        action.add_argument("--patches", default=shipped("patches"), type=Path, help=argparse.SUPPRESS)
    actions.choices["check"].add_argument("--archive", help="Use this archive instead of downloading it.")
    actions.choices["export"].add_argument(
        "--base", help="Take this commit or tag of the checkout as pristine upstream."
    )


def run_patch(options: argparse.Namespace) -> int:
    """Apply the patches to upstream projects, check, revert or export them, or show which are applied.

        megatron-rl patch status                 what is applied to the packages of this interpreter's environment
        megatron-rl patch apply                  apply what runs need there; a tree already patched is left alone
        megatron-rl patch revert                 back to upstream's files, byte for byte
        megatron-rl patch check                  prove that each release's patches fit it, without touching any tree
        megatron-rl patch export --tree DIR --base TAG megatron-core-0.16
                                                 patch files from the commits TAG..HEAD of a git checkout
        ... --tree DIR                           work on a git checkout or an unpacked source tree instead
        ... --series routing,schedule            of Megatron's patches, take those for this purpose alone
        ... --series schedule/NAME               take the series up to this patch alone (status, apply and check)

    Project and release are found by themselves. Patches to Megatron come in series by purpose: routing, precision,
    schedule, fixes, cpu. Each applies alone and in any order, and is reverted alone; without --series, `apply` takes
    routing, precision and fixes, and cpu where torch or vLLM is the build for CPUs. A series that no package holds the
    files of (UPSTREAM: `Package: none`) is used only when it is named, with --tree.

    To change the patches of a release, give them a git checkout: tag the pristine tree, `git am` the patches in the
    order of `series`, amend or add commits (one for each patch, with the trailers Origin, Forwarded, Drop-When and
    Test), then export.

    All or nothing: if one hunk does not match, no file changes and the message names patch, file and line. The record
    of what was changed stands in the tree (megatron/core/patches.diff); `revert` takes that back, and refuses a file
    that was edited in the same places. The next command ends what a killed one began.

    Exit status: 0 done, 2 error. Of status: 0 all that it was asked about is applied (without --series: what apply
    takes), 1 some of it is not, whether or not it fits.
    """
    try:
        chosen = choose(options)
        purposes = named_purposes(options)
        if options.action == "status":
            reports = [states.report(*on_tree(options, series), purposes) for series in chosen]
            return print_status(reports)
        for series in chosen:
            print(f"{series.name}: {act(options, series, purposes)}")
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        raise InputError(str(error)) from error
    return EXIT_DONE


def named_purposes(options: argparse.Namespace) -> list[str] | None:
    """The series that are named; None: none is."""
    if options.series is None:
        return None
    names = [name.strip() for name in options.series.split(",") if name.strip()]
    if unknown := [name for name in names if name.split("/")[0] not in PURPOSES] or not names:
        named = ", ".join(unknown) if isinstance(unknown, list) else "nothing"
        raise PatchError(f"--series: found {named}; allowed are {', '.join(PURPOSES)}")
    parts = [name for name in names if "/" in name]
    if parts and options.action not in ("status", "apply", "check"):
        whole = ",".join(dict.fromkeys(name.split("/")[0] for name in names))
        raise PatchError(f"--series: found {', '.join(parts)}; {options.action} takes whole series: --series {whole}")
    return names


def choose(options: argparse.Namespace) -> list[Series]:
    """The upstreams that are named; without names, all that the command can do something with."""
    known = releases.names(options.patches)
    if not options.upstream and options.tree is not None:
        return [releases.for_tree(options.patches, Path(options.tree).resolve())]
    if not options.upstream and options.action != "check":
        return [s for s in releases.of_installed_packages(options.patches) if s.purposes or options.series is None]
    wanted = options.upstream or known
    if unknown := [name for name in wanted if name not in known]:
        raise PatchError(f"no such upstream: {', '.join(unknown)}; there are: {', '.join(known)}")
    if options.tree is not None and len(wanted) != 1:
        raise PatchError(f"--tree is one tree: name one upstream of {', '.join(known)}, or none")
    return [Series.read(options.patches / name) for name in wanted]


def on_tree(options: argparse.Namespace, series: Series) -> tuple[Series, releases.Target]:
    """Return ``series`` and the tree to work on."""
    return series, releases.find_target(series, options.tree, options.allow_global)


def act(options: argparse.Namespace, series: Series, purposes: list[str] | None) -> str:
    """Check, apply, revert or export one series; what was done, in words."""
    if options.action == "check":
        repository = _repository("check looks for the tests that patches name")
        tree = options.tree and on_tree(options, series)[1].root
        return upstream.check(series, repository, repository / ".cache" / "patches", options.archive, tree, purposes)
    if options.action in ("apply", "revert"):
        return states.apply_or_revert(*on_tree(options, series), options.action == "revert", purposes)
    if options.tree is None or options.base is None:
        raise PatchError("export reads the commits BASE..HEAD of a git checkout: name both, --tree DIR --base BASE")
    _repository("export writes the folder patches/")
    root = on_tree(options, series)[1].root
    names = upstream.from_checkout(series, root, options.base, purposes and purposes[0])
    return f"wrote {len(names)} patches"


def _repository(why: str) -> Path:
    repository = checkout()
    if repository is None:
        raise PatchError(f"{why} of the repository; this is the installed package: run it in a checkout")
    return repository


def print_status(reports: list[dict[str, Any]]) -> int:
    print("\n".join(states.lines(reports)))
    for entry in reports:
        if any(group["state"] == states.UNKNOWN for group in entry["series"].values()):
            print(entry["message"], file=sys.stderr)
    return EXIT_DONE if all(entry["state"] == states.APPLIED for entry in reports) else EXIT_NOT_APPLIED
