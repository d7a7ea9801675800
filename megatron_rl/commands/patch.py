"""Keep the patches to upstream projects applied: status, check, apply, revert, export.

    megatron-rl patch status                 what is applied to the packages of this interpreter's environment
    megatron-rl patch apply                  apply every series there; a tree already patched is left alone
    megatron-rl patch revert                 back to upstream's files, byte for byte
    megatron-rl patch check                  prove that each series fits a pristine upstream, without touching any
    megatron-rl patch export --tree DIR --base TAG megatron-core-0.16
                                             patch files from the commits TAG..HEAD of a git checkout
    ... --tree DIR megatron-core-0.16        work on a git checkout or an unpacked source tree instead

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

from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.patching import export, states, target, upstream
from megatron_rl.patching.errors import PatchError
from megatron_rl.patching.series import Series
from megatron_rl.shipped import checkout, shipped

EXIT_NOT_APPLIED = 1
OLD_NAMES = {"megatron-core": "megatron-core-0.16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="status|check|apply|revert|export")
    texts = {
        "status": "what is applied",
        "check": "prove that each series fits a pristine upstream",
        "apply": "apply every series, or those named",
        "revert": "back to upstream's files",
        "export": "patch files from a git checkout or a patched tree",
    }
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("upstream", nargs="*", help="folders below patches/; default: all for packages")
        action.add_argument("--tree", help="a git checkout or an unpacked source tree, instead of the package")
        action.add_argument("--allow-global", action="store_true", help="a package outside of a virtual environment")
        action.add_argument("--patches", default=shipped("patches"), type=Path, help=argparse.SUPPRESS)
    actions.choices["status"].add_argument("--json", action="store_true", help="print data")
    actions.choices["check"].add_argument("--archive", help="use this archive instead of downloading it")
    actions.choices["export"].add_argument("--base", help="the commit or tag of the checkout that is pristine upstream")


def run(options: argparse.Namespace) -> int:
    try:
        chosen = choose(options)
        if options.action == "status":
            return print_status([states.report(*found(options, series)) for series in chosen], options.json)
        for series in chosen:
            print(f"{series.name}: {act(options, series)}")
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        raise InputError(str(error)) from error
    return EXIT_DONE


def choose(options: argparse.Namespace) -> list[Series]:
    """The series that are named; without names, all that the command can do something with."""
    known = states.names(options.patches)
    if not options.upstream and options.action != "check":
        chosen = states.of_installed_packages(options.patches)
    else:
        wanted = [current_name(name, known) for name in options.upstream] or known
        if unknown := [name for name in wanted if name not in known]:
            raise PatchError(f"no such upstream: {', '.join(unknown)}; there are: {', '.join(known)}")
        chosen = [Series.read(options.patches / name) for name in wanted]
    if options.tree is not None and len(chosen) != 1:
        raise PatchError(f"--tree is one tree: name one upstream of {', '.join(known)}")
    return chosen


def current_name(name: str, known: list[str]) -> str:
    """``name``, or what a series of this old name is called."""
    new = OLD_NAMES.get(name, name)
    if name in known or new not in known:
        return name
    print(f"note: {name} is the old name of the series {new}", file=sys.stderr)
    return new


def found(options: argparse.Namespace, series: Series) -> tuple[Series, target.Target]:
    """``series`` and the tree that it is for."""
    return series, target.find(series, options.tree, options.allow_global)


def act(options: argparse.Namespace, series: Series) -> str:
    """Check, apply, revert or export one series; what was done, in words."""
    if options.action == "check":
        repository = _repository("check looks for the tests that patches name")
        tree = options.tree and found(options, series)[1].root
        return upstream.check(series, repository, repository / ".cache" / "patches", options.archive, tree)
    if options.action in ("apply", "revert"):
        return states.apply_or_revert(*found(options, series), revert=options.action == "revert")
    if options.tree is None:
        raise PatchError("export reads a checkout or a tree: name it with --tree")
    _repository("export writes the folder patches/")
    root = found(options, series)[1].root
    if options.base:
        names = export.from_checkout(series, root, options.base)
    else:
        names = export.refresh(series, series.load(root))
    return f"wrote {len(names)} patches"


def _repository(why: str) -> Path:
    repository = checkout()
    if repository is None:
        raise PatchError(f"{why} of the repository; this is the installed package: run it in a checkout")
    return repository


def print_status(reports: list[dict[str, object]], as_json: bool) -> int:
    if as_json:
        print(json.dumps(reports, indent=2))
    else:
        print("\n".join(states.lines(reports)))
        for message in filter(None, (entry["message"] for entry in reports)):
            print(message, file=sys.stderr)
    return EXIT_DONE if all(entry["state"] == states.APPLIED for entry in reports) else EXIT_NOT_APPLIED
