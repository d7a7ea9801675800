"""What `patch` advises about wrong or missing packages and trees ends in success."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from megatron_rl.commands.patch import add_patch, named_purposes
from megatron_rl.patching import releases, target
from megatron_rl.patching.series import Patch, PatchError, Series
from tests.support.series import megatron_core
from tests.support.tiny import REPOSITORY

PATCHES = REPOSITORY / "patches"
SERIES = {name: Series.read(PATCHES / name) for name in releases.names(PATCHES) if name.startswith("megatron-core")}
PINS = [Requirement(line) for line in (REPOSITORY / "requirements.txt").read_text().splitlines() if "core==" in line]
PINNED = releases.to_install(megatron_core())


def install(monkeypatch, version: str | None, root: Path, origin: str | None = None) -> None:
    """Pretend that this version of megatron-core is installed below ``root``; None: none is."""

    def distribution(name: str) -> SimpleNamespace:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(
            version=version,
            metadata={"Name": name},
            files=[],
            locate_file=lambda path: root,
            read_text=lambda file: origin,
        )

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: distribution(name).version)


@pytest.fixture
def tree(tmp_path) -> Path:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_release_to_install_is_that_of_requirements(python):
    (wanted,) = [f"{pin.name}{pin.specifier}" for pin in PINS if pin.marker.evaluate({"python_version": python})]
    version = tuple(map(int, python.split(".")))
    assert {releases.to_install(series, version) for series in SERIES.values()} == {wanted}
    assert any(releases.is_for(series, wanted.split("==")[1]) for series in SERIES.values())


@pytest.mark.parametrize("name", sorted(SERIES))
@pytest.mark.parametrize("version", [None, "0.99.0"])
def test_a_name_that_will_be_in_the_way_is_to_be_left_out(name, version, tree, monkeypatch):
    install(monkeypatch, version, tree)
    with pytest.raises(PatchError) as error:
        target.find(SERIES[name], None, allow_global=True)
    fits = releases.is_for(SERIES[name], PINNED.split("==")[1])
    assert f"install {PINNED}" in str(error.value)
    assert (f"and leave out the name {name}" in str(error.value)) != fits


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
