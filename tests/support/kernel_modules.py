"""Exact mode's Triton kernels, found where they are written. Importing them takes Triton: see tests.support.te."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch


def kernel_modules() -> list[ModuleType]:
    """The modules of `exact.kernels` that launch kernels."""
    from megatron_rl.exact.kernels import attention, gemm, rows

    return [attention, gemm, rows, rows]


@contextmanager
def kernels_replaced(by: Callable[[str, Any], Any]) -> Iterator[None]:
    """``by(name, kernel)`` in the place of every interpreted kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    with ExitStack() as patches:
        for module in kernel_modules():
            for name, value in vars(module).copy().items():
                if isinstance(value, InterpretedFunction) and value.fn.__module__ == module.__name__:
                    patches.enter_context(patch.object(module, name, by(name, value)))
        yield
