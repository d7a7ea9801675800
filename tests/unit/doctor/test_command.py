"""The command line of `megatron-rl doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_rl.__main__ import main
from megatron_rl.doctor import command as doctor
from megatron_rl.doctor import frame
from megatron_rl.doctor.checks import CHECKS, failed, passed
from megatron_rl.process import devices
from tests.support.patience import PATIENCE_S
from tests.support.reach import REPOSITORY


@pytest.fixture
def outcomes(monkeypatch):
    """What checks find, in place of their processes; the settings that they were given."""
    by_name, settings = {}, []

    def instead(check, setting, folder, limit):
        settings.append(setting)
        return by_name.get(check.name, passed("well")), ""

    monkeypatch.setattr(frame, "_in_processes", instead)
    return by_name, settings


def test_the_list_names_every_check(capsys):
    assert main(["doctor", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [check.name for check in CHECKS]


def test_the_exit_status_says_whether_one_failed(outcomes, capsys, tmp_path):
    arguments = ["doctor", "--only", "packages,patches", "--only", "open-files", "--shared", str(tmp_path)]
    assert main([*arguments, "--json", str(tmp_path / "a" / "r.json"), "--page", str(tmp_path / "r.html")]) == 0
    assert "3 pass, 0 fail, 0 not run" in capsys.readouterr().out
    report = json.loads((tmp_path / "a" / "r.json").read_text())
    assert [check["name"] for check in report["nodes"][0]["checks"]] == ["packages", "patches", "open-files"]
    assert "nothing failed" in (tmp_path / "r.html").read_text()
    outcomes[0]["patches"] = failed("no", "do")
    assert main(arguments) == 1
    assert "fix: do" in capsys.readouterr().out


def test_a_doctor_that_is_ended_leaves_what_it_found_and_what_ran(outcomes, monkeypatch, capsys, tmp_path):
    """The file is written before each check, and a merge names the one that ran."""
    file, read = tmp_path / "r.json", []
    own = frame._in_processes
    monkeypatch.setattr(frame, "_in_processes", lambda *a: read.append(json.loads(file.read_text())) or own(*a))
    assert main(["doctor", "--only", "packages,patches", "--shared", str(tmp_path), "--json", str(file)]) == 0
    checks = [[(c["name"], c["status"]) for c in report["nodes"][0]["checks"]] for report in read]
    assert checks == [[("packages", "fail")], [("packages", "pass"), ("patches", "fail")]]
    (tmp_path / "a.json").write_text(json.dumps(read[1]))
    assert main(["doctor", "--merge", str(tmp_path / "a.json"), "--expect", "another"]) == 1
    assert "patches: it was running when the doctor was ended" in capsys.readouterr().out


def test_json_alone_is_all_of_standard_output(outcomes, capsys):
    assert main(["doctor", "--only", "packages", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["format"] == 1
    assert "packages" in said.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "pakages"], "no check 'pakages'; there are: packages"),
        (["recipes/tiny/none.yaml"], "none.yaml"),
        (["--job"], "start it under torchrun"),
        (["--merge", "none.json"], "none.json: not a report"),
    ],
)
def test_bad_arguments_end_before_a_check(outcomes, capsys, monkeypatch, arguments, told):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert outcomes[1] == []


def test_ranks_and_folder_follow_from_node_and_recipe(outcomes, monkeypatch, tmp_path):
    recipe = ["recipes/tiny/grpo.yaml", "--set", f"run_root={tmp_path}"]
    assert main(["doctor", "--only", "packages", *recipe]) == 0
    assert main(["doctor", "--only", "packages", *recipe, "--shared", str(tmp_path / "x"), "--ranks", "4"]) == 0
    monkeypatch.setattr(devices, "default_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert main(["doctor", "--only", "packages", *recipe]) == 0
    first, second, third = outcomes[1]
    assert (first.device, first.ranks, first.shared, first.recipe) == ("cpu", 2, str(tmp_path), recipe[0])
    assert (second.ranks, second.shared) == (4, str(tmp_path / "x"))
    assert (third.device, third.ranks) == ("cuda", 8)


def test_merged_reports(outcomes, capsys, tmp_path):
    assert main(["doctor", "--only", "packages", "--json", str(tmp_path / "a.json")]) == 0
    merge = ["doctor", "--merge", str(tmp_path / "a.json"), "--page", str(tmp_path / "p.html")]
    assert main(merge) == 0
    assert main([*merge, "--expect", "another"]) == 1
    assert "another: report: no report" in capsys.readouterr().out


def test_a_job_looks_at_what_is_between_nodes(outcomes):
    assert all(check.ranks == "job" for check in doctor.choose(None, job=True))


WITHOUT = """
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "yaml", "pydantic", "packaging", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize("recipe", [[], ["recipes/tiny/grpo.yaml"]])
def test_the_doctor_lives_without_what_it_looks_for(tmp_path, recipe):
    """An environment with nothing in it: the doctor ends with a red line. Its processes inherit what is missing."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    command = [sys.executable, "-m", "megatron_rl", "doctor", *recipe, "--only", "packages,open-files"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    done = subprocess.run(
        [*command, "--shared", str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S, env=environment
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "fail  packages" in done.stdout
    assert "is not installed" in done.stdout
    assert f"fix: pip install -r {REPOSITORY / 'requirements.txt'}" in done.stdout
