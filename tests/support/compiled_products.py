"""What Triton makes of products of fp32 matrices, without a GPU: python -m tests.support.compiled_products.

Prints JSON: what `set_environment` was called with → kernel → compute capability → products by TF32's tensor cores in
the kernel's PTX. A process of its own, with Triton as a compiler. The kernels are the one that measures the engine, and
vLLM's own for experts, cut out of its installed source: importing vLLM takes Triton away where there is no GPU.
"""

import ast
import importlib.util
import json
import re
import tempfile
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100)
TF32 = re.compile(r"mma\S*\.tf32|tcgen05\.mma\S*kind::tf32")
SIZES = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "SPLIT_K": 1, "top_k": 8}


def vllm_kernel() -> Any:
    """`fused_moe_kernel` of the installed vLLM."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    source = (Path(folder) / "model_executor" / "layers" / "fused_moe" / "fused_moe.py").read_text()
    names = ("write_zeros_to_output", "fused_moe_kernel")
    parts = [
        f"@triton.jit\n{ast.get_source_segment(source, node)}"
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    file = Path(tempfile.mkdtemp()) / "cut_from_vllm.py"  # Triton reads a kernel's source from its file
    file.write_text("\n\n\n".join(["import triton\nimport triton.language as tl", *parts]))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_moe_kernel


def compiled(kernel: Any, constants: dict[str, Any], capability: int) -> int:
    """Products by TF32's tensor cores in ``kernel``, whose pointers are to fp32 and int32 and whose sizes are int32."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = [parameter.name for parameter in kernel.params]
    pointer = {"a", "b", "out", "a_ptr", "b_ptr", "c_ptr", "b_bias_ptr", "topk_weights_ptr"}
    types = {name: "*fp32" if name in pointer else "*i32" if name.endswith("_ptr") else "i32" for name in names}
    types |= {"a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32"} if "a_scale_ptr" in types else {}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = triton.compiler.ASTSource(kernel, signature, {(names.index(name),): v for name, v in constants.items()})
    return len(TF32.findall(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]))


def main() -> dict[str, dict[str, dict[int, int]]]:
    import triton.language as tl

    from megatron_rl.process.fp32_products import set_environment
    from megatron_rl.process.triton_product import TILE, _product

    experts = vllm_kernel()
    others = [p.name for p in experts.params if p.is_constexpr and p.name not in SIZES]
    constants = SIZES | dict.fromkeys(others, False) | {"compute_type": tl.float32, "group_n": 0, "group_k": 0}
    kernels = {
        "measured": (_product, {"A_ROW": 512, "B_ROW": 512, "TILE": TILE}),
        "vLLM's experts": (experts, constants),
    }
    instructions = {}
    for kind in ("fp32", "tf32"):
        set_environment(kind)
        instructions[kind] = {name: {c: compiled(*kernel, c) for c in CAPABILITIES} for name, kernel in kernels.items()}
    return instructions


if __name__ == "__main__":
    print(json.dumps(main()))
