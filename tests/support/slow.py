"""Which cases of a parametrised test `make test` runs, and which this run asks for; `make test-all` runs every one."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` for `pytest.mark.parametrize`, those that are not ``quick`` marked as slow. A tuple is one case of
    several arguments."""
    cases = list(cases)
    assert all(case in cases for case in quick), f"{quick}: not all of them are cases"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in quick else pytest.mark.slow for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def asked(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """The values of the parameters ``names`` in the selected tests of the module that requests it, each once: a fixture
    that makes all cases at once makes these."""
    selected = (item.callspec.params for item in request.session.items if _has_parameters(item, request, names))
    return list(dict.fromkeys(tuple(parameters[name] for name in names) for parameters in selected))


def _has_parameters(item: Any, request: pytest.FixtureRequest, names: tuple[str, ...]) -> bool:
    return item.module is request.module and hasattr(item, "callspec") and item.callspec.params.keys() >= set(names)
