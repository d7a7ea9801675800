"""Each series of each release applies alone, in any order and with any other, and comes off again.

MEGATRON_LM names a checkout that is tested beside the releases' wheels: a wheel has no command line.
"""

import itertools
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.patching import releases, states
from megatron_rl.patching.releases import Target, find_target
from megatron_rl.patching.series import PURPOSES, Series
from tests.support.patience import PATIENCE_S
from tests.support.series import EVERY, PATCHES, QUICK, RELEASES, megatron_core, unpacked
from tests.support.slow import slow_but


def patch(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_rl", "patch", *map(str, arguments)]
    return subprocess.run(command, cwd=PATCHES.parent, capture_output=True, text=True, timeout=PATIENCE_S)


def content_of(root: Path) -> dict[Path, bytes]:
    """Every file below ``root``."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


@pytest.fixture(params=slow_but(QUICK, EVERY))
def tree(request, tmp_path) -> tuple[Series, Target]:
    """A release's series and its unpacked wheel, or a copy of the checkout."""
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


def test_a_tree_of_which_some_files_are_upstreams_again_is_completed_or_reverted(tree):
    """As `git checkout -- FILE` leaves it."""
    series, where = tree
    old = series.load(where.root)
    states.apply_or_revert(series, where, False, list(series.purposes))
    new = series.load(where.root)
    changed = sorted(path for path in new if old.get(path) != new[path])
    some = ("--tree", where.root, "--series", ",".join(series.purposes))
    for command, wanted in (("apply", new), ("revert", old)):
        replaced = [path for path in random.Random(command).sample(changed, len(changed) // 2) if old.get(path)]
        for path in replaced:
            (where.root / path).write_bytes(old[path])
        status = patch("status", *some)
        assert (status.returncode, status.stderr) == (1, "")
        assert status.stdout.splitlines()[0].endswith(": partly applied")
        done = patch(command, *some)
        assert done.returncode == 0, done.stderr
        now = series.load(where.root)
        assert {path: now.get(path) for path in wanted} == wanted


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
    for path, content in states.examine(series, Target(root, None)).pristine.items():
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
    assert "These fit; take those: --series precision,fixes,cpu" in done.stderr
    done = patch("apply", "--tree", tmp_path, "--series", "schedule,precision", series.name)
    assert done.returncode == 0, done.stderr
    assert patch("status", "--tree", tmp_path, "--series", "schedule", series.name).returncode == 0


def test_unknown_series_are_refused():
    done = patch("status", "--series", "routing,speed")
    assert done.returncode == 2
    assert done.stderr == ("error: --series: found speed; allowed are routing, precision, schedule, fixes, cpu\n")


def test_every_patch_of_megatron_is_in_a_release():
    listed = {path for name in releases.names(PATCHES) for path in Series.read(PATCHES / name).files.values()}
    assert {path for path in listed if path.parent.parent.name == "megatron"} == set(PATCHES.glob("megatron/*/*.patch"))
    assert {path.parent.name for path in listed if path.parent.parent.name == "megatron"} == {*PURPOSES} - {"cpu"}


def test_each_release_has_every_series():
    assert {series.name: series.purposes for series in RELEASES.values()} == dict.fromkeys(RELEASES, PURPOSES)


def test_the_text_of_a_header_is_no_part_of_a_patch(tmp_path):
    """A tree that was patched with other words in the headers is still recognised."""
    shutil.copytree(PATCHES, tmp_path / "patches")
    for path in (tmp_path / "patches").glob("megatron/*/*.patch"):
        path.write_text(path.read_text().replace("Subject: [PATCH] ", "Subject: [PATCH] Please: ", 1))
    before = megatron_core()
    after = Series.read(tmp_path / "patches" / before.name)
    where = find_target(before, None, allow_global=True)
    assert [patch.diff for patch in after.patches] == [patch.diff for patch in before.patches]
    subjects = [{patch.subject for patch in series.patches if patch.paths} for series in (before, after)]
    assert subjects[0].isdisjoint(subjects[1])
    assert states.report(after, where)["state"] == states.report(before, where)["state"] == states.APPLIED
