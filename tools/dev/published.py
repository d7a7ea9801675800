"""Published steps, phases, decoding and memory beside what `plan` says of the same layout, batch and lengths.

    python -m tools.dev.published [--fit]

The data are `instruments/plan/published.json`, `decoding.tsv` and docs/gpu.md. --fit prints the constants of
`plan.hardware` as least squares give them, with the error of the fit, and how each run is predicted by constants that
were fitted without it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan import GPUS, hardware, make_workload
from megatron_rl.instruments.plan.generation import Decoding
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.timing import StepTime, step_time
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import shape_of

ROOT = Path(__file__).parents[2]
DATA = ROOT / "megatron_rl" / "instruments" / "plan"
BASE = ROOT / "recipes" / "router_replay" / "grpo-qwen3-30b-a3b-4n8g-tp4ep8-off.yaml"
STEP, PHASE = (0.75, 1.33), (0.6, 1.6)  # bounds of planned over published


@dataclass(frozen=True)
class Row:
    """One published figure in seconds, and the same by `plan`."""

    run: str
    what: str
    published: float
    planned: float
    low: float
    high: float
    note: str
    held_out: bool  # no constant was set by it

    @property
    def ratio(self) -> float:
        return self.planned / self.published

    @property
    def is_within(self) -> bool:
        low, high = STEP if self.what == "step" else PHASE
        return low <= self.ratio <= high


def runs() -> list[dict[str, Any]]:
    """Return the published runs. One that is like another names it, and says what differs."""
    found: dict[str, dict[str, Any]] = {}
    for run in json.loads((DATA / "published.json").read_text(encoding="utf-8")):
        like = found[run["like"]] if "like" in run else {"set": {}}
        found[run["id"]] = {**like, **run, "set": like["set"] | run.get("set", {})}
    return list(found.values())


def workload(run: Mapping[str, Any]) -> Workload:
    settings = [f"{key}={value}" for key, value in run["set"].items()]
    settings += ["routing.telemetry=false", f"model.path=models/{run['model']}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = load_recipe(BASE, settings)
    sizes = (run["nodes"], run["gpus_per_node"], run["mean_response"], run["mean_prompt"])
    work = make_workload(recipe, shape_of(recipe.model.path)[0], GPUS[run["gpu"]], *sizes)
    busiest = 1.0 if run.get("balanced") else work.imbalance
    return replace(work, served=run.get("served", False), imbalance=busiest)


def planned(run: Mapping[str, Any]) -> StepTime:
    """Return the time of a run's step, with as many passes for log-probs as it makes."""
    work = workload(run)
    engine = memory_plan(work).engine
    time = step_time(work, engine)
    tokens = run.get("pass_tokens", work.recipe.learner.max_tokens_per_microbatch)
    one = step_time(
        work.with_keys("learner", max_tokens_per_microbatch=tokens).with_keys("batch", minibatches=2), engine
    ).old_logprobs
    return replace(time, old_logprobs=run.get("passes", 1) * one)


def rows() -> Iterator[Row]:
    for run in runs():
        time = planned(run)
        for what, seconds in run["measured"].items():
            names = what.split("+")
            passes = run.get("passes", 1) if what == "old_logprobs" else 1
            value = time.total if what == "step" else sum(time.phases[name] for name in names) / passes
            low, high = time.range if what == "step" else (value / error(names), value * error(names))
            yield Row(run["id"], what, seconds, value, low, high, run["note"], run.get("held_out", False))


def error(names: list[str]) -> float:
    return max(hardware.ERRORS[name] for name in names)


# Decoding: the law of `generation.Decoding` against servers in steady state.

SERVER_PROMPT = 200  # tokens; not published
CLASS = {"H100": "h100-80", "B200": "b200-180"}


@dataclass(frozen=True)
class Point:
    gpu: str
    rounded: bool
    measured: float
    read: float  # seconds of reading weights and cache
    layers: float
    exchanges: float  # layers, if several GPUs exchange
    sequences: float
    out_of_line: bool


def points() -> list[Point]:
    with (DATA / "decoding.tsv").open(encoding="utf-8") as file:
        table = list(csv.DictReader((line for line in file if line[0] != "#"), delimiter="\t"))
    return [_point(row) for row in table]


def _point(row: Mapping[str, str]) -> Point:
    name = row["model"].replace("-FP8", "").replace("-Thinking-2507", "").replace("-Instruct-2507", "")
    number, sequences, is_fp8 = int(row["gpus"]), float(row["mean_seqs"]), row["dtype"] == "fp8"
    run = {
        "set": {
            "rollout.tensor_parallel": number,
            "rollout.quantization": "{weights: fp8, block: [1, null]}" if is_fp8 else "null",
            "rollout.max_response_length": 16384,
            "learner.parallel": "{tensor: 1, expert: 1}",
            "rollout.max_num_seqs": 4096,
        },
        "model": name.replace("V3.1", "V3"),
        "gpu": CLASS[row["gpu"]],
        "nodes": 1,
        "gpus_per_node": number,
        "mean_response": float(row["mean_output"]),
        "mean_prompt": SERVER_PROMPT,
    }
    work = workload(run)
    law, layers = Decoding.of(work, memory_plan(work, 0.9).engine), work.architecture.num_layers
    context = sequences * (SERVER_PROMPT + float(row["mean_output"]) / 2)
    read = law.weights - law.experts * law.idle**sequences + law.token_bytes * context
    # Long contexts on one B200 take 35 ms at 8 sequences; half of 4096 sequences wait.
    odd = (row["gpu"] == "B200" and number == 1 and row["task"] == "gpqa") or sequences > 3000
    return Point(
        gpu=work.gpu.family,
        rounded=is_fp8,
        measured=float(row["itl_ms"]) / 1e3,
        read=read / law.bandwidth,
        layers=layers,
        exchanges=layers * (number > 1),
        sequences=sequences,
        out_of_line=odd,
    )


def by_law(point: Point) -> float:
    gpu = GPUS["h100-80" if point.gpu == "hopper" else "b200-180"]
    layer = gpu.fitted(hardware.DECODE_LAYER_S) + hardware.ROUNDED_LAYER_S * point.rounded
    exchanges = gpu.fitted(hardware.DECODE_EXCHANGE_S) * point.exchanges
    return point.layers * layer + exchanges + point.read + hardware.SERVED_S * point.sequences


def fitted_law(chosen: list[Point]) -> np.ndarray:
    """Return seconds of a layer, of its exchange, of rounded weights and of a sequence by least squares of ratios."""
    features = np.array([[p.layers, p.exchanges, p.layers * p.rounded, p.sequences] for p in chosen])
    measured, read = np.array([p.measured for p in chosen]), np.array([p.read for p in chosen])
    return np.linalg.lstsq(features / measured[:, None], 1 - read / measured, rcond=None)[0]


def spread(ratios: list[float]) -> float:
    """Return the root mean square of logarithms of ratios."""
    return math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))


def decoding_lines() -> list[str]:
    lines = ["| decoding, vLLM servers | points | within 25% | error | fitted µs: layer, exchange, fp8, sequence |"]
    lines.append("|---|---|---|---|---|")
    everything = points()
    for family in ("hopper", "blackwell"):
        for rounded in (False, True):
            chosen = [p for p in everything if (p.gpu, p.rounded) == (family, rounded) and not p.out_of_line]
            ratios = [by_law(p) / p.measured for p in chosen]
            within = sum(0.8 <= ratio <= 1.25 for ratio in ratios)
            fit = fitted_law([p for p in everything if p.gpu == family and not p.out_of_line])
            told = ", ".join(f"{1e6 * value:.0f}" for value in fit)
            kind = "fp8" if rounded else "bf16"
            lines.append(f"| {family}, {kind} | {len(chosen)} | {within} | {spread(ratios):.0%} | {told} |")
    return lines


# Constants of the learner, fitted to runs of which its time is most.


@contextmanager
def constants(share: float, host: float, decode: float) -> Iterator[None]:
    """Inside, the learner's share of the peak, the host's seconds of a layer and the seconds of a decoding step are
    these times what `plan` has."""
    with (
        mock.patch.object(hardware, "LEARNER_SHARE", {k: v * share for k, v in hardware.LEARNER_SHARE.items()}),
        mock.patch.object(hardware, "LAYER_HOST_S", {k: v * host for k, v in hardware.LAYER_HOST_S.items()}),
        mock.patch.object(hardware, "SERVED_S", hardware.SERVED_S * decode),
        mock.patch.object(hardware, "SAMPLED_S", hardware.SAMPLED_S * decode),
        mock.patch.object(hardware, "DECODE_LAYER_S", {k: v * decode for k, v in hardware.DECODE_LAYER_S.items()}),
    ):
        yield


FACTORS = (0.8, 1.0, 1.25)


def left_out() -> list[tuple[str, float]]:
    """Return, for each run with a step, its ratio by constants that the other runs' steps and phases fit best."""
    tables = {}
    for share in FACTORS:
        for host in FACTORS:
            for decode in FACTORS:
                with constants(share, host, decode):
                    tables[share, host, decode] = list(rows())
    found = []
    steps = [row for row in next(iter(tables.values())) if row.what == "step" and not row.held_out]
    for run in dict.fromkeys(row.run for row in steps):
        best = min(tables.values(), key=lambda table: _misfit(table, run))
        found += [(run, row.ratio) for row in best if row.run == run and row.what == "step"]
    return found


def _misfit(table: list[Row], without: str) -> float:
    """Return the sum of errors; each is bounded, so that one run that is out of line does not decide."""
    return sum(min(abs(math.log(row.ratio)), 0.5) for row in table if row.run != without and not row.held_out)


# Memory of an H200, in GiB: docs/gpu.md, "Memory against `plan`".

H200 = (("full", 16384, 62.33, 66.9), ("selective", 16384, 65.34, 68.8), ("none", 4096, 57.34, 59.3))


def memory_lines() -> list[str]:
    """Return rows of what the caching allocator held, and the plan's total without the process."""
    from megatron_rl.instruments.plan.learner import learner_memory

    lines = ["| H200: recompute, tokens | peak, GiB | planned | held by the allocator | planned, with its margin |"]
    lines.append("|---|---|---|---|---|")
    for recompute, tokens, peak, held in H200:
        run = {**runs()[0], "gpu": "h200-141", "nodes": 1, "gpus_per_node": 1}
        run["set"] = {
            "learner.parallel": "{tensor: 1, expert: 1}",
            "learner.recompute": recompute,
            "rollout.tensor_parallel": 1,
        }
        run["set"]["learner.max_tokens_per_microbatch"] = tokens
        work = workload(run)
        a = replace(work.architecture, num_layers=4, moe_layers=work.architecture.moe_layers[:4])
        (stage,) = learner_memory(a, work.recipe.learner, 1, tokens)
        total = (stage.static + stage.dynamic) / hardware.GIB
        least, _, most = (total * (1 + share) for share in hardware.ALLOCATOR)
        lines.append(f"| {recompute}, {tokens} | {peak} | {total:.2f} | {held} | {least:.1f} to {most:.1f} |")
    return lines


def lines(whole: bool = False) -> list[str]:
    """Return the tables of docs/planning.md: of phases and held-out steps those outside their bounds, unless
    ``whole``."""
    table = list(rows())
    out = ["| run | phase | published, s | planned, s | range | ratio | |", "|---|---|---|---|---|---|---|"]
    for row in sorted(table, key=lambda row: row.what != "step"):
        if (row.what != "step" or row.held_out) and row.is_within and not whole:
            continue
        note = row.note if row.is_within else f"outside: {row.note}"
        out.append(
            f"| {row.run} | {row.what} | {row.published:g} | {row.planned:.3g} | {row.low:.3g} to {row.high:.3g} | "
            f"{row.ratio:.2f} | {note} |"
        )
    for kind, chosen in (
        ("steps", [r for r in table if r.what == "step" and not r.held_out]),
        ("held-out steps", [r for r in table if r.held_out]),
        ("phases", [r for r in table if r.what != "step"]),
    ):
        within = sum(row.is_within for row in chosen)
        inside = sum(row.low <= row.published <= row.high for row in chosen)
        error = spread([row.ratio for row in chosen])
        out.append(f"\n{within} of {len(chosen)} {kind} within the bounds, {inside} in their range; error {error:.0%}.")
    return [*out, "", *decoding_lines(), "", *memory_lines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="leave each run out of the fit that predicts it")
    options = parser.parse_args()
    print("\n".join(lines(whole=True)))
    if options.fit:
        found = left_out()
        within = sum(STEP[0] <= ratio <= STEP[1] for _, ratio in found)
        print(f"\nleft out of the fit: {within} of {len(found)} steps within the bounds")
        print("\n".join(f"  {run:<28} {ratio:.2f}" for run, ratio in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
