"""Reward functions of users: `path/to/file.py:function` or `package.module:function`.

A function is called as ``f(response, answer)``, or by keyword as ``f(data_source, solution_str, ground_truth,
extra_info)`` where it names these arguments (verl's convention). It returns a number, a bool or a mapping with `score`.
Functions are loaded in worker processes only; the trainer's own process never runs their file.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError

_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def check_function(name: str) -> None:
    """Raise InputError unless the file or module of ``name`` exists and a file defines the function. Runs nothing."""
    where, _, function = name.rpartition(":")
    if not where.endswith(".py"):
        try:
            found = importlib.util.find_spec(where) is not None
        except ImportError:
            found = False
        if not found:
            raise InputError(f"reward {name}: there is no module {where!r}; is its folder on PYTHONPATH?")
        return
    path = Path(where)
    if not path.is_file():
        raise InputError(f"reward {name}: there is no file {where} (looked in {path.resolve().parent})")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=where)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"reward {name}: {where} is not valid Python: {error}") from error
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    bound = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if function not in bound | set(defined):
        near = difflib.get_close_matches(function, defined, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"reward {name}: {where} defines no function {function!r} (it defines {defined}){hint}")


def load_function(name: str) -> Callable[..., Any]:
    """Import the file or module and return the function. For worker processes."""
    where, _, function = name.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"reward_{Path(where).stem}", where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found = getattr(module, function)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, not a function")
    return found


def check_signature(name: str, function: Callable[..., Any]) -> None:
    """Raise InputError where ``function`` takes neither ``(response, answer)`` nor verl's arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: it says nothing of its parameters
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
    """Call ``function`` in the convention that its parameters show, and read its result as a number."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        signature = inspect.Signature()
    if _is_verl_style(signature):
        return _number(function(**{key: task[key] for key in _verl_arguments(signature)}))
    return _number(function(task["solution_str"], task["ground_truth"]))


def _number(result: Any) -> float:
    """``result`` of a reward function. TypeError for what is no number, bool or mapping, ValueError for one without
    `score`."""
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
