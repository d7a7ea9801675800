"""Docstrings of the package name what is there: every dotted name in backticks resolves.

A name counts where it is words with dots between them and no file's name. It is a recipe key, `module.name` (a module
by the end of its path), `Class.name` of ours, or another package's: it then begins with that package or a class of it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl.config import Recipe
from tests.unit.docs.test_coming_from import has

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_rl"
DOTTED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")
FILES = {"py", "md", "json", "jsonl", "yaml", "txt", "toml", "lock", "png", "html", "sh", "sbatch", "safetensors"}
FILES |= {"metadata", "parquet", "patch", "npz", "db", "wandb", "csv", "tsv", "so", "log", "distcp"}
ELSEWHERE = {
    "reward_model.ground_truth": "a column of verl's data",
    "lm_head.weight": "a tensor of a checkpoint",
    "tl.dot": "Triton's",
}


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Every text that stands as a statement: of modules, classes and functions, and below fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def bound_in(node: ast.AST) -> set[str]:
    """Names that a module or class binds, at any depth but for parameters and locals; of a class, also ``self``'s."""
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(child.name)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            names.add(child.attr)
        elif isinstance(child, ast.alias):
            names.add((child.asname or child.name).split(".")[0])
    return names


class Names:
    """What modules and classes of the package bind."""

    def __init__(self, sources: dict[str, ast.Module]) -> None:
        """``sources``: dotted path of a module, without the package → its tree."""
        self.modules = {name: bound_in(tree) for name, tree in sources.items()}
        self.rooms = {part for name in sources for part in name.split(".")}
        self.classes: defaultdict[str, set[str]] = defaultdict(set)
        self.bases: defaultdict[str, set[str]] = defaultdict(set)
        for node in (node for tree in sources.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            self.classes[node.name] |= bound_in(node)
            self.bases[node.name] |= {ast.unparse(base) for base in node.bases} - {node.name}

    def has(self, name: str) -> bool:
        parts = name.removeprefix("megatron_rl.").split(".")
        if name in ELSEWHERE or parts[-1] in FILES or has(Recipe, parts) or self._is_ours(parts):
            return True
        first = parts[0]
        is_class = first[0].isupper() and first not in self.classes
        return is_class or (first not in self.rooms and find_spec(first) is not None)

    def _is_ours(self, parts: list[str]) -> bool:
        if parts[0] in self.classes:
            return self._class_has(parts[0], parts[1])
        for size in range(len(parts), 0, -1):
            module, rest = ".".join(parts[:size]), parts[size:]
            for names in (names for known, names in self.modules.items() if f".{known}".endswith(f".{module}")):
                if not rest or (rest[0] in names and (len(rest) == 1 or self._class_has(rest[0], rest[1]))):
                    return True
        return False

    def _class_has(self, name: str, attribute: str) -> bool:
        return attribute in self.classes[name] or any(self._class_has(base, attribute) for base in [*self.bases[name]])


def of_package() -> dict[str, ast.Module]:
    paths = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in paths.items()}


def test_every_dotted_name_of_a_docstring_is_there():
    sources = of_package()
    known = Names(sources)
    wrong = {
        module: gone
        for module, tree in sources.items()
        if (gone := sorted({name for text in docstrings(tree) for name in DOTTED.findall(text) if not known.has(name)}))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("rooms.cached", True),
        ("a.rooms.cached", True),
        ("rooms.gone", False),
        ("hub.cached", False),
        ("Kept.size", True),
        ("rooms.Kept.grow", True),
        ("Kept.gone", False),
        ("rollout.temperature", True),
        ("rollout.temperatur", False),
        ("torch.compile", True),
        ("Tensor.add", True),
        ("log.txt", True),
    ],
)
def test_what_counts_as_there(name, is_there):
    text = "def cached(): ...\nclass Base:\n    def grow(self): self.size = 1\nclass Kept(Base): ...\n"
    assert Names({"a.rooms": ast.parse(text)}).has(name) == is_there
