"""Which lines of a file are for CUDA, and which of them a test has run.

    with reach.watching("megatron_rl/learner/model.py") as seen:
        ...                                    # with the device replaced
    assert reach.missing("megatron_rl/learner/model.py", seen) == []

`REACHED` says which tests are asked: tests/unit/docs/test_cuda_files.py holds it to the files that there are,
tests/unit/support/test_reach.py to the lines that run.
"""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = re.compile(r"\bcuda\b")
Seen = set[tuple[str, int]]
"""Files, from the repository's root, and lines that ran."""
BITS = "tests/unit/doctor/test_learner.py::test_a_gpu_whose_kernels_do_not_repeat_is_not_held_to_bits"
METER = "tests/unit/doctor/test_engine.py::test_the_meters_peak_counts_what_pytorch_took_beyond_what_was_in_use"
DOCTOR = "tests/unit/doctor/test_command.py::test_ranks_and_folder_follow_from_node_and_recipe"
PLANTED = "tests/unit/doctor/test_checks_planted_faults.py"
LEARNER = "tests/unit/learner/test_model.py"
REACHED: dict[str, str | tuple[str, ...]] = {
    "megatron_rl/checkpoint/save.py": "tests/unit/checkpoint/test_save.py",
    "megatron_rl/config/model_rules.py": "tests/unit/config/test_teacher_rules.py",
    "megatron_rl/doctor/command.py": DOCTOR,
    "megatron_rl/instruments/paper/mismatch_pairs.py": "tests/unit/instruments/paper/test_mismatch_pairs.py",
    "megatron_rl/doctor/engine.py": (PLANTED, METER),
    "megatron_rl/doctor/learner.py": (BITS, PLANTED),
    "megatron_rl/doctor/machine.py": ("tests/unit/doctor/test_machine.py", PLANTED),
    "megatron_rl/exact/turns.py": "tests/unit/exact/test_turns.py",
    "megatron_rl/exact/decode.py": "tests/unit/exact/test_decode_room.py",
    "megatron_rl/exact/invariant.py": LEARNER,
    "megatron_rl/learner/model.py": LEARNER,
    "megatron_rl/learner/offload.py": "tests/unit/learner/test_offload.py",
    "megatron_rl/learner/optimizer.py": LEARNER,
    "megatron_rl/layers/attention.py": LEARNER,
    "megatron_rl/learner/process_groups.py": LEARNER,
    "megatron_rl/monitor/run_directory.py": LEARNER,
    "megatron_rl/monitor/monitor.py": LEARNER,
    "megatron_rl/instruments/plan/workload.py": "tests/unit/instruments/plan/test_workload_quantized.py",
    "megatron_rl/instruments/plan/search.py": "tests/unit/instruments/plan/test_search.py",
    "megatron_rl/process/devices.py": ("tests/unit/process/test_devices.py", "tests/unit/doctor/test_nccl.py"),
    "megatron_rl/process/fp32_products.py": "tests/unit/process/test_fp32_products.py",
    "megatron_rl/rollout/engine_arguments.py": "tests/unit/rollout/test_engine_arguments.py",
    "megatron_rl/rollout/precision.py": "tests/unit/rollout/test_vllm_engine_sleep.py",
    "megatron_rl/rollout/process_state.py": "tests/unit/rollout/test_process_state.py",
    "megatron_rl/rollout/servers/weight_broadcast.py": (
        "tests/unit/rollout/servers/test_weight_broadcast.py::test_a_group_of_gpus",
    ),
    "megatron_rl/rollout/vllm_engine.py": "tests/unit/rollout/test_vllm_engine_sleep.py",
}
"""File → the test file, or the function in it, that runs its lines for CUDA; or several of them."""


def tests_of(file: str) -> tuple[str, ...]:
    """The entries of `REACHED` for ``file``."""
    tests = REACHED[file]
    return tests if isinstance(tests, tuple) else (tests,)


def mentions(node: ast.AST) -> bool:
    """Whether an expression of ``node`` names cuda; statements in its bodies are asked for themselves."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return bool(CUDA.search(node.value))
    names = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}
    name = getattr(node, names.get(type(node), ""), "")
    return bool(CUDA.search(name)) or any(mentions(child) for child in _expressions(node))


def cuda_lines(file: str) -> list[int]:
    """Lines in functions of ``file`` that begin statements for CUDA: that name it in code, or that stand in the branch
    of an `if` that is taken there. Docstrings and annotations name it for readers."""
    lines: set[int] = set()
    pending: list[tuple[ast.AST, bool, bool]] = [(ast.parse((REPOSITORY / file).read_text()), False, False)]
    while pending:
        node, in_function, under = pending.pop()
        runs = isinstance(node, ast.stmt) and in_function and not _is_docstring(node)
        if runs and not isinstance(node, ast.FunctionDef) and (under or mentions(node)):
            lines.add(node.lineno)
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        branch = _branch_for_cuda(node)
        for name, children in ast.iter_fields(node):
            for child in children if isinstance(children, list) else [children]:
                if isinstance(child, ast.stmt | ast.ExceptHandler):
                    pending.append((child, in_function, under or name == branch))
    return sorted(lines)


@contextmanager
def watching(*files: str) -> Iterator[Seen]:
    """Notes the lines of ``files`` that this thread runs."""
    wanted, seen = {str(REPOSITORY / file): file for file in files}, set()

    def of_frame(frame: FrameType, event: str, argument: Any) -> Any:
        file = wanted.get(frame.f_code.co_filename)
        if file is None:
            return None
        seen.add((file, frame.f_lineno))
        return of_frame

    before = sys.gettrace()
    sys.settrace(of_frame)
    try:
        yield seen
    finally:
        sys.settrace(before)


def missing(file: str, seen: Seen) -> list[str]:
    """Lines of ``file`` for CUDA that did not run, as "number: text"."""
    text = (REPOSITORY / file).read_text().splitlines()
    return [f"{n}: {text[n - 1].strip()}" for n in cuda_lines(file) if (file, n) not in seen]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _branch_for_cuda(node: ast.AST) -> str | None:
    """Which of its branches an `if` takes on CUDA alone, where it asks for that or for the CPU."""
    if not isinstance(node, ast.If):
        return None
    asks_cpu = isinstance(node.test, ast.Compare) and any(
        isinstance(part, ast.Constant) and part.value == "cpu" for part in node.test.comparators
    )
    if not asks_cpu and not mentions(node.test):
        return None
    parts = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare | ast.UnaryOp) and mentions(part)]
    inverted = any(isinstance(op, ast.NotEq | ast.Not) for p in parts or [node.test] for op in _operators(p))
    return "body" if asks_cpu == inverted else "orelse"


def _operators(node: ast.AST) -> list[ast.AST]:
    return [*getattr(node, "ops", []), *([node.op] if isinstance(node, ast.UnaryOp) else [])]


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    for name, children in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in children if isinstance(children, list) else [children]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.ExceptHandler):
                yield child
