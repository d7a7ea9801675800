"""The series `cpu`: rules by which the source of Megatron-Core names the CPU where it names CUDA.

Rules take whole words, so that the same ones serve every release. A place, of which there is one, has its own text.
They are for environments whose torch is built without CUDA: with CUDA, Megatron's files stay as upstream has them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.errors import InputError

PATTERNS = (
    (r"""(device\s*=\s*|init_data\(|_device=)['"]cuda['"]""", r'\1"cpu"'),
    (r"""(placement = f"rank:.*)/cuda\"""", r'\1/cpu"'),
    (
        r"torch\.cuda\.(synchronize|stream|current_stream|Stream|Event|set_device|device_count|current_device)\b",
        r"torch.cpu.\1",
    ),
    (r"""(['"])torch\.cuda\.((?:Half|BFloat16|Float)Tensor)""", r"\1torch.\2"),
    (
        r"\.cuda\((?:torch\.cpu\.current_device\(\)|non_blocking=True)?\)",
        ".to(torch.cpu.current_device())",
    ),
    (r"torch\.cuda\.(?:random\.)?(get_rng_state|set_rng_state|manual_seed)\b", r"torch.\1"),
    (r"pin_memory=True", "pin_memory=False"),
)


@dataclasses.dataclass(frozen=True)
class Place:
    """A text that a file has once, and what stands there instead."""

    path: str
    old: str
    new: str
    is_newer: bool = False
    """Whether older releases do not have the file."""


PLACES = (
    Place(
        "tensor_parallel/random.py",
        "    if not graph_safe:\n        return torch.cuda.random.get_rng_state(device=device)\n",
        "    return torch.get_rng_state()\n",
    ),
    Place(
        "tensor_parallel/random.py",
        "    if hasattr(_C, '_cuda_setRNGState')",
        "    torch.set_rng_state(new_state)\n    return\n    if hasattr(_C, '_cuda_setRNGState')",
    ),
    # The CPU's state is the one that is forked.
    Place("tensor_parallel/random.py", "if not torch.all(cpu_rng_state == torch.get_rng_state()).item():", "if False:"),
    Place(
        "transformer/moe/moe_utils.py",
        "        tensor = cpu_tensor\n    return tensor\n",
        "        tensor = cpu_tensor\n    elif torch.is_tensor(tensor) and as_numpy:\n        tensor = tensor.numpy()\n"
        "    return tensor\n",
    ),
    # Streams of the CPU record None.
    Place(
        "transformer/moe/token_dispatcher.py",
        "self.d2h_event.synchronize()",
        "self.d2h_event and self.d2h_event.synchronize()",
    ),
    # Gloo gathers parts of equal length only.
    Place(
        "tensor_parallel/mappings.py",
        "        output_tensor_list = list(torch.split(output, output_split_sizes, dim=0))\n"
        "        torch.distributed.all_gather(output_tensor_list, input_, group=group)\n",
        "        torch.distributed.all_to_all_single(\n"
        "            output,\n"
        "            input_.repeat(world_size, *[1] * (input_.dim() - 1)),\n"
        "            output_split_sizes=output_split_sizes,\n"
        "            input_split_sizes=[input_.size(0)] * world_size,\n"
        "            group=group,\n"
        "        )\n",
    ),
    # `import megatron.core` imports this file, and torch for CPUs brings no Triton.
    Place(
        "transformer/moe/ops/paged_stash.py",
        "import triton\nimport triton.language as tl\n",
        "try:\n    import triton\n    import triton.language as tl\n"
        "except ImportError:\n    from unittest.mock import MagicMock\n\n"
        "    triton = tl = MagicMock()\n    triton.jit = lambda function: function\n",
        is_newer=True,
    ),
)
_DEVICES = re.compile(r"(?m)^(cuda|hip)\b[^=\n]*= *['\"]")
"""What torch/version.py says of a build that is not for CPUs."""


def is_wanted() -> bool:
    """Whether this environment is for machines without CUDA: its torch is built for CPUs.

    The build is asked, not the machine: the node on which a cluster's environment is made may have no GPU.
    """
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    version = Path(str(torch.locate_file("torch/version.py")))
    text = version.read_text() if version.is_file() else ""
    return bool(text) and not _DEVICES.search(text)


def rewrite(files: Mapping[str, bytes | None], root: str) -> dict[str, bytes | None]:
    """Return ``files`` with those below the folder ``root`` written for CPUs. Each place must be there once."""
    places: dict[str, list[Place]] = {}
    for place in PLACES:
        places.setdefault(f"{root}/{place.path}", []).append(place)
        if files.get(f"{root}/{place.path}") is None and not place.is_newer:
            raise InputError(f"{root}/{place.path}: is not there, and holds what cannot run on a CPU")
    return {path: _rewrite(path, text, places.get(path, []), root) for path, text in files.items()}


def _rewrite(path: str, content: bytes | None, places: list[Place], root: str) -> bytes | None:
    if content is None or not path.startswith(f"{root}/") or not path.endswith(".py"):
        return content
    text = content.decode("latin-1")  # byte for byte
    for place in places:
        if (count := text.count(place.old)) != 1:
            raise InputError(f"{path}: has {count} times, not once: {place.old.strip().splitlines()[0]}")
        text = text.replace(place.old, place.new)
    for pattern, new in PATTERNS:
        text = re.sub(pattern, new, text)
    return text.encode("latin-1")
