"""How fast products, attention and copies are here at a recipe's shapes, for a file that `plan --gpu` reads.

On one GPU (or CPU), with torch's own kernels: products of one layer as a rank computes them, forward only; causal
attention of one sequence; a copy of a large tensor. Links come from the check `collectives`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.checks import TINY, Outcome, Setting, passed, planned
from megatron_rl.errors import InputError
from megatron_rl.process.host import write_whole

if TYPE_CHECKING:
    from megatron_rl.config import Recipe
    from megatron_rl.model.architecture import Architecture

UNMEASURED = "h100-80"  # whose figures count where a device has no data sheet here
OPERATIONS = {"cuda": 4e13, "cpu": 1e9}  # most of one measurement: fewer tokens are taken where they would be more
COPIED = {"cuda": 1 << 30, "cpu": 64 << 20}  # bytes
MIN_TOKENS = 64
REPEATS = 5
HEAD = "# From `megatron-rl doctor --measure`, for `megatron-rl plan RECIPE --gpu FILE` (docs/planning.md).\n"


def rates(setting: Setting) -> Outcome:
    import torch

    from megatron_rl.config import load_recipe
    from megatron_rl.doctor.learner import PAPER_RECIPE
    from megatron_rl.model.architecture import shape_of

    recipe = planned(setting) or load_recipe(PAPER_RECIPE if setting.device == "cuda" else TINY)
    architecture, _ = shape_of(recipe.model.path)
    device = torch.device(setting.device)
    name, gib = _device(device)
    products, tokens = _products(recipe, architecture, device)
    attention, length = _attention(recipe, architecture, device)
    copies = _copies(device)
    dtype = {"fp16": "bf16"}.get(recipe.learner.dtype, recipe.learner.dtype)
    return passed(
        f"{name}: products of {tokens} tokens {products / 1e12:.3g} TFLOP/s in {recipe.learner.dtype}, attention over "
        f"{length} tokens {attention / 1e12:.3g} TFLOP/s, copies {copies / 1e9:.3g} GB/s",
        device=name,
        recipe=recipe.name,
        memory_gib=gib,
        dtype=dtype,
        tokens=tokens,
        products=products,
        attention=attention,
        copies=copies,
    )


def layer_products(recipe: Recipe, a: Architecture, tokens: int) -> list[tuple[int, int, int, int]]:
    """Return number, rows, inner width and columns of each product of a layer on one rank; experts are multiplied
    together, with equally many rows each."""
    p = recipe.learner.parallel
    query, key = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    attention = [
        (1, tokens, a.hidden_size, (query + 2 * key) // p.tensor),
        (1, tokens, query // p.tensor, a.hidden_size),
    ]
    if a.is_moe:
        experts, width = a.num_experts // p.expert, a.moe_ffn_hidden_size // p.expert_tensor
        # Ranks that share experts send each other what their tokens chose; tensor-parallel ones have parts of a row.
        rows = tokens * a.experts_per_token * p.expert * p.expert_tensor // (p.tensor * a.num_experts)
    else:
        experts, width, rows = 1, a.ffn_hidden_size // p.tensor, tokens
    rows = max(1, rows)
    return [*attention, (experts, rows, a.hidden_size, 2 * width), (experts, rows, width, a.hidden_size)]


def operations(products: list[tuple[int, int, int, int]]) -> float:
    return sum(2.0 * number * rows * inner * columns for number, rows, inner, columns in products)


def _products(recipe: Recipe, a: Architecture, device: Any) -> tuple[float, int]:
    """Return operations per second of a layer's products, and the tokens that they had."""
    import torch

    tokens = recipe.learner.max_tokens_per_microbatch
    while tokens > MIN_TOKENS and operations(layer_products(recipe, a, tokens)) > OPERATIONS[device.type]:
        tokens //= 2
    products, seconds = layer_products(recipe, a, tokens), 0.0
    for number, rows, inner, columns in products:
        left = _filled((number, rows, inner), recipe, device)
        right = _filled((number, inner, columns), recipe, device)
        seconds += _seconds(lambda left=left, right=right: torch.bmm(left, right), device)
    return operations(products) / seconds, tokens


def _attention(recipe: Recipe, a: Architecture, device: Any) -> tuple[float, int]:
    """Return operations per second of causal attention, counted as `plan` does, and the length of its sequence."""
    import torch

    heads, length = max(1, a.num_heads // recipe.learner.parallel.tensor), recipe.rollout.max_response_length
    while length > MIN_TOKENS and 2.0 * heads * a.head_dim * length**2 > OPERATIONS[device.type]:
        length //= 2
    query, key, value = (_filled((1, heads, length, a.head_dim), recipe, device) for _ in range(3))

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return 2.0 * heads * a.head_dim * length**2 / _seconds(attend, device), length


def _copies(device: Any) -> float:
    """Return bytes per second that a copy reads and writes together."""
    import torch

    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _filled(shape: tuple[int, ...], recipe: Recipe, device: Any) -> Any:
    """Return random numbers: a GPU is faster on zeros, whose bits do not change."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return torch.randn(shape, device=device).to(dtypes[recipe.learner.dtype])


def _seconds(call: Callable[[], Any], device: Any) -> float:
    """Return the median time of ``call`` after a first one that does not count."""
    import torch

    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _device(device: Any) -> tuple[str, float]:
    """Return the name of the device and its memory in GiB: a CPU has that of its host."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory / 2**30
    threads = torch.get_num_threads()
    name = f"a CPU with {threads} thread{'s' * (threads > 1)}"
    return name, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


# What was measured, as a file for `plan --gpu FILE`.


def data_sheet(device: str, memory_gib: float) -> str | None:
    """Return the GPU of `plan` that has this name, of several the one with the nearest memory; None if none has."""
    from megatron_rl.instruments.plan import GPUS

    words = re.split(r"[^a-z0-9]+", device.lower())
    alike = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    return min(alike, key=lambda gpu: abs(gpu.memory_gib - memory_gib)).name if alike else None


def link_figures(table: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return GB/s of links by the keys of `plan`'s file, from the figures of the check `collectives`.

    In a node: of all ranks together, or of the slowest pair where ranks are on several nodes. Between nodes: the
    slowest pair, whose ranks use one GPU's share of the network.
    """
    speeds = {kind: [link["all_reduce"] for link in table.values() if link["kind"] == kind] for kind in _LINKS}
    slowest = {}
    if speeds["between nodes"]:
        slowest["network_gb_s"] = min(speeds["between nodes"])
    inside = speeds["in a node"] if speeds["between nodes"] else speeds["all"]
    if inside:
        slowest["nvlink_gb_s"] = min(inside)
    return {key: _short(speed * 2**30 / 1e9) for key, speed in slowest.items() if speed > 0}


_LINKS = ("in a node", "between nodes", "all")


def write_measured(path: Path, checks: dict[str, Outcome]) -> str:
    """Write the figures of ``checks`` (`rates`, `collectives`) to ``path``, and return what a person should know.

    A file that is there keeps what was not measured anew. Raises `InputError` if it cannot be used.
    """
    import yaml

    from megatron_rl.instruments.plan.hardware import read_gpu

    values: dict[str, Any] = {}
    if path.exists():
        read_gpu(path)  # refuses a file of something else
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    measured, sentences = dict(values.get("measured", {})), []
    if (outcome := checks.get("rates")) and outcome.status == "pass":
        figures = outcome.figures
        base = data_sheet(figures["device"], figures["memory_gib"])
        values.setdefault("base", base or UNMEASURED)
        values["memory_gib"] = round(figures["memory_gib"], 1)
        measured["tflops"] = {figures["dtype"]: _short(figures["products"] / 1e12)}
        measured["attention_tflops"] = _short(figures["attention"] / 1e12)
        measured["memory_tb_s"] = _short(figures["copies"] / 1e12)
        measured["source"] = f"{figures['device']}, {figures['recipe']}, {figures['tokens']} tokens"
        if base is None:
            sentences.append(
                f"plan has no data sheet of {figures['device']}: what was not measured is that of {values['base']}; "
                f"write your own figures into {path}"
            )
    table = checks["collectives"].figures.get("GiB/s", {}) if checks["collectives"].status == "pass" else {}
    measured |= link_figures(table)
    if not table:
        sentences.append("links were not measured: plan reckons with those of the data sheet")
    if not measured:
        raise InputError(f"--measure {path}: nothing was measured, and nothing is written; the checks say why")
    values.setdefault("base", UNMEASURED)
    values = {"name": path.stem} | values | {"measured": measured}
    text = json.dumps(values, indent=1) if path.suffix == ".json" else HEAD + yaml.safe_dump(values, sort_keys=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return "\n".join([f"wrote {path}: megatron-rl plan RECIPE --gpu {path}", *sentences])


def _short(value: float) -> float:
    return float(f"{value:.4g}")
