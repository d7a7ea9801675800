"""The package or tree that a patch is for: found, missing, foreign, or without its files."""

from __future__ import annotations

import json
import re

import pytest

from megatron_rl.patching import releases
from megatron_rl.patching.series import PatchError
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
    origin = {"url": "file:///home/me/Megatron%20LM", "dir_info": {"editable": True}}
    install(monkeypatch, version, tmp_path, json.dumps(origin))
    with pytest.raises(PatchError, match=r"editable install, so name its source tree: --tree '/home/me/Megatron LM'$"):
        releases.find_target(series, None, allow_global=True)
    install(monkeypatch, version, tmp_path)
    with pytest.raises(PatchError, match=rf"reinstall it \(pip install .*megatron-core=={version}\), or name a source"):
        releases.find_target(series, None, allow_global=True)
