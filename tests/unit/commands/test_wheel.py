"""A wheel, installed into an empty folder and used from another one: it brings what its commands need."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.series import megatron_core
from tests.support.slow import slow_but

REPOSITORY = Path(__file__).resolve().parents[3]
SHIPPED = ("patches", "recipes")
SHIPPED_FILES = ("requirements.txt", "requirements-cpu.txt")
STUBS = "tools/stubs"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder with the installed wheel and nothing else: its requirements are in this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools writes beside what it builds
    hidden = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
    for name in ("megatron_rl", *SHIPPED):
        shutil.copytree(REPOSITORY / name, source / name, ignore=hidden)
    shutil.copytree(REPOSITORY / STUBS, source / STUBS, ignore=hidden)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", *SHIPPED_FILES):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, cwd=folder, timeout=PATIENCE_S)
    (wheel,) = folder.glob("megatron_rl-*.whl")
    install = [*pip, "install", *offline, "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, cwd=folder, timeout=PATIENCE_S)
    shutil.rmtree(source)
    return folder / "site"


@pytest.fixture
def call(installed, tmp_path):
    """`megatron-rl …` of the installed wheel in an empty folder."""

    def call(*arguments: str, **options) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        command = [sys.executable, str(installed / "bin" / "megatron-rl"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )

    return call


def test_the_wheel_holds_every_file_that_ships(installed):
    tracked = subprocess.run(
        ["git", "ls-files", *SHIPPED, *SHIPPED_FILES, f"{STUBS}/*.whl"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    files = tracked.stdout.splitlines()
    assert "recipes/base/default.yaml" in files
    assert "patches/megatron-core-0.19/series" in files
    assert any(name.endswith(".whl") for name in files)
    for name in files:
        assert (installed / "megatron_rl" / "shipped" / name).read_bytes() == (REPOSITORY / name).read_bytes()


@pytest.mark.parametrize("options", slow_but([["--no-transformers"]], [["--no-transformers"], []]), ids=str)
def test_a_shipped_recipe_is_checked_from_elsewhere(call, options):
    done = call("check", "recipes/tiny/demo.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert "qwen3_moe" in done.stdout
    assert ("under transformers and the learner differ by at most" in done.stdout) == (not options)


def test_a_shipped_recipe_that_is_misspelled_is_named(call, installed):
    done = call("plan", "recipes/tiny/dmo.yaml", "--gpu", "h100-80")
    assert done.returncode == 2
    assert f"did you mean {installed / 'megatron_rl' / 'shipped' / 'recipes' / 'tiny' / 'demo.yaml'}?" in done.stderr


@pytest.mark.slow
def test_own_recipes_extend_shipped_ones_and_come_first(call, tmp_path):
    """With a reward from a module of the working directory, where `python -m` finds it."""
    (tmp_path / "my_rewards.py").write_text("def score(response, answer):\n    return 1.0\n")
    own = tmp_path / "studies" / "own.yaml"
    own.parent.mkdir()
    own.write_text("extends: recipes/tiny/grpo.yaml\nname: own\nreward: {name: my_rewards:score}\n")
    done = call("check", "studies/own.yaml", "--no-transformers")
    assert done.returncode == 0, done.stderr
    (own.parent / "recipes" / "tiny").mkdir(parents=True)
    (own.parent / "recipes" / "tiny" / "grpo.yaml").write_text("nonsense: 1\n")
    done = call("check", "studies/own.yaml", "--no-transformers")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_schema_and_patches(call):
    assert "properties" in json.loads(call("schema").stdout)
    status = call("patch", "status", "--allow-global")
    head = status.stdout.splitlines()[0]
    assert head.startswith(f"{megatron_core().name} ")
    assert status.returncode == (0 if head.endswith(": applied") else 1)
    done = call("patch", "check")
    assert done.returncode == 2
    assert "run it in a checkout" in done.stderr


def test_doctor_knows_the_pins(call, tmp_path):
    done = call("doctor", "recipes/tiny/demo.yaml", "--only", "packages", "--json")
    (check,) = json.loads(done.stdout)["nodes"][0]["checks"]
    assert (check["status"], done.returncode) == ("pass", 0), check


def test_the_wheel_has_neither_tests_nor_tools(installed):
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"bin", "megatron_rl"}
    assert not list(installed.rglob("test_*"))
    assert (installed / "megatron_rl" / "py.typed").is_file()
