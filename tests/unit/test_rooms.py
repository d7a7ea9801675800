"""The plan of the house: which rooms there are, and which way their imports point."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
AT_THE_TOP = {"__init__", "__main__", "train", "evaluate", "batch", "check", "types", "errors"}
ENGINES = {"megatron": {"checkpoint", "learner", "exact", "trace"}, "vllm": {"rollout"}}


def imported(module: str) -> Iterator[str]:
    """Modules of the package, or of others, that ``module`` imports: anywhere in it, for types too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


def room(module: str) -> str:
    """The folder of a module; a module at the top is a room of its own."""
    return module.split(".")[1] if "." in module else module


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The nodes of one circle; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for target in sorted(arrows[node]):
                if found := visit(target, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(arrows) if (found := visit(node, []))), [])


def arrows(by_room: bool) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for target in imported(module):
            # A package's __init__ hands names on: it is above the modules that it names, and below those that use them.
            if target in MODULES and target != module and module != "megatron_rl":
                source, goal = (room(module), room(target)) if by_room else (module, target)
                found[source] |= {goal} - {source, "megatron_rl"}
    return defaultdict(set, found)


def test_no_modules_import_each_other_in_a_circle():
    assert circle(arrows(by_room=False)) == []


def test_no_rooms_import_each_other_in_a_circle():
    assert circle(arrows(by_room=True)) == []


def test_a_circle_is_found():
    assert circle(defaultdict(set, {"a": {"b"}, "b": {"c"}, "c": {"a"}})) == ["a", "b", "c", "a"]


def test_seven_modules_at_the_top():
    assert {path.stem for path in PACKAGE.glob("*.py")} == AT_THE_TOP


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_imported_in_its_rooms_alone(engine):
    users = {room(module) for module in MODULES if engine in {name.split(".")[0] for name in imported(module)}}
    assert users <= ENGINES[engine]
