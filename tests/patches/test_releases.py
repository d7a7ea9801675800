"""The package or tree that a patch is for, and what is advised where it is wrong or missing."""

import argparse
import re
import sys

import pytest

from megatron_rl.patching import releases
from megatron_rl.patching.command import add_patch, named_purposes
from megatron_rl.patching.series import Patch, PatchError, Series
from tests.support.series import install, megatron_core
from tests.support.tiny import REPOSITORY

PATCHES = REPOSITORY / "patches"

PINNED = releases.to_install(megatron_core())


@pytest.mark.parametrize("version", [None, "0.14.0", "0.99.0"])
def test_a_missing_or_foreign_package_is_told_what_to_install(version, tree, monkeypatch):
    install(monkeypatch, version, tree)
    (series,) = releases.of_installed_packages(PATCHES)
    with pytest.raises(PatchError) as error:
        releases.find_target(series, None, allow_global=True)
    assert re.search(
        rf": install {re.escape(PINNED)}( \(.*\))?( first)?, or name a source tree with --tree$", str(error.value)
    )
    install(monkeypatch, PINNED.split("==")[1], tree)  # the advice is taken
    (series,) = releases.of_installed_packages(PATCHES)
    assert releases.find_target(series, None, allow_global=True).root == tree


def test_a_package_without_its_files_is_told_where_they_are(tmp_path, monkeypatch):
    series, version = megatron_core(), megatron_core().pins["Version"]
    install(monkeypatch, version, tmp_path)
    with pytest.raises(PatchError, match=rf"with --tree, or reinstall it \(pip install .*megatron-core=={version}\)"):
        releases.find_target(series, None, allow_global=True)


SERIES = {name: Series.read(PATCHES / name) for name in releases.names(PATCHES) if name.startswith("megatron-core")}


def test_the_release_to_install_is_that_of_requirements():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    (wanted,) = [line for line in lines if line.startswith("megatron-core")]
    assert {releases.to_install(series) for series in SERIES.values()} == {wanted}
    assert any(releases.is_for(series, wanted.split("==")[1]) for series in SERIES.values())


@pytest.mark.parametrize("name", sorted(SERIES))
@pytest.mark.parametrize("version", [None, "0.99.0"])
def test_a_name_that_will_be_in_the_way_is_to_be_left_out(name, version, tree, monkeypatch):
    install(monkeypatch, version, tree)
    with pytest.raises(PatchError) as error:
        releases.find_target(SERIES[name], None, allow_global=True)
    fits = releases.is_for(SERIES[name], PINNED.split("==")[1])
    assert f"install {PINNED}" in str(error.value)
    assert ("--ignore-requires-python" in str(error.value)) == (sys.version_info < (3, 12))
    assert (f"and leave out the name {name}" in str(error.value)) != fits


def test_a_series_up_to_a_patch_holds_those_before_it(small):
    series = small[0]
    names: list[Patch] = series.of(["schedule/c"])
    assert [patch.path for patch in names] == ["schedule/b", "schedule/c"]
    assert [patch.path for patch in series.of(["schedule/b", "routing"])] == ["routing/a", "schedule/b"]
    with pytest.raises(PatchError, match="small has no schedule/x; it has routing/a, schedule/b, schedule/c"):
        series.of(["schedule/x"])


def test_revert_takes_whole_series_and_says_so():
    parser = argparse.ArgumentParser()
    add_patch(parser)
    options = parser.parse_args(["revert", "--series", "schedule/length-decay-in-the-scheduler,routing"])
    with pytest.raises(PatchError, match=r"revert takes whole series: --series schedule,routing$"):
        named_purposes(options)


def test_a_package_that_has_patches_of_its_own_is_named_them(tree, monkeypatch):
    install(monkeypatch, "0.17.0", tree)
    told = r"megatron-core 0\.17\.0 is installed, megatron-core-0\.16 is for .*name megatron-core-0\.17"
    with pytest.raises(PatchError, match=told):
        releases.find_target(SERIES["megatron-core-0.16"], None, allow_global=True)
