"""Functions of users: `path/to/file.py:function` or `package.module:function`."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.errors import InputError, shown


def check_function(name: str, what: str) -> None:
    """Raise InputError unless the file or module of ``name`` exists and a file defines the function. Runs nothing.

    ``what``: what the function is for; the error begins with it.
    """
    where, _, function = name.rpartition(":")
    if not where.endswith(".py"):
        try:
            exists = importlib.util.find_spec(where) is not None
        except ImportError:
            exists = False
        if not exists:
            raise InputError(f"{what} {name}: there is no module {where!r}; is its folder on PYTHONPATH?")
        return
    path = Path(where)
    if not path.is_file():
        raise InputError(f"{what} {name}: there is no file {where} (looked in {path.resolve().parent})")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=where)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{what} {name}: {where} is not valid Python: {shown(error)}") from error
    except OSError as error:
        raise InputError(f"{what} {name}: {where} cannot be read: {error.strerror}") from error
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    defined = [node.name for node in ast.walk(tree) if isinstance(node, functions)]  # also below `if` and `try`
    bound = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if function not in bound | set(defined) and "*" not in bound:
        near = difflib.get_close_matches(function, defined, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"{what} {name}: {where} defines no function {function!r} (it defines {defined}){hint}")


@functools.cache
def load_function(name: str) -> Callable[..., Any]:
    """Import the file or module of ``name``, once in a process, and return its function.

    TypeError where it is no function; else what the import raises.
    """
    where, _, function = name.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    member = getattr(module, function)
    if not callable(member):
        raise TypeError(f"{name} is a {type(member).__name__}, not a function")
    return member


def _load_file(path: Path) -> ModuleType:
    """Import ``path`` as if its folder were on PYTHONPATH, which it is from here on.

    The module has the file's name, so that other processes can import it too (pickle, multiprocessing), unless another
    module has that name.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    tree = ast.parse(path.read_bytes(), filename=str(path))
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        return _load_of_package(path)
    name = path.stem
    there = sys.modules.get(name)
    if there is not None and getattr(there, "__file__", None) == str(path):
        return there
    if there is not None or not name.isidentifier() or name in sys.stdlib_module_names:
        name = f"user_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_of_package(path: Path) -> ModuleType:
    """Import a file that imports from its own package (`from . import …`)."""
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(".".join(names))
