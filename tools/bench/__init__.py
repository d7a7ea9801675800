"""Benchmarks, from the repository root: ``python -m tools.bench NAME``, and ``python -m tools.bench.compare``.

Python runs this file before each of them, so the environment of torch, vLLM and Megatron is set here.
"""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
for module in (r"torch\.distributed", r"megatron\."):  # Megatron's calls, not ours
    warnings.filterwarnings("ignore", category=FutureWarning, module=module)
