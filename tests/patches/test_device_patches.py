"""Device patches leave CUDA alone: with the helpers spelled out for CUDA, the patched code *is* upstream's.

No GPU is needed, nor the package: releases that are not installed are compared in their archives. Both versions of each
file are parsed, the helpers are replaced by what they return where CUDA is available, branches for the CPU drop out,
and the trees are compared function by function. The few functions that differ otherwise are named here with the reason
why CUDA cannot tell.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from megatron_rl.patching import releases, upstream
from megatron_rl.patching.series import Series

REPOSITORY = Path(__file__).resolve().parents[2]

SERIES = {
    name: Series.read(REPOSITORY / "patches" / name)
    for name in releases.names(REPOSITORY / "patches")
    if name.startswith("megatron-core-") and Series.read(REPOSITORY / "patches" / name).archives
}
DEVICE_PATCHES = [
    pytest.param(name, patch, id=f"{name}-{patch.name}")
    for name, series in SERIES.items()
    for patch in series.patches
    if patch.name.startswith("device-of-")
]
DTYPE = "tensors sorted by dtype instead of by the name of CUDA's tensor type"
EXCEPTIONS = {
    ("optimizer/optimizer.py", "Float16OptimizerWithFloat16Params.__init__"): DTYPE,
    ("optimizer/distrib_optimizer.py", "DistributedOptimizer._build_model_and_main_param_groups"): DTYPE,
    ("optimizer/distrib_optimizer.py", "DistributedOptimizer.__init__"): DTYPE,
    ("optimizer/clip_grads.py", "clip_grad_by_total_norm_fp32"): DTYPE,
    (
        "transformer/moe/token_dispatcher.py",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
    ): "an event of CUDA is never None",
}


class ForCuda(ast.NodeTransformer):
    """Spell out device_utils for CUDA, and write the ways of naming the current GPU in one."""

    device = ast.Constant("cuda")

    def visit_ImportFrom(self, node):
        return None if (node.module or "").split(".")[-1] == "device_utils" else node

    def visit_Call(self, node):
        self.generic_visit(node)
        text = ast.unparse(node)
        if text in ("current_device()", "torch.cuda.current_device()", "device_type()"):
            return self.device
        if text == "device_module()":
            return ast.parse("torch.cuda", mode="eval").body
        if text == "synchronize()":
            return ast.parse("torch.cuda.synchronize()", mode="eval").body
        if text.startswith("_cuda_manual_seed("):
            node.func = ast.parse("torch.cuda.manual_seed", mode="eval").body
        if text == "_get_cuda_rng_state()":
            return ast.parse("torch.cuda.get_rng_state()", mode="eval").body
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":  # x.cuda() is x.to(<current GPU>)
            node.func.attr = "to"
            node.args = [self.device]
        return node

    def visit_Compare(self, node):
        self.generic_visit(node)
        return {
            "'cuda' == 'cpu'": ast.Constant(False),
            "'cuda' != 'cpu'": ast.Constant(True),
            "'cuda'.type == 'cuda'": ast.Constant(True),
        }.get(ast.unparse(node), node)

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        neutral = isinstance(node.op, ast.And)
        if any(isinstance(value, ast.Constant) and value.value is (not neutral) for value in node.values):
            return ast.Constant(not neutral)
        node.values = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value is neutral)]
        return node.values[0] if len(node.values) == 1 else node

    def visit_If(self, node):
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant) and isinstance(node.test.value, bool):
            return node.body if node.test.value else node.orelse
        return node

    def visit_JoinedStr(self, node):
        self.generic_visit(node)
        parts: list[ast.expr] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Constant):
                part = ast.Constant(str(part.value.value))
            if isinstance(part, ast.Constant) and parts and isinstance(parts[-1], ast.Constant):
                parts[-1] = ast.Constant(parts[-1].value + part.value)
            else:
                parts.append(part)
        node.values = parts
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        # An annotation of a local name is never looked at.
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value is not None else node


def functions(source: bytes) -> dict[str, str]:
    """Normalized text by qualified name; "" holds what stands outside of functions."""
    result: dict[str, str] = {}

    def walk(body, prefix):
        rest = []
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                result[prefix + node.name] = ast.unparse(node)
            else:
                rest.append(ast.unparse(node))
        result[prefix] = "\n".join(rest)

    walk(ast.fix_missing_locations(ForCuda().visit(ast.parse(source))).body, "")
    return result


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> dict[str, dict[str, tuple[dict, dict]]]:
    """Files before and after each patch of each series, from the installed package or from the pinned archive."""
    result = {}
    for name, series in SERIES.items():
        if releases.installed_version(series) == series.pins["Version"]:
            root = releases.find_target(series, None, allow_global=True).root
        else:
            archive = upstream.fetch(series, REPOSITORY / ".cache" / "patches", None)
            root = upstream.unpack(archive, tmp_path_factory.mktemp(name), series.pins["Root"])
        files = series.pristine(series.load(root))
        result[name] = {}
        for patch in series.of(["cpu"]):
            after = patch.applied_to(files)
            result[name][patch.name] = (files, after)
            files = after
    return result


def differing_functions(before: bytes, after: bytes) -> set[str]:
    old, new = functions(before), functions(after)
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


@pytest.mark.parametrize(("name", "patch"), DEVICE_PATCHES)
def test_device_patches_are_upstream_where_cuda_is_available(name, patch, states):
    before, after = states[name][patch.name]
    for path in patch.paths:
        allowed = {name for file, name in EXCEPTIONS if path.endswith(file)}
        if path.endswith("tensor_parallel/random.py"):
            allowed.add("_cuda_manual_seed")  # new; its calls are spelled out above
        differing = differing_functions(before[path], after[path])
        assert differing <= allowed, f"{path}: {differing - allowed}"
        # An exception that is not needed any more must go.
        assert differing == allowed, f"{path}: equal after all: {allowed - differing}"


def test_the_comparison_notices_a_change(states):
    before, after = states["megatron-core-0.16"]["device-of-moe.patch"]
    path = "megatron/core/transformer/moe/router.py"
    assert (
        differing_functions(before[path], after[path].replace(b"device=current_device()", b'device="cpu"', 1)) != set()
    )


def test_helpers_return_what_the_cuda_calls_returned(monkeypatch):
    from megatron.core import device_utils

    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(3))
    assert device_utils.current_device() == torch.device("cuda", 3)
    assert (device_utils.device_type(), device_utils.device_module()) == ("cuda", torch.cuda)
    device_utils.synchronize()
    assert waited == [3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_utils.current_device() == torch.device("cpu")
    assert (device_utils.device_type(), device_utils.device_module()) == ("cpu", torch.cpu)
    device_utils.synchronize()
    assert waited == [3]
