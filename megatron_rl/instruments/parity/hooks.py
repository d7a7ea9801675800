"""Hooks and replaced methods that are gone when their block ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Within the block, ``owner.name`` is ``make`` of what it was. ``owner``: a module of Python, class or object."""
    had = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def on_output(stack: ExitStack, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
    """Give ``see`` what comes out of ``module``, until ``stack`` closes."""
    stack.callback(module.register_forward_hook(lambda _module, _inputs, output: see(output)).remove)


def on_input(stack: ExitStack, module: torch.nn.Module, see: Callable[[tuple], None]) -> None:
    """Give ``see`` the positional inputs of ``module``, until ``stack`` closes."""
    stack.callback(module.register_forward_pre_hook(lambda _module, inputs: see(inputs)).remove)


def first(output: Any) -> torch.Tensor:
    """The tensor of an output that may come with a bias or a context."""
    return output[0] if isinstance(output, tuple) else output
