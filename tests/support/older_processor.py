"""A plugin of pytest (PYTEST_PLUGINS=tests.support.older_processor): torch finds the instructions that
ATEN_CPU_CAPABILITY names and no later ones, so that vLLM loads its build for such a processor and chooses kernels for
it."""

import os

import torch

LATER = {
    "_is_avx512_supported": ("default", "avx2"),
    "_is_vnni_supported": ("default", "avx2", "avx512"),
    "_is_avx512_bf16_supported": ("default", "avx2", "avx512"),
    "_is_amx_tile_supported": ("default", "avx2", "avx512"),
    "_is_amx_fp16_supported": ("default", "avx2", "avx512"),
}
"""torch's question → the capabilities of processors that answer no."""

for question, answer_no in LATER.items():
    if os.environ.get("ATEN_CPU_CAPABILITY") in answer_no:
        setattr(torch.cpu, question, lambda: False)
