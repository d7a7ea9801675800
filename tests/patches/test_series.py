"""Each series of each release applies alone, in any order and with any other, and comes off again.

MEGATRON_LM names a checkout that is tested beside the releases' wheels: a wheel has no command line.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.patching import releases, states, upstream
from megatron_rl.patching.releases import Target, find_target
from megatron_rl.patching.series import PURPOSES, Files, Patch, PatchError, Series, apply
from tests.support import kill
from tests.support.patience import PATIENCE_S
from tests.support.series import megatron_core
from tests.support.slow import slow_but

PATCHES = Path(__file__).parents[2] / "patches"
RELEASES = {
    name: series
    for name in releases.names(PATCHES)
    if (series := Series.read(PATCHES / name)).purposes and series.archives
}


def patch(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_rl", "patch", *map(str, arguments)]
    return subprocess.run(command, cwd=PATCHES.parent, capture_output=True, text=True, timeout=PATIENCE_S)


CHECKOUT = os.environ.get("MEGATRON_LM")
EVERY = [*RELEASES, *([CHECKOUT] if CHECKOUT else [])]


def unpacked(name: str, folder: Path) -> tuple[Series, Target]:
    """The series of a release, and its wheel unpacked in ``folder``; or a copy of the checkout."""
    if name == CHECKOUT:
        shutil.copytree(Path(CHECKOUT, "megatron"), folder / "megatron")
        return releases.for_tree(PATCHES, folder), Target(folder, None)
    series = RELEASES[name]
    archive = upstream.fetch(series, PATCHES.parent / ".cache" / "patches", None)
    return series, Target(upstream.unpack(archive, folder, series.pins["Root"]), None)


QUICK = (min(RELEASES), megatron_core().name, max(RELEASES))


def content_of(root: Path) -> dict[Path, bytes]:
    """Every file below ``root`` but what a killed command leaves beside it."""
    files = (path for path in root.rglob("*") if states.TEMPORARY_PREFIX not in str(path) and path.is_file())
    return {path: path.read_bytes() for path in files}


@pytest.fixture(params=slow_but(QUICK, EVERY))
def tree(request, tmp_path) -> tuple[Series, Target]:
    """A release's series and its unpacked wheel, or a copy of the checkout."""
    return unpacked(request.param, tmp_path)


@pytest.fixture(params=slow_but([megatron_core().name], EVERY))
def one_tree(request, tmp_path) -> tuple[Series, Target]:
    """As `tree`, for tests of which `make test` runs one release."""
    return unpacked(request.param, tmp_path)


def test_series_go_on_in_any_order_and_come_off_alone(tmp_path):
    series, where = unpacked("megatron-core-0.16", tmp_path)
    pristine = series.load(where.root)
    on = []
    for purpose in reversed(series.purposes):
        assert states.apply_or_revert(series, where, False, [purpose]).startswith("applied, ")
        on.append(purpose)
        names = {p.name for p in series.of(on) if series.reachable(p, pristine)}
        assert series.load(where.root) == series.patched(pristine, names)
    states.apply_or_revert(series, where, True, ["fixes"])
    groups = states.report(series, where)["series"]
    assert {name for name, group in groups.items() if group["state"] != states.APPLIED} == {"fixes"}
    states.apply_or_revert(series, where, True)
    assert series.load(where.root) == pristine


def test_a_series_of_which_a_release_has_nothing_is_named(tmp_path):
    series, where = unpacked("megatron-core-0.15", tmp_path)
    done = states.apply_or_revert(series, where, False, ["schedule", "routing"])
    assert done.startswith("applied, 1 patches")
    assert done.endswith("; nothing of routing: routing because RouterReplay came with 0.16.0")
    assert "nothing of" not in states.apply_or_revert(series, where, False, ["precision"])


def test_every_two_series_fit_together(tree):
    series, where = tree
    pristine = series.load(where.root)
    for purposes in itertools.combinations(series.purposes, 2):
        chosen = [p for p in series.of(purposes) if series.reachable(p, pristine)]
        after = series.patched(pristine, {p.name for p in chosen})
        for path, content in after.items():
            assert content is None or content == pristine[path] or compile(content, path, "exec")


def test_a_reverted_tree_is_as_it_was_byte_for_byte(tree):
    series, where = tree
    before = content_of(where.root)
    for purposes in (None, ["precision"], ["schedule/length-decay-in-the-scheduler"], series.purposes):
        states.apply_or_revert(series, where, False, purposes)
        assert content_of(where.root) != before
        states.apply_or_revert(series, where, True)
        assert content_of(where.root) == before


def every_patch(series: Series, old: Files) -> Files:
    """``old`` with all patches that a tree of these files can have."""
    return series.patched(old, {patch.name for patch in series.patches if series.reachable(patch, old)})


def test_a_tree_has_all_patches_or_none_whenever_the_process_is_killed(one_tree, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # of use where the machine dies, not the process
    series, where = one_tree
    old = series.load(where.root)
    new = every_patch(series, old)
    pristine = content_of(where.root)
    moments = kill.moments(where.root, old, new)
    patched, done = content_of(where.root), []
    for number, moment in enumerate(random.Random(series.name).sample(range(1, moments - 20), 20)):
        here, there = (old, new) if number % 2 else (new, old)  # apply and revert in turn
        states.replace_files(where.root, series.load(where.root), here)
        assert kill.is_killed(where.root, here, there, moment)
        now = content_of(where.root)
        assert now in (pristine, patched), moment
        done.append(now == (patched if there is new else pristine))
    assert set(done) == {True, False}
    states.apply_or_revert(series, where, True)
    assert content_of(where.root) == pristine
    assert not list(where.root.rglob(f"{states.TEMPORARY_PREFIX}*"))


def test_a_tree_of_which_some_files_are_patched_is_completed_or_reverted(one_tree):
    """As a killed command leaves it where the file system cannot exchange folders."""
    series, where = one_tree
    old = series.load(where.root)
    new = every_patch(series, old)
    changed = [path for path in old if old[path] != new[path]]
    half = random.Random(series.name).sample(changed, len(changed) // 2)
    some = ("--tree", where.root, "--series", ",".join(series.purposes))
    states.replace_files(where.root, old, old | {path: new[path] for path in half})
    status = patch("status", *some)
    assert (status.returncode, status.stderr) == (1, "")
    assert status.stdout.splitlines()[0].endswith(": partly applied")
    for command, wanted in (("apply", new), ("revert", old)):
        states.replace_files(where.root, series.load(where.root), old | {path: new[path] for path in half})
        done = patch(command, *some)
        assert done.returncode == 0, done.stderr
        assert series.load(where.root) == wanted


def first_hunks(series: Series, old: Files) -> Iterator[tuple[str, bytes]]:
    """Path and text of a file with the first hunk of a patch that has more for it; one file for each patch."""
    for patch in series.patches:
        for part in re.split(rb"(?m)^(?=diff --git )", patch.diff):
            head, *hunks = re.split(rb"(?m)^(?=@@ )", part)
            path = next((path for path in patch.paths if head.startswith(f"diff --git a/{path} ".encode())), None)
            if len(hunks) > 1 and old[path] is not None:
                with contextlib.suppress(PatchError):  # where it needs the patch before it
                    yield path, apply(b"\n" + head + hunks[0], old, [path], patch.name)[path]
                    break


@pytest.mark.slow
def test_advice_for_a_file_that_is_half_patched_by_hand_does_not_loop(tree):
    """Done as the message says, it ends in success."""
    series, where = tree
    old = series.load(where.root)
    path, text = random.Random(series.name).choice(list(first_hunks(series, old)))
    (where.root / path).write_bytes(text)
    told = ""
    try:
        states.apply_or_revert(series, where, False, series.purposes)
    except PatchError as error:
        told = str(error)
    if fitting := re.search(r"take those: --series (\S+)$", told):
        assert states.apply_or_revert(series, where, False, fitting[1].split(",")).startswith("applied, ")
    elif told:
        assert told.startswith(f"{path}: in a state that ")
        assert f"Bring the file back from {series.pins['Source']}, and try again." in told
        (where.root / path).write_bytes(old[path])
        assert states.apply_or_revert(series, where, False, series.purposes).startswith("applied, ")
    else:
        assert states.report(series, where, series.purposes)["state"] == states.APPLIED


def test_a_tree_is_found_by_its_release(tree):
    series, where = tree
    version = releases.version_of(where.root)
    assert releases.for_tree(PATCHES, where.root).name == series.name
    done = patch("status", "--tree", where.root)
    assert done.returncode == 1
    told = f"{series.name} {version} in {where.root} (unpacked tree, version {version})"
    assert done.stdout.splitlines()[0] == f"{told}: not applied"
    assert done.stdout.count(": not applied, but fits\n") == len(series.purposes)
    assert done.stderr == ""


def test_the_matrix_says_what_fits_and_why_not(tmp_path):
    where = unpacked("megatron-core-0.15", tmp_path)[1]
    norm = where.root / "megatron/core/transformer/torch_norm.py"
    norm.write_text(norm.read_text().replace("sequence_parallel", "other"))
    head, _ruler, row, _, *notes = patch("matrix", where.root).stdout.splitlines()
    assert head == "| release | " + " | ".join(PURPOSES) + " |"
    assert row == "| 0.15.3 (tree) | – | 2 of 3 | 1 | 5 | 6 |"
    assert any("torch-norm-under-sequence-parallel.patch: patch failed" in note for note in notes)
    assert "- 0.15.3 (tree): lacking: routing because RouterReplay came with 0.16.0" in notes
    assert "- 0.15.3 (tree): length-decay-on-the-command-line-0.15.patch is for a whole checkout" in notes


def test_advice_names_the_patches_for_the_tree(tree):
    series, where = tree
    other = next(name for name in RELEASES if name != series.name)
    done = patch("apply", "--tree", where.root, other)
    assert done.returncode == 2
    assert f"version {releases.version_of(where.root)}" in done.stderr
    assert f"The patches for this tree are {series.name}: leave out the name" in done.stderr


def test_a_newer_release_is_told_what_fits(tmp_path):
    """What does not fit is named, and hinders no series that does."""
    series = megatron_core()
    root = find_target(series, None, allow_global=True).root
    for path, content in series.pristine(series.load(root)).items():
        if content is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            text = content.replace(b"get_replay_topk", b"get_topk") if path.endswith("router_replay.py") else content
            (tmp_path / path).write_bytes(text)
    (tmp_path / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 1\nPRE_RELEASE = 'rc2'\n")
    newest = releases.for_tree(PATCHES, tmp_path)
    assert newest.name == max(releases.names(PATCHES), key=lambda name: ("megatron-core-" in name, name))
    done = patch("status", "--tree", tmp_path, series.name)
    assert f"{series.name} 0.99.1rc2 in {tmp_path} " in done.stdout
    assert "  routing: does not fit\n      router-replay-under-recomputation" in done.stdout
    assert "  schedule: not applied, but fits\n" in done.stdout
    done = patch("apply", "--tree", tmp_path, series.name)
    assert done.returncode == 2
    assert "router_replay.py: patch does not apply" in done.stderr
    assert "These fit; take those: --series precision,fixes,cpu\n" in done.stderr
    done = patch("apply", "--tree", tmp_path, "--series", "schedule,precision", series.name)
    assert done.returncode == 0, done.stderr
    assert patch("status", "--tree", tmp_path, "--series", "schedule", series.name).returncode == 0


@pytest.mark.parametrize(
    ("version", "advice"), [("0.17.0", "name megatron-core-0.17"), ("0.99.0", "install megatron-core==")]
)
def test_advice_for_an_installed_package_does_not_loop(version, advice, monkeypatch):
    from megatron_rl.patching import releases

    root = find_target(megatron_core(), None, allow_global=True).root

    class Distribution:
        files = ()

        def locate_file(self, name):
            return root

    Distribution.version = version
    monkeypatch.setattr(releases.importlib.metadata, "distribution", lambda name: Distribution())
    with pytest.raises(PatchError, match=f"megatron-core {version} is installed, megatron-core-0.16 is for .*{advice}"):
        releases.find_target(Series.read(PATCHES / "megatron-core-0.16"), None, allow_global=True)


def test_unknown_series_are_refused():
    done = patch("status", "--series", "routing,speed")
    assert done.returncode == 2
    assert done.stderr == ("error: --series: found speed; allowed are routing, precision, schedule, fixes, cpu\n")


def test_every_patch_of_megatron_is_in_a_release():
    listed = {path for name in releases.names(PATCHES) for path in Series.read(PATCHES / name).files.values()}
    assert {path for path in listed if path.parent.parent.name == "megatron"} == set(PATCHES.glob("megatron/*/*.patch"))
    assert {path.parent.name for path in listed if path.parent.parent.name == "megatron"} == set(PURPOSES)


def test_each_series_of_a_release_has_a_patch_or_a_reason():
    for series in RELEASES.values():
        noted = [note for notes in series.notes.values() for note in notes]
        for purpose in PURPOSES:
            assert purpose in series.purposes or any(note.startswith(purpose) for note in noted), (series.name, purpose)


def test_headers_are_ready_for_a_pull_request():
    """Title, problem and minimal test in words that upstream understands; a backport says which release has it."""
    since = {}
    for name in releases.names(PATCHES):
        notes = Series.read(PATCHES / name).notes["Superseded"]
        since |= dict(note.split(" since ") for note in notes if " since " in note)
    for path in PATCHES.glob("megatron/*/*.patch"):
        patch = Patch.read(path)
        message = path.read_text().partition("\n---\n")[0].partition("\nSubject: ")[2]
        assert not re.search(r"megatron_rl|\b[Ww]e\b|\b[Oo]ur\b", message), path
        backport = patch.trailers["Origin"].startswith("backport")
        assert (patch.trailers["Forwarded"] == "not-needed") == backport == (patch.path in since), path
        if backport:
            release = since[patch.path]
            assert patch.trailers["Drop-When"] == f"the pinned megatron-core is {release} or later"
            assert patch.trailers["Origin"].endswith(f"megatron-core {release}")
        else:
            assert re.match(r"tests/unit_tests/\S+\.py: \w", patch.trailers["Upstream-Test"]), path


def test_the_text_of_a_header_is_no_part_of_a_patch(tmp_path):
    """A tree that was patched with other words in the headers is still recognised."""
    shutil.copytree(PATCHES, tmp_path / "patches")
    for path in (tmp_path / "patches").glob("megatron/*/*.patch"):
        path.write_text(path.read_text().replace("Subject: [PATCH] ", "Subject: [PATCH] Please: ", 1))
    before = megatron_core()
    after = Series.read(tmp_path / "patches" / before.name)
    files = after.load(find_target(before, None, allow_global=True).root)
    assert [patch.diff for patch in after.patches] == [patch.diff for patch in before.patches]
    assert {patch.subject for patch in after.patches}.isdisjoint(patch.subject for patch in before.patches)
    assert after.known_state(files) == before.known_state(files) == "Tree-After"
