"""Exact mode's Triton kernels compiled for a GPU, which takes no GPU: python -m tests.support.compiled_kernels 90.

Prints JSON: of each type and kernel the instructions of interest, the shared memory of a program, and the bytes of
a thread's values that the assembler spills to memory; of products with many rows, too. A process of its own, with
Triton as a compiler.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.support.kernel_modules import kernel_modules
from tests.support.te import run_with_triton

DTYPES = (torch.float32, torch.bfloat16)
TARGETS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
"""Compute capabilities of A100, H100 and B200 → what the assembler calls them, as Triton does."""
SPILLED = re.compile(r"(\d+) bytes spill stores")
ADDED = re.compile(r"\badd(?:\.rn)?\.f32(?:x2)?\b")
FUSED = re.compile(r"\bfma\.rn\.f32(?:x2)?\b")
PRODUCT = re.compile(r"\b(?:wgmma\.mma_async\.sync|mma\.sync|tcgen05\.mma)")


def run(capability: str) -> dict[str, Any]:
    """What the program prints, from a process of its own."""
    said = run_with_triton("tests.support.compiled_kernels", capability, interpreted=False)
    return json.loads(said.splitlines()[-1])


def call_all(dtype: torch.dtype) -> None:
    """Every wrapper of `exact.kernels`, with small tensors of the shapes that models have."""
    from megatron_rl.exact.kernels import attention, gemm, rows

    x, weights = torch.zeros(64, 128, dtype=dtype), [torch.zeros(256, 128, dtype=dtype) for _ in range(16)]
    numbers, probs = torch.arange(64), torch.zeros(64, dtype=dtype)
    gemm.linear(x, weights[0])
    gemm.grouped_linear(x, weights, torch.arange(16))
    many = x.repeat(len(weights) * gemm.MANY_OF_EXPERT // len(x), 1)
    gemm.linear(many, weights[0])
    gemm.grouped_linear(many, weights, torch.arange(16))
    gemm.grouped_linear(many[: -len(weights)], weights, torch.arange(16))
    rows.rms_norm(x, x[0].clone(), 1e-6)
    heads, angles = x.view(64, 8, 16), torch.zeros(64, 8)
    rows.rotate(heads, angles, angles)
    rows.gated_silu(x, probs)
    rows.route(x, 8, True)
    rows.combine(x, numbers.view(8, 8))
    rows.sort_by_expert(numbers.view(8, 8), x[:8, :8].contiguous(), 0, 16)
    rows.add_rows(x[:8].clone(), x, numbers, torch.arange(8, 72, 8))
    rows.token_statistics(x, numbers, numbers, temperature=0.9)
    query, key = torch.zeros(64, 16, 128, dtype=dtype), torch.zeros(64, 2, 128, dtype=dtype)
    tiles, nothing = attention.query_tiles([64], 8, query.device), torch.zeros_like(numbers)
    attention.packed_attention(query, key, key.clone(), tiles, nothing, numbers, nothing[:1], 0.1)
    cache, pages = torch.zeros(4, 32, 2, 128, dtype=dtype), torch.zeros(64, 4, dtype=torch.int64)
    attention.step_attention(query, cache, cache.clone(), numbers, pages, 0.1)


def spilled(ptx: str, capability: int) -> int:
    """Bytes of a thread, as the assembler that comes with Triton says; it has another one for Blackwell."""
    import triton

    binaries = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [binaries / ("ptxas-blackwell" if capability >= 100 else "ptxas"), "-v"]
        command += [f"--gpu-name={TARGETS[capability]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, SPILLED.findall(said)))


def _rows_of(kernel: str, args: tuple[Any, ...]) -> str:
    """What a product's name gets after it, by the rows that it has."""
    from megatron_rl.exact.kernels.gemm import MANY, MANY_OF_EXPERT

    if kernel not in ("_linear", "_grouped") or len(args[0]) < MANY:
        return ""
    few = kernel == "_grouped" and len(args[0]) < args[5] * MANY_OF_EXPERT
    return " of few rows an expert" if few else " of many rows"


def compiled_for(capability: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _device: 0
        )
    )
    by_kernel: dict[str, Any] = {}
    compile_and_run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        kernel = compile_and_run(self, *args, **kwargs | {"warmup": True})
        code = kernel.asm["ptx"]
        by_kernel[name][self.__name__ + _rows_of(self.__name__, args)] = {
            "added": len(ADDED.findall(code)),
            "bytes": len(kernel.asm["cubin"]),
            "fused": len(FUSED.findall(code)),
            "tensor cores": len(PRODUCT.findall(code)),
            "shared": kernel.metadata.shared,
            "spilled": spilled(code, capability),
            "warps": kernel.metadata.num_warps,
        }

    with patch.object(JITFunction, "run", compile_only):
        for module in kernel_modules():
            module.check = lambda *_: None  # the tensors are a CPU's
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            by_kernel[name] = {}
            call_all(dtype)
    return by_kernel


if __name__ == "__main__":
    print(json.dumps(compiled_for(int(sys.argv[1]))))
