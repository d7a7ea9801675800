"""Which patches of a series are applied."""

import dataclasses

import pytest

from megatron_rl.patching import releases, states
from megatron_rl.patching.series import PatchError, Series
from tests.support.tiny import REPOSITORY

PATCHES = REPOSITORY / "patches"
SERIES = {name: Series.read(PATCHES / name) for name in releases.names(PATCHES) if name.startswith("megatron-core")}


def test_what_fits_of_a_series_is_named_applied_and_reverted(small):
    series, where = small
    pristine = series.load(where.root)
    with pytest.raises(PatchError, match=r"c-0.17.patch: .*\n.*\nThese fit; take those: --series schedule/b$"):
        states.apply_or_revert(series, where, False, ["schedule"])
    with pytest.raises(PatchError, match=r"take those: --series routing,schedule/b$"):
        states.apply_or_revert(series, where, False, ["routing", "schedule"])
    assert series.load(where.root) == pristine
    told = states.report(series, where, ["schedule"])["series"]["schedule"]["message"]
    assert told.endswith("what stands before it fits: --series schedule/b")
    states.apply_or_revert(series, where, False, ["routing", "schedule/b"])
    assert states.report(series, where, ["routing", "schedule/b"])["state"] == "applied"
    assert states.report(series, where, ["schedule"])["state"] == "does not fit"
    assert states.apply_or_revert(series, where, True, ["schedule"]).startswith("reverted, 1 patches, 1 files")
    states.apply_or_revert(series, where, True)
    assert series.load(where.root) == pristine


def test_a_release_that_differs_from_the_branch_before_it_is_no_error(small):
    """Only a series that is proven on an archive can say that a package of that version holds edits."""
    series, where = small[0], releases.Target(small[1].root, "1.0")
    assert not states.examine(series, where).pinned()
    assert not SERIES["megatron-core-0.20"].archives
    proven = dataclasses.replace(series, archives={"small-1.0.whl": ""})
    with pytest.raises(PatchError, match=r"differs from upstream's 1.0\n.*\nReinstall it: pip install .* small==1.0$"):
        states.examine(proven, where)
