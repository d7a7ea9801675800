"""What `patch` advises about wrong or missing packages and trees ends in success."""

from __future__ import annotations

import argparse
import sys

import pytest

from megatron_rl.patching import releases
from megatron_rl.patching.command import add_patch, named_purposes
from megatron_rl.patching.series import Patch, PatchError, Series
from tests.support.series import install, megatron_core
from tests.support.tiny import REPOSITORY

PATCHES = REPOSITORY / "patches"
SERIES = {name: Series.read(PATCHES / name) for name in releases.names(PATCHES) if name.startswith("megatron-core")}
PINNED = releases.to_install(megatron_core())


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
