"""Which patches of a series are applied."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_rl.patching import releases, states, target
from megatron_rl.patching.series import PatchError, Series
from tests.support.tiny import REPOSITORY

PATCHES = REPOSITORY / "patches"
SERIES = {name: Series.read(PATCHES / name) for name in releases.names(PATCHES) if name.startswith("megatron-core")}
# What fits is named, and comes off again
CHANGE = """From 0
Subject: [PATCH] Change {name}

Because.

Origin: ours
Forwarded: not-needed
Drop-When: never
Test: tests/patches/test_advice.py
---
diff --git a/top/{name}.py b/top/{name}.py
--- a/top/{name}.py
+++ b/top/{name}.py
@@ -1 +1 @@
-{name} = 0
+{name} = 1
"""


@pytest.fixture
def small(tmp_path) -> tuple[Series, target.Target]:
    """Series of small patches, and a tree to which the second patch of `schedule` does not fit."""
    names = {"routing/a": "", "schedule/b": "", "schedule/c": "-0.17", "schedule/d": ""}
    folder = tmp_path / "patches" / "small"
    folder.mkdir(parents=True)
    pins = {"Project": "small", "Version": "1.0", "Source": "nowhere", "Package": "small==1.0", "Root": "top"}
    pins |= {"Tree-Before": "-", "Tree-After": "-"}
    (folder / "UPSTREAM").write_text("".join(f"{key}: {value}\n" for key, value in pins.items()))
    (folder / "series").write_text("".join(f"{name}{ending}.patch\n" for name, ending in names.items()))
    root = tmp_path / "tree" / "top"
    root.mkdir(parents=True)
    for name, ending in names.items():
        path = tmp_path / "patches" / "megatron" / f"{name}{ending}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CHANGE.format(name=path.name[0]))
        (root / f"{path.name[0]}.py").write_text(f"{path.name[0]} = {2 if name == 'schedule/c' else 0}\n")
    return Series.read(folder), target.Target(root.parent, None)


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
    series, where = small[0], target.Target(small[1].root, "1.0")
    assert not states.examine(series, where).pinned()
    assert not SERIES["megatron-core-0.20"].archives
    proven = dataclasses.replace(series, archives={"small-1.0.whl": ""})
    with pytest.raises(PatchError, match=r"differs from upstream's 1.0\n.*\nReinstall it: pip install .* small==1.0$"):
        states.examine(proven, where)
