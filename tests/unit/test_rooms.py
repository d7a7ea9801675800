"""The plan of the house: which rooms there are, and which way their imports point."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
AT_THE_TOP = {"__init__", "__main__", "train", "evaluate", "batch", "arguments", "types", "errors"}
ENGINES = {
    "megatron": {"checkpoint", "layers", "exact", "learner", "instruments.parity"},
    "vllm": {"rollout", "instruments.parity"},
}
BESIDE_A_RUN = {"instruments", "doctor", "commands"}  # nothing of a run imports these; the rest is what a run needs


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
    """The folder of a module; a module at the top is a room of its own, and so is each instrument."""
    parts = module.split(".")[1:]
    if not parts:
        return module
    return ".".join(parts[:2]) if parts[0] == "instruments" and len(parts) > 1 else parts[0]


def names_of(module: str) -> set[str]:
    """Names that a module binds outside of its functions and classes, and the modules below it."""
    below = {name.removeprefix(f"{module}.") for name in MODULES if name.startswith(f"{module}.")}
    bound = {name for name in below if "." not in name} | {"__file__", "__doc__", "__name__"}
    nodes: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            nodes.append(node)
    return bound


def missing_names(source: str, bound: dict[str, set[str]]) -> list[str]:
    """What ``source`` imports or reads from modules of the package that is not in ``bound``, their names."""
    tree = ast.parse(source)
    missing, aliases = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in bound:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                aliases |= {alias.asname or alias.name: whole} if whole in bound else {}
                missing += [] if alias.name in bound[node.module] else [whole]
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            if module and node.value.id not in own and node.attr not in bound[module]:
                missing.append(f"{module}.{node.attr}")
    return missing


def circle_of(name: str) -> str:
    """The first part of a room's name: `instruments` of `instruments.plan`."""
    return name.split(".")[0]


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The nodes of one circle; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for target in sorted(arrows[node]):
                if cycle := visit(target, [*path, node]):
                    return cycle
            done.add(node)
        return []

    return next((one for node in sorted(arrows) if (one := visit(node, []))), [])


def arrows(by_room: bool) -> dict[str, set[str]]:
    between: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for target in imported(module):
            # A package's __init__ hands names on: it is above the modules that it names, and below those that use them.
            if target in MODULES and target != module and module != "megatron_rl":
                source, goal = (room(module), room(target)) if by_room else (module, target)
                between[source] |= {goal} - {source, "megatron_rl"}
    return defaultdict(set, between)


def test_no_modules_import_each_other_in_a_circle():
    assert circle(arrows(by_room=False)) == []


def test_no_rooms_import_each_other_in_a_circle():
    assert circle(arrows(by_room=True)) == []


def test_a_run_imports_no_instrument_and_an_instrument_no_command():
    by_room = arrows(by_room=True)
    of_a_run = {name for name in by_room if circle_of(name) not in BESIDE_A_RUN} - {"__main__"}
    assert [(name, goal) for name in of_a_run for goal in by_room[name] if circle_of(goal) in BESIDE_A_RUN] == []
    instruments = {name for name in by_room if circle_of(name) in {"instruments", "doctor"}}
    assert [name for name in instruments if "commands" in by_room[name]] == []


def test_a_module_uses_names_of_other_modules_that_they_have():
    """Commands import when they run, so that a name that has moved would be found by a user."""
    bound = {module: names_of(module) for module in MODULES}
    missing = {module: missing_names(MODULES[module].read_text(), bound) for module in MODULES}
    assert {module: names for module, names in missing.items() if names} == {}


def test_a_name_that_a_module_does_not_have_is_found():
    bound = {"pack": {"rows"}, "pack.rows": {"read"}}
    source = "def run():\n    from pack import rows\n    from pack.rows import write\n    rows.read(rows.size)"
    assert missing_names(source, bound) == ["pack.rows.write", "pack.rows.size"]


def test_a_circle_is_found():
    assert circle(defaultdict(set, {"a": {"b"}, "b": {"c"}, "c": {"a"}})) == ["a", "b", "c", "a"]


def test_six_modules_at_the_top():
    assert {path.stem for path in PACKAGE.glob("*.py")} == AT_THE_TOP


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_imported_in_its_rooms_alone(engine):
    users = {room(module) for module in MODULES if engine in {name.split(".")[0] for name in imported(module)}}
    assert users <= ENGINES[engine]


LEAVES = {"errors", "types", "arguments", "shipped"}  # they import nothing that knows a run
MOST_ARROWS = 157
BUDGETS = {"spine": 44_150, "instruments": 20_650, "tools": 6_980, "tests": 65_960, "patches": 2_900}
"""Lines of each. A number goes up only in a commit that says why; goals: 31, 17, 6, 58 and 4 thousand."""


def lines_of(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def test_what_a_room_may_weigh():
    beside = {"instruments", "doctor", "patching"}
    modules = {
        part: [path for name, path in MODULES.items() if (circle_of(room(name)) in beside) == part]
        for part in (False, True)
    }
    weights = {"spine": lines_of(modules[False]), "instruments": lines_of(modules[True])}
    for folder in ("tools", "tests", "patches"):
        files = [path for path in (PACKAGE.parent / folder).rglob("*") if path.is_file()]
        weights[folder] = lines_of(path for path in files if "__pycache__" not in path.parts)
    assert {name: lines for name, lines in weights.items() if lines > BUDGETS[name]} == {}


def test_rooms_know_few_others():
    between = {name: goals - LEAVES for name, goals in arrows(by_room=True).items() if name != "__main__"}
    assert sum(map(len, between.values())) <= MOST_ARROWS


def test_commands_know_instruments_and_doors_alone():
    doors = {"config", "rollout", "run", "train", "evaluate", "process"}
    assert arrows(by_room=True)["commands"] - LEAVES <= doors
