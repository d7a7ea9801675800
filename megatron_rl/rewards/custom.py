"""Reward functions of users: `path/to/file.py:function` or `package.module:function`.

A function is called as ``f(response, answer)``, or by keyword as ``f(data_source, solution_str, ground_truth,
extra_info)`` if it has these arguments (verl's convention). It returns a number, a bool or a mapping with `score`, and
may be an ``async def``. Only worker processes load functions; the trainer's process never runs their file.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megatron_rl.errors import InputError

_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def check_signature(name: str, function: Callable[..., Any]) -> None:
    """Raise InputError if ``function`` takes neither ``(response, answer)`` nor verl's arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: its parameters cannot be read
        return
    try:
        if _is_verl_style(signature):
            signature.bind(**dict.fromkeys(_verl_arguments(signature)))
        else:
            signature.bind(None, None)
    except TypeError as error:
        raise InputError(
            f"reward {name}: takes {signature}, which fits neither f(response, answer) nor "
            f"f({', '.join(_VERL_ARGUMENTS)}): {error}"
        ) from error


def _is_verl_style(signature: inspect.Signature) -> bool:
    return {"solution_str", "ground_truth"} <= signature.parameters.keys()


def _verl_arguments(signature: inspect.Signature) -> list[str]:
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    return [key for key in _VERL_ARGUMENTS if takes_any or key in signature.parameters]


def call_reward(function: Callable[..., Any], task: Mapping[str, Any]) -> float:
    """Call ``function`` with the arguments that its signature asks for and return its result as a number."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        signature = inspect.Signature()
    if _is_verl_style(signature):
        result = function(**{key: task[key] for key in _verl_arguments(signature)})
    else:
        result = function(task["solution_str"], task["ground_truth"])
    return _number(_loop.run(_awaited(result)) if inspect.isawaitable(result) else result)


_loop = asyncio.Runner()  # one loop for all calls of a process, because a module's clients are bound to it


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


def _number(result: Any) -> float:
    """Return the ``result`` of a reward function as a number.

    Raises TypeError if it is not a number, bool or mapping, ValueError for a mapping without `score`.
    """
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the reward function returned a mapping without `score`; its keys are {list(result)}")
        value = result["score"]
    if isinstance(value, numbers.Real):
        return float(value)
    if not isinstance(value, str | bytes) and callable(getattr(value, "item", None)):  # NumPy's and PyTorch's scalars
        return float(value.item())
    shown = repr(result)
    raise TypeError(
        f"the reward function returned {shown if len(shown) <= 80 else shown[:80] + ' …'} ({type(result).__name__}); "
        "expected a number, a bool or a mapping with `score`"
    )
