"""How a process multiplies fp32 matrices on a GPU: with all 24 bits of their mantissas (fp32), or with operands rounded
to the 11 bits of TF32 (tf32), ten of them stored.

Libraries decide this once for a whole process. TransformerEngine asks cuBLAS for TF32 in every product of fp32
matrices; only NVIDIA_TF32_OVERRIDE=0 refuses it, which cuBLAS reads when it makes its first handle. Triton compiles
`tl.dot` to TF32 where a kernel names no precision, as vLLM's experts and attention do, unless TRITON_F32_DEFAULT says
otherwise. PyTorch itself uses fp32 unless it is told. docs/engines/rules.md has the proof of each of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from megatron_rl.errors import InputError

if TYPE_CHECKING:
    import torch

    Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

Fp32Product = Literal["fp32", "tf32"]
"""How matrices of fp32 are multiplied: in full, or with operands rounded to TF32."""

ENVIRONMENT: dict[str, dict[str, str | None]] = {
    "fp32": {
        "NVIDIA_TF32_OVERRIDE": "0",
        "CUBLAS_EMULATE_SINGLE_PRECISION": "0",
        "TRITON_F32_DEFAULT": "ieee",
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    },
    "tf32": {
        "NVIDIA_TF32_OVERRIDE": None,
        "CUBLAS_EMULATE_SINGLE_PRECISION": "0",
        "TRITON_F32_DEFAULT": "tf32",
        "VLLM_FLOAT32_MATMUL_PRECISION": "high",
    },
}
"""Of each kind: variable → value, None for none. cuBLAS ignores a value of more than one character."""

SIZE = 512  # of the square matrices of a trial: a power of two, so that the sums are exact in any order
_settled: Fp32Product | None = None


def set_environment(kind: Fp32Product = "fp32") -> None:
    """Set the variables of ``kind`` in this process and those that it starts. Whatever stood there is replaced."""
    for name, value in ENVIRONMENT[kind].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def settle(kinds: set[Fp32Product], device: str) -> None:
    """Make products of fp32 matrices those of the one that ``kinds`` has, before a library reads the environment.

    ``kinds``: of all that this process will hold, at a time or one after the other; empty: no such products.
    ``device``: "cpu" or "cuda". Raises `InputError` for both kinds, for tf32 on a CPU, and where the process began with
    the other kind.
    """
    global _settled
    if len(kinds) > 1:
        raise InputError(
            "fp32 and tf32 in one process, which multiplies all fp32 matrices alike; use one of them, or a command for "
            "each"
        )
    kind = next(iter(kinds), None)
    if kind == "tf32" and device == "cpu":
        raise InputError("dtype tf32 needs an NVIDIA GPU, and this process runs on a CPU; use fp32, or a GPU")
    if _settled is not None and kind not in (None, _settled):
        raise InputError(
            f"{kind} in a process that began with {_settled}: cuBLAS decides once for a whole process how it "
            "multiplies fp32 matrices; use a command for each"
        )
    if _settled is None:
        _settled = kind or "fp32"
        set_environment(_settled)
        if device == "cuda":
            import torch

            torch.set_float32_matmul_precision("high" if _settled == "tf32" else "highest")


# -- measuring


def measured(product: Product, device: torch.device | str) -> str:
    """What ``product`` (matrices a, b → a · b) does to fp32 matrices: "fp32", "tf32", or "less than tf32".

    One operand has 1 + 2^-12 everywhere, the other 1: every sum of the products is exact in fp32 and in any order, and
    TF32 has no 1 + 2^-12, whether it rounds or cuts off. 1 + 2^-9, which TF32 has and bf16 has not, follows.
    """
    if _keeps(product, 2.0**-12, device):
        return "fp32"
    return "tf32" if _keeps(product, 2.0**-9, device) else "less than tf32"


def _keeps(product: Product, last: float, device: torch.device | str) -> bool:
    """Whether ``product`` has the exact value where an operand is 1 + ``last``, on either side."""
    import torch

    ones = torch.ones(SIZE, SIZE, device=device)
    fine = torch.full_like(ones, 1 + last)
    return all(bool((product(a, b) == SIZE * (1 + last)).all()) for a, b in ((fine, ones), (ones, fine)))


def measured_products(device: torch.device | str, *, transformer_engine: bool, triton: bool) -> dict[str, str]:
    """Library → what it does to fp32 matrices on ``device``, as `measured` says it."""
    import torch

    products: dict[str, Product] = {"PyTorch": torch.mm}
    if transformer_engine:
        products |= {"TransformerEngine": _transformer_engine, "TransformerEngine, grouped": _grouped}
    if triton:
        from megatron_rl.process.triton_product import product

        products["Triton"] = product
    with torch.no_grad():
        return {name: measured(one, device) for name, one in products.items()}


def worst(measured: dict[str, str]) -> str:
    """The coarsest of `measured_products`: what the process as a whole can be said to compute."""
    return max(measured.values(), key=("fp32", "tf32", "less than tf32").index, default="fp32")


def as_measured(described: dict[str, str], measured: dict[str, str]) -> dict[str, str]:
    """``described`` (aspect of the precision contract → type) with what ``measured`` says in the place of fp32."""
    kind = worst(measured)
    return {aspect: kind if value == "fp32" else value for aspect, value in described.items()}


def _transformer_engine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    return general_gemm(b, a, layout="NN", out_dtype=a.dtype)[0]


def _grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two products of half the rows each, as of two experts."""
    import torch
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    result, rows = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device), len(a) // 2
    general_grouped_gemm(
        [b, b], list(a.split(rows)), [result], [None, None], a.dtype, layout="NN", m_splits=[rows, rows],
        single_output=True,
    )  # fmt: skip
    return result


def hold(kind: Fp32Product | None, measured: dict[str, str], who: str) -> None:
    """Raise `InputError` where a library multiplies fp32 matrices otherwise than ``kind``. ``who``: learner, …"""
    wrong = {name: value for name, value in measured.items() if kind is not None and value != kind}
    if not wrong:
        return
    text = "; ".join(f"{name} has {value}" for name, value in wrong.items())
    seen = ", ".join(f"{name}={os.environ.get(name, '')}" for name in ENVIRONMENT[kind or "fp32"])
    raise InputError(
        f"the {who} should multiply fp32 matrices as {kind}: {text}. The environment has {seen}. Start through "
        "`megatron-rl`, or call `megatron_rl.process.fp32_products.set_environment` before anything uses the GPU; "
        "`megatron-rl doctor --only fp32` looks at each library"
    )
