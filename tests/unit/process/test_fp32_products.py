"""Products of fp32 matrices: what a process is set to, what it is measured to do, and where both are held together."""

from __future__ import annotations

import json
import os

import pytest
import torch

from megatron_rl import __main__ as command_line
from megatron_rl.errors import InputError
from megatron_rl.process import fp32_products
from tests.support.te import MISSING, run_with_triton


def tf32(x: torch.Tensor, half_a_unit: int = 0x1000) -> torch.Tensor:
    """fp32 ``x`` rounded to TF32, or cut off where ``half_a_unit`` is 0."""
    return ((x.view(torch.int32) + half_a_unit) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def beginning(monkeypatch):
    """A process that has multiplied nothing."""
    monkeypatch.setattr(fp32_products, "_settled", None)
    for name in fp32_products.ENVIRONMENT["fp32"]:
        monkeypatch.setenv(name, "of before")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda value: None)


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in fp32_products.ENVIRONMENT["fp32"]}


@pytest.mark.parametrize(
    ("product", "wanted"),
    [
        (torch.mm, "fp32"),
        (lambda a, b: tf32(a) @ tf32(b), "tf32"),
        (lambda a, b: tf32(a, 0) @ tf32(b, 0), "tf32"),
        (lambda a, b: tf32(a) @ b, "tf32"),  # one operand alone
        (lambda a, b: a @ tf32(b), "tf32"),
        (lambda a, b: (a.bfloat16() @ b.bfloat16()).float(), "less than tf32"),
    ],
)
def test_a_product_is_known_by_its_exact_value(product, wanted):
    assert fp32_products.measured(product, "cpu") == wanted


def test_this_processor_multiplies_in_full():
    assert fp32_products.measured_products("cpu", transformer_engine=False, triton=False) == {"PyTorch": "fp32"}


def test_the_command_line_starts_with_fp32(beginning):
    """A variable of one character more than cuBLAS reads, or another's choice, does not stand."""
    with pytest.raises(SystemExit):
        command_line.main(["--version"])
    assert environment() == fp32_products.ENVIRONMENT["fp32"]
    assert all(len(environment()[name]) == 1 for name in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION"))


def test_a_process_settles_once(beginning):
    fp32_products.settle({"tf32"}, "cuda")
    assert environment() == fp32_products.ENVIRONMENT["tf32"]
    fp32_products.settle(set(), "cuda")  # a 16-bit engine beside it
    fp32_products.settle({"tf32"}, "cuda")
    assert environment() == fp32_products.ENVIRONMENT["tf32"]
    with pytest.raises(InputError, match="fp32 in a process that began with tf32"):
        fp32_products.settle({"fp32"}, "cuda")


def test_16_bits_settle_for_fp32(beginning):
    """cuBLAS has read the environment by then, whatever its products were."""
    fp32_products.settle(set(), "cuda")
    assert environment() == fp32_products.ENVIRONMENT["fp32"]
    with pytest.raises(InputError, match="tf32 in a process that began with fp32"):
        fp32_products.settle({"tf32"}, "cuda")


def test_what_cannot_be_settled(beginning):
    with pytest.raises(InputError, match="needs an NVIDIA GPU"):
        fp32_products.settle({"tf32"}, "cpu")
    with pytest.raises(InputError, match="fp32 and tf32 in one process"):
        fp32_products.settle({"fp32", "tf32"}, "cuda")
    assert set(environment().values()) == {"of before"}


def test_an_engine_that_does_something_else_is_refused(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    fp32_products.hold("fp32", {"PyTorch": "fp32", "Triton": "fp32"}, "learner")
    fp32_products.hold(None, {"PyTorch": "tf32"}, "learner")  # it multiplies no fp32 matrices
    with pytest.raises(InputError, match=r"the learner .* as fp32: Triton has tf32.*NVIDIA_TF32_OVERRIDE=1"):
        fp32_products.hold("fp32", {"PyTorch": "fp32", "Triton": "tf32"}, "learner")
    with pytest.raises(InputError, match="as tf32: PyTorch has fp32"):
        fp32_products.hold("tf32", {"PyTorch": "fp32", "Triton": "tf32"}, "rollout engine")


def test_the_contract_says_what_was_measured():
    described = {"dtype": "fp32", "head": "fp32", "router": "bf16", "attention": "X"}
    assert fp32_products.as_measured(described, {"a": "fp32"}) == described
    tf32_at_one = fp32_products.as_measured(described, {"a": "fp32", "b": "tf32"})
    assert tf32_at_one == {"dtype": "tf32", "head": "tf32", "router": "bf16", "attention": "X"}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_triton_takes_tf32_where_the_environment_leaves_it_to_it():
    """On A100, H100 and B200: the kernel that measures, and vLLM's own for experts."""
    printed = json.loads(run_with_triton("tests.support.compiled_products", interpreted=False).splitlines()[-1])
    assert {kind: set(kernels) for kind, kernels in printed.items()} == {
        kind: {"measured", "vLLM's experts"} for kind in ("fp32", "tf32")
    }
    counts = {kind: [n for kernel in kernels.values() for n in kernel.values()] for kind, kernels in printed.items()}
    assert counts["fp32"] == [0] * 6
    assert len(counts["tf32"]) == 6
    assert min(counts["tf32"]) > 0
