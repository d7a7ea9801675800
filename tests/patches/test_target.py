"""The package or tree that a patch is for: found, missing, foreign, or without its files."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.patching import releases, target
from megatron_rl.patching.series import PatchError
from tests.support.series import megatron_core
from tests.support.tiny import REPOSITORY

PATCHES = REPOSITORY / "patches"
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


@pytest.mark.parametrize("version", [None, "0.14.0", "0.99.0"])
def test_a_missing_or_foreign_package_is_told_what_to_install(version, tree, monkeypatch):
    install(monkeypatch, version, tree)
    (series,) = releases.of_installed_packages(PATCHES)
    with pytest.raises(PatchError) as error:
        target.find(series, None, allow_global=True)
    assert re.search(rf": install {re.escape(PINNED)}( first)?, or name a source tree with --tree$", str(error.value))
    install(monkeypatch, PINNED.split("==")[1], tree)  # the advice is taken
    (series,) = releases.of_installed_packages(PATCHES)
    assert target.find(series, None, allow_global=True).root == tree


def test_a_package_without_its_files_is_told_where_they_are(tmp_path, monkeypatch):
    series, version = megatron_core(), megatron_core().pins["Version"]
    origin = {"url": "file:///home/me/Megatron%20LM", "dir_info": {"editable": True}}
    install(monkeypatch, version, tmp_path, json.dumps(origin))
    with pytest.raises(PatchError, match=r"editable install, so name its source tree: --tree '/home/me/Megatron LM'$"):
        target.find(series, None, allow_global=True)
    install(monkeypatch, version, tmp_path)
    with pytest.raises(PatchError, match=rf"reinstall it \(pip install .*megatron-core=={version}\), or name a source"):
        target.find(series, None, allow_global=True)
