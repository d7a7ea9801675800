"""License, version and citation say the same wherever they stand."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files

import pytest
import yaml

from megatron_rl import __version__
from megatron_rl.__main__ import main
from tests.support.tiny import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def test_the_license_is_apache_2_whole():
    text = (REPOSITORY / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n                           Version 2.0, January 2004")
    assert [int(n) for n in re.findall(r"^   (\d)\. [A-Z]", text, re.M)] == list(range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_the_notice_names_every_series_of_patches():
    notice = (REPOSITORY / "NOTICE").read_text()
    for series in (REPOSITORY / "patches").iterdir():
        assert f"patches/{series.name}" in notice


def test_one_version(capsys):
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f"## {__version__}\n" in (REPOSITORY / "CHANGELOG.md").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"megatron-rl {__version__}\n"


def test_the_package_says_that_it_has_types():
    assert files("megatron_rl").joinpath("py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["megatron_rl"]
