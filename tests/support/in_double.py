"""transformers' models all in float64.

Whatever the type of the weights, transformers has norms, softmax, routers and rotary angles in float32; a reference
that rounds as what is compared with it is none.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """Inside, what asks for float32 gets float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(_widen(x) for x in args)
        return function(*args, **{name: _widen(x) for name, x in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def widened(model: torch.nn.Module) -> torch.nn.Module:
    """``model``, whose weights are float64, with every step of its forward pass in float64."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):  # angles of rotary positions, made in float32 together with the model
            with Widened():
                again = type(module)(model.config)
            module.register_buffer("inv_freq", again.inv_freq, persistent=False)
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Widened():
            return plain(*args, **kwargs)

    model.forward = forward
    return model
