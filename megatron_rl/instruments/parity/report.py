"""A comparison as text, as a certificate (JSON), and as a picture (error by depth)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_rl.instruments.parity.compare import SHOWN, Comparison, OperatorError
from megatron_rl.instruments.parity.definition import Checkpoint
from megatron_rl.instruments.parity.record import place
from megatron_rl.instruments.parity.witnesses import Setup
from megatron_rl.monitor.run_directory import hardware, package_versions
from megatron_rl.process.ranks import world_size

VERSION = 1


def as_text(setup: Setup, result: Comparison) -> str:
    lengths = ", ".join(str(len(tokens)) for tokens in setup.sequences)
    parallel = {k: v for k, v in setup.learner.parallel.model_dump().items() if type(v) is int and v > 1}
    layout = ", ".join(f"{name} {size}" for name, size in parallel.items()) or "one rank"
    lines = [
        f"{setup.model} ({Checkpoint(setup.model).num_layers} layers): learner {setup.learner.dtype} ({layout}), vLLM "
        f"{setup.rollout.dtype}; sequences of {lengths} tokens",
        f"{'witness':18} {'operators':>9} {'beyond':>6} {'worst':>8}  {'log-prob':>8}  worst operator",
    ]
    for name in result.witnesses:
        errors = [e for e in result.errors if e.witness == name]
        worst = max(errors, key=lambda e: e.ratio)
        gap = result.logprob_differences.get(name, math.nan)
        beyond = sum(not e.passes for e in errors)
        lines.append(f"{name:18} {len(errors):9} {beyond:6} {worst.ratio:8.2g}  {gap:8.1e}  {worst.tap}")
    lines.append("worst: own error over its bound; log-prob: largest difference to float64, in nats")
    if result.generation is not None:
        number, different = result.generation
        what = f"{len(different)} differ, first {different[0]}" if different else "all equal bit for bit"
        lines.append(f"exact mode: {number} taps of its pass and of its generation: {what}")
    lines += [f"  {error.sentence()}" for error in result.failures[:SHOWN]]
    if len(result.failures) > SHOWN:
        lines.append(f"  … and {len(result.failures) - SHOWN} more")
    lines.append(result.verdict())
    return "\n".join(lines)


def model_hash(path: Path) -> str:
    """SHA-256 of config.json and of all safetensors files, by name."""
    digest = hashlib.sha256()
    for file in sorted([path / "config.json", *path.glob("*.safetensors*")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def certificate(setup: Setup, result: Comparison) -> dict[str, Any]:
    """What was compared, on what, and every operator's error and bound. JSON-able."""
    exact = result.generation
    return {
        "version": VERSION,
        "verdict": "pass" if result.passes else "fail",
        "sentence": result.verdict(),
        "first": [_entry(error) for error in result.first],
        "model": {
            "path": setup.model.name,
            "layers": Checkpoint(setup.model).num_layers,
            "sha256": model_hash(setup.model),
        },
        "dtypes": {"learner": setup.learner.dtype, "rollout": setup.rollout.dtype},
        "layout": setup.learner.parallel.model_dump() | {"ranks": world_size()},
        "precision": setup.precision.model_dump(),
        "tokens": [list(tokens) for tokens in setup.sequences],
        "versions": package_versions(),
        "hardware": hardware(),
        "logprob_differences": result.logprob_differences,
        "exact": None if exact is None else {"taps": exact[0], "different": exact[1]},
        "operators": [_entry(error) for error in result.errors],
    }


def _entry(error: OperatorError) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(error).items()} | {"pass": error.passes}


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write(folder: Path, setup: Setup, result: Comparison) -> None:
    """Write parity.json, parity.txt and parity.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parity.json").write_text(json.dumps(certificate(setup, result), indent=1) + "\n")
    (folder / "parity.txt").write_text(as_text(setup, result) + "\n")
    draw(result).savefig(folder / "parity.png", dpi=110)


def draw(result: Comparison) -> Figure:
    """Own error, its bound and inherited error of each operator, in the order of the pass: a panel per witness.

    Each is the largest over the operator's elements.
    """
    names = result.witnesses
    figure = Figure(figsize=(11, 1.0 + 1.9 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    taps = sorted({e.tap for e in result.errors}, key=place)
    at = {tap: i for i, tap in enumerate(taps)}
    smallest = min((e.largest for e in result.errors if e.largest > 0), default=1e-9)
    floor = 10.0 ** math.floor(math.log10(smallest))
    first = result.first[0].tap if result.failures else None
    for panel, name in zip(panels, names, strict=True):
        errors = sorted((e for e in result.errors if e.witness == name), key=lambda e: place(e.tap))
        x = [at[e.tap] for e in errors]

        def shown(values: list[float]) -> list[float]:
            return [max(v, floor) if math.isfinite(v) else math.nan for v in values]

        inside, beyond = ([e for e in errors if e.passes is state] for state in (True, False))
        for values, colour, label in (
            ([e.inherited for e in errors], "0.65", "inherited error"),
            ([e.largest_bound for e in errors], "tab:blue", "bound of the own error"),
        ):
            panel.plot(x, shown(values), color=colour, linewidth=1, label=label)
        for some, mark, colour, label in (
            (inside, ".", "tab:green", "own error"),
            (beyond, "x", "tab:red", "own error beyond its bound"),
        ):
            panel.plot([at[e.tap] for e in some], shown([e.largest for e in some]), mark, color=colour, label=label)
        for error in beyond:
            if error.tap == first:
                panel.annotate(
                    error.tap,
                    (at[error.tap], error.largest),
                    xytext=(-8, -3),
                    textcoords="offset points",
                    ha="right",
                    color="tab:red",
                    fontsize=9,
                )
        panel.set(yscale="log", title=name)
        panel.title.set_fontsize(9)
        panel.grid(axis="y", linewidth=0.3)
    _name_layers(panels[-1], taps, at)
    for panel in panels[:-1]:
        panel.tick_params(axis="x", length=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    figure.supylabel("largest absolute error", fontsize=9)
    return figure


def _name_layers(panel: Any, taps: list[str], at: dict[str, int]) -> None:
    """Ticks where layers begin."""
    starts: dict[str, int] = {}
    for tap in taps:
        layer, _, name = tap.rpartition(".")
        starts.setdefault(f"layer {layer}" if layer else name, at[tap])
    starts = {name: i for name, i in starts.items() if name not in ("embedding", "logits", "logprob")}
    panel.set_xticks(list(starts.values()), list(starts), fontsize=8, rotation=30, ha="right")
