"""Programs for developers start: what they import of this repository is there. Read, not run: engines take seconds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAMS = sorted(path for folder in ("bench", "dev", "gpu") for path in (REPOSITORY / "tools" / folder).rglob("*.py"))
OURS = ("megatron_rl", "tests", "tools")


def file_of(module: str) -> Path | None:
    """The file of one of our modules or packages; the folder of a package without `__init__.py`."""
    path = REPOSITORY.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py", path) if p.exists()), None)


def names_in(file: Path) -> set[str]:
    """What can be imported from a file: what it binds at its top, and the modules of a package."""
    names = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing(program: str) -> Iterator[str]:
    """What ``program`` imports of us and is not there."""
    for node in ast.walk(ast.parse(program)):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            if module.split(".")[0] not in OURS:
                continue
            if (file := file_of(module)) is None:
                yield module
            elif isinstance(node, ast.ImportFrom) and file.is_file():
                yield from (f"{module}.{a.name}" for a in node.names if a.name not in names_in(file))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_a_program_imports_is_there(path):
    assert list(missing(path.read_text())) == []
