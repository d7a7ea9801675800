"""Checkpoints from elsewhere are data: loading one runs no code from it.

Megatron's distributed format has pickles in it: the index (``.metadata``), which torch reads with plain `pickle`, and
files that torch reads with or without restrictions, depending on who calls.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import InputError

INDEX_FILE = ".metadata"


@contextlib.contextmanager
def no_foreign_code(path: Path) -> Iterator[None]:
    """While this context is open, loading ``path`` runs no code from it.

    The index is read once by a reader that knows a few classes. Whatever torch unpickles is restricted to tensors and
    plain values.
    """
    with (path / INDEX_FILE).open("rb") as index:
        _IndexReader(index).load()
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "nsupported" in line), str(error).splitlines()[0])
        raise InputError(f"checkpoint {path}: holds more than tensors and plain values: {reason.strip()}") from error
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


class _IndexReader(pickle.Unpickler):
    """Reads the index of a checkpoint, which torch pickles, and no other class.

    A pickle may call what it names and set its attributes: `dataclass` on a class whose annotations it has set compiles
    them. So of a module only the classes that it defines are allowed, not the modules and functions that it imports.
    """

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
    _NAMES = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format)
        if is_type or (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module in self._MODULES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise InputError(f"the checkpoint's index names {module}.{name}, which no run writes; it is not loaded")


def _enum_member(owner: Any, name: str) -> Any:
    """Replaces `getattr`: Python before 3.11.4 pickles the members of an enumeration as calls of it."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
        return owner[name]
    raise InputError(f"the checkpoint's index takes {name!r} of {owner!r}, which no run writes; it is not loaded")
