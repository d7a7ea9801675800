"""Files of a run folder, which may come from anywhere: read as what a run writes there, or refused in a sentence.

Links are for folders. A file that a run writes is its own: `own_file` opens no link.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.errors import InputError, shown

T = TypeVar("T")
UNFIT = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError, AssertionError)
"""What code raises for content that it did not write."""
_NUMBERS = {"NaN", "Infinity", "-Infinity"}  # JSON has none of them


def own_file(path: Path, flags: int) -> int:
    """Open ``path`` with ``flags`` and return its descriptor. Raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def read_json(file: Path, like: Any = None) -> Any:
    """Return the content of a JSON file. Raises `InputError` unless it is of the kinds of ``like`` (see `settled`)."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON ({shown(error)}); was it cut? Restore it") from error
    check_kinds(content, like, str(file))
    return content


def check_kinds(found: Any, like: Any, where: str) -> None:
    """Raise `InputError` where ``found``, or a part of it, is of another kind than in ``like``: an object, a list, a
    text, a number. None in either fits all. Keys that only one of them has are not compared."""
    if found is None or like is None:
        return
    is_number = isinstance(found, str) and found in _NUMBERS and _kind(like) == "a number"
    if _kind(found) != _kind(like) and not is_number:
        raise InputError(f"{where}: {shown(found, 60)} is {_kind(found)}, a run writes {_kind(like)} there; restore it")
    if isinstance(like, Mapping):
        for key in like.keys() & found.keys():
            check_kinds(found[key], like[key], f"{where}: {shown(str(key), 60)}")
    elif isinstance(like, list) and like and isinstance(like[0], Mapping):
        for number, item in enumerate(found):
            check_kinds(item, like[0], f"{where}: item {number}")


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return "a text" if isinstance(value, str) else "a number"


def settled(file: Path, state: Mapping[str, Any], key: str, use: Callable[[Any], T], like: Any, *default: Any) -> T:
    """Return what ``use`` makes of ``state[key]``, read from ``file``. Raises `InputError` where the kinds are not
    those of ``like``, which this run would write there, or ``use`` cannot take it."""
    where = f"{file}: {key}"
    if key not in state and not default:
        raise InputError(f"{where}: missing; restore the file, or continue from another checkpoint")
    found = state.get(key, *default)
    check_kinds(found, like, where)
    try:
        return use(found)
    except InputError:
        raise
    except UNFIT as error:
        raise InputError(
            f"{where}: not what a run writes there ({type(error).__name__}: {shown(error)}); restore the file, or "
            "continue from another checkpoint"
        ) from error
