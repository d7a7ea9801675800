"""Reward functions of users: `path/to/file.py:function` or `package.module:function`.

A function is called as ``f(response, answer)``, or by keyword as ``f(data_source, solution_str, ground_truth,
extra_info)`` where it names these arguments (verl's convention). It returns a number, a bool or a mapping with `score`.
Functions are loaded in worker processes only; the trainer checks that they exist without running their file.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
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


def call_reward(function: Callable[..., Any], task: Mapping[str, Any]) -> float:
    """Call ``function`` in the convention that its parameters show, and read its result as a number."""
    parameters = inspect.signature(function).parameters
    if "solution_str" in parameters and "ground_truth" in parameters:
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        result = function(**{key: task[key] for key in _VERL_ARGUMENTS if takes_any or key in parameters})
    else:
        result = function(task["solution_str"], task["ground_truth"])
    return float(result["score"] if isinstance(result, Mapping) else result)
