"""How fast products, attention and copies are here at a recipe's shapes, for a file that `plan --gpu` reads.

On one GPU (or CPU), with torch's own kernels: products of one layer as a rank computes them, forward only; causal
attention of one sequence; a copy of a large tensor. Links come from the check `collectives`.

`collectives`: are all-reduce and all-to-all right, between neighbouring ranks and over all of them, and how fast?
Neighbours in a ring measure in groups of their own, so that a rank which cannot be reached takes no other pair down.
NCCL between GPUs, else gloo. Bandwidths are those of the bus, by which all-reduce and all-to-all of any size compare.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.checks import TINY, Outcome, Setting, failed, not_run, passed, planned
from megatron_rl.doctor.machine import gather, node_name, open_store, until
from megatron_rl.errors import InputError
from megatron_rl.process.devices import barrier_devices, local_gpu
from megatron_rl.process.host import write_whole

if TYPE_CHECKING:
    from megatron_rl.config.learner import LearnerConfig, ParallelConfig
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
    products, tokens = _products(recipe.learner, architecture, device)
    attention, length = _attention(recipe.learner, architecture, recipe.rollout.max_response_length, device)
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


def layer_products(p: ParallelConfig, a: Architecture, tokens: int) -> list[tuple[int, int, int, int]]:
    """Return number, rows, inner width and columns of each product of a layer on one rank; experts are multiplied
    together, with equally many rows each."""
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


def _products(config: LearnerConfig, a: Architecture, device: Any) -> tuple[float, int]:
    """Return operations per second of a layer's products, and the tokens that they had."""
    import torch

    tokens = config.max_tokens_per_microbatch
    while tokens > MIN_TOKENS and operations(layer_products(config.parallel, a, tokens)) > OPERATIONS[device.type]:
        tokens //= 2
    products, seconds = layer_products(config.parallel, a, tokens), 0.0
    for number, rows, inner, columns in products:
        left = _filled((number, rows, inner), config.dtype, device)
        right = _filled((number, inner, columns), config.dtype, device)
        seconds += _seconds(lambda left=left, right=right: torch.bmm(left, right), device)
    return operations(products) / seconds, tokens


def _attention(config: LearnerConfig, a: Architecture, most_tokens: int, device: Any) -> tuple[float, int]:
    """Return operations per second of causal attention, counted as `plan` does, and the length of its
    sequence, which is ``most_tokens`` or what this device does in a moment."""
    import torch

    heads, length = max(1, a.num_heads // config.parallel.tensor), most_tokens
    while length > MIN_TOKENS and 2.0 * heads * a.head_dim * length**2 > OPERATIONS[device.type]:
        length //= 2
    query, key, value = (_filled((1, heads, length, a.head_dim), config.dtype, device) for _ in range(3))

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return 2.0 * heads * a.head_dim * length**2 / _seconds(attend, device), length


def _copies(device: Any) -> float:
    """Return bytes per second that a copy reads and writes together."""
    import torch

    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _filled(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """Return random numbers: a GPU is faster on zeros, whose bits do not change."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return torch.randn(shape, device=device).to(dtypes[dtype])


def _seconds(call: Callable[[], Any], device: Any, begin: Callable[[], None] = lambda: None) -> float:
    """Return the median time of ``call``, without ``begin`` before it, after a first one that does not count."""
    import torch

    times = []
    for _ in range(1 + REPEATS):
        begin()
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


SLOW_LINK = 0.5  # of the median link of its kind: links of one fabric differ by percents, one that fell back by factors
LINK_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
LINK_KINDS = ("all_reduce", "all_to_all")
_EXACT = 1024  # values stay below 2**24 in fp32, and sums of them are exact

Link = dict[str, Any]  # {"ranks", "kind": "in a node" | "between nodes" | "all", "problem", "all_reduce", "all_to_all"}


def ring(size: int) -> list[list[tuple[int, int]]]:
    """Return pairs of neighbours in rounds; no rank is in two pairs of a round."""
    pairs = [(i, (i + 1) % size) for i in range(size if size > 2 else 1)]
    last = pairs[-1:] if len(pairs) % 2 and len(pairs) > 1 else []
    rest = pairs[: len(pairs) - len(last)]
    return [one_round for one_round in (rest[0::2], rest[1::2], last) if one_round]


def collectives(setting: Setting) -> Outcome:
    """Every rank's part; the first rank's outcome counts."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return not_run("one rank: there is no other")
    import torch

    device, store = torch.device("cpu"), open_store(setting)
    if setting.device == "cuda":
        device = torch.device("cuda", local_gpu())
        torch.cuda.set_device(device)
    groups = [*(pair for one_round in ring(size) for pair in one_round), tuple(range(size))]
    measured = [
        measure(store, str(number), ranks.index(rank), len(ranks), device, setting.wait_s) if rank in ranks else None
        for number, ranks in enumerate(groups)
    ]
    answers = gather(store, "link", setting, rank, size, [node_name(), measured])
    store.set(f"bye/{rank}", "")
    if rank:
        return not_run("the first rank reports")
    until(lambda: store.check([f"bye/{i}" for i in range(size)]), setting.wait_s)  # the store ends with this process
    links = [
        _link(answers, number, ranks, "" if number < len(groups) - 1 else "all") for number, ranks in enumerate(groups)
    ]
    return judge_links(links, size, setting.device)


def measure(store: Any, name: str, rank: int, size: int, device: Any, wait_s: float) -> list[Any]:
    """GiB/s of `LINK_KINDS` in a group of its own, as this rank sees it, and what is wrong with it."""
    import torch.distributed as dist

    problem, speeds, length = "", [0.0, 0.0], LINK_BYTES[device.type] // 4
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=wait_s),
            device_id=device if device.type == "cuda" else None,
        )
        for i, call in enumerate((all_reduce, all_to_all)):
            right, seconds = call(length, rank, size, device)
            problem = problem or ("" if right else f"{LINK_KINDS[i]} gave wrong values")
            speeds[i] = (2 if call is all_reduce else 1) * (size - 1) / size * 4 * length / seconds / 2**30
    except RuntimeError as error:  # DistError and its kin are RuntimeErrors
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return [*speeds, problem]


def all_reduce(length: int, rank: int, size: int, device: Any) -> tuple[bool, float]:
    """Whether the sum of [length] values is exact, and the median time."""
    import torch
    import torch.distributed as dist

    base = (torch.arange(length, device=device) % _EXACT).float()
    values = torch.empty_like(base)
    seconds = _timed(lambda: dist.all_reduce(values), values, lambda: values.copy_(base).add_(rank))
    return bool(torch.equal(values, size * base + size * (size - 1) // 2)), seconds


def all_to_all(length: int, rank: int, size: int, device: Any) -> tuple[bool, float]:
    """Whether each rank got every other's part, and the median time."""
    import torch
    import torch.distributed as dist

    base = (torch.arange(length // size, device=device) % _EXACT).float()
    # What rank i sends to rank j is base + i * size + j.
    sent = torch.cat([base + rank * size + j for j in range(size)])
    received = torch.empty_like(sent)
    seconds = _timed(lambda: dist.all_to_all_single(received, sent), received, lambda: received.zero_())
    return bool(torch.equal(received, torch.cat([base + i * size + rank for i in range(size)]))), seconds


def _timed(call: Callable[[], None], values: Any, reset: Callable[[], Any]) -> float:
    import torch.distributed as dist

    device_ids = barrier_devices(values.device)

    def begin() -> None:
        reset()
        values[0].item()  # waits for the GPU
        dist.barrier(device_ids=device_ids)

    return _seconds(call, values.device, begin)


def _link(answers: list[Any], number: int, ranks: tuple[int, ...], label: str) -> Link:
    """Return the worst of what the ranks of a group measured. ``answers``: of all ranks, None where one is missing."""
    nodes = {answers[rank][0] for rank in ranks if answers[rank]}
    kind = label or ("between nodes" if len(nodes) > 1 else "in a node")
    where = f" ({', '.join(sorted(nodes))})" if kind == "between nodes" else ""
    if missing := [str(rank) for rank in ranks if not answers[rank]]:
        ends = [[0.0, 0.0, f"no answer of rank {', '.join(missing[:8])}"]]
    else:
        ends = [answers[rank][1][number] for rank in ranks]
    speeds = {name: min(end[i] for end in ends) for i, name in enumerate(LINK_KINDS)}
    label = label or f"ranks {'-'.join(map(str, ranks))}{where}"
    return {"ranks": label, "kind": kind, "problem": next((end[-1] for end in ends if end[-1]), "")} | speeds


def bad_links(links: list[Link], compare_speed: bool) -> list[str]:
    """What is wrong: links that failed or answered wrongly, and those far slower than the others of their kind."""
    bad = [f"{link['ranks']}: {link['problem']}" for link in links if link["problem"]]
    if not compare_speed:  # over loopback the processes compete for cores
        return bad
    for kind in {link["kind"] for link in links}:
        alike = [link for link in links if link["kind"] == kind and not link["problem"]]
        for name in LINK_KINDS if len(alike) > 2 else ():
            typical = statistics.median(link[name] for link in alike)
            bad += [
                f"{link['ranks']}: {name} {link[name]:.2f} GiB/s, the median {kind} is {typical:.2f}"
                for link in alike
                if link[name] < SLOW_LINK * typical
            ]
    return bad


def judge_links(links: list[Link], size: int, device: str) -> Outcome:
    backend = "NCCL" if device == "cuda" else "gloo"
    figures = {"GiB/s": {link["ranks"]: {name: link[name] for name in ("kind", *LINK_KINDS)} for link in links}}
    if bad := bad_links(links, device == "cuda"):
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        fix = (
            "NCCL_DEBUG=INFO shows the transport of each link; name the fabric with NCCL_IB_HCA and the interface with "
            "NCCL_SOCKET_IFNAME. Between GPUs of a node: nvidia-smi topo -m, nvidia-smi nvlink -s. A node whose links "
            "are all bad is to be left out: --exclude."
        )
        return failed(f"{backend}, {size} ranks: {'; '.join(bad[:4])}{more}", fix, **figures)
    slowest = min((link for link in links if link["kind"] != "all"), key=lambda link: link["all_reduce"])
    whole = links[-1]
    return passed(
        f"{backend}, {size} ranks: sums and exchanges are exact; slowest pair {slowest['ranks']} "
        f"{slowest['all_reduce']:.2f} GiB/s, all {whole['all_reduce']:.2f} (all-to-all {whole['all_to_all']:.2f})",
        **figures,
    )
