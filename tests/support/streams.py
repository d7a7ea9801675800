"""CUDA's streams without a GPU, and what vLLM does with them: its own code, told that its platform is CUDA.

current = streams.install(monkeypatch)     # the default stream is current, and vLLM is not imported
streams.import_vllm(monkeypatch)           # `torch.cuda.set_stream` is vLLM's from here on
streams.ask_vllm()                         # as its graphs do; makes one current where vLLM knows of none
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

DEFAULT = "default stream"


class Stream(str):
    def wait_stream(self, other: Any) -> None:
        pass


def install(monkeypatch: Any) -> Callable[[], str]:
    """A function that says which stream is current."""
    import vllm.platforms
    from vllm.utils import torch_utils

    import megatron_rl.rollout.worker_extension  # noqa: F401 - asks for the platform when it is imported

    made, state = [], {"current": Stream(DEFAULT)}

    def make(device: Any = None) -> Stream:
        made.append(Stream(f"stream {len(made)}"))
        return made[-1]

    def set_current(stream: Stream) -> None:
        state["current"] = stream

    cuda = {
        "is_available": lambda: True,
        "Stream": make,
        "default_stream": lambda: Stream(DEFAULT),
        "current_stream": lambda: state["current"],
        "set_stream": set_current,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch_utils, "prev_set_stream", set_current)
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
    platform = SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False, is_cpu=lambda: False)
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    return cuda["current_stream"]


def import_vllm(monkeypatch: Any) -> None:
    from vllm.utils import torch_utils

    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)


def ask_vllm() -> None:
    from vllm.utils import torch_utils

    torch_utils.current_stream()
