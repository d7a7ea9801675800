"""Whether there is a GPU, asked without starting CUDA."""

from __future__ import annotations

import os


def default_device() -> str:
    """What `runtime.device: auto` stands for: "cuda" where the driver names a GPU, else "cpu".

    The driver is asked through NVML. The CUDA runtime, asked in its place, could not be used by any process that is
    forked from this one, and vLLM forks its workers.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
