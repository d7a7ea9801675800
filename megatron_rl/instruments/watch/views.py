"""Data of runs for the terminal and the page, as JSON values, and recorded responses token by token."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from megatron_rl.config.monitor import level_rules
from megatron_rl.errors import InputError
from megatron_rl.instruments.changed import history_of
from megatron_rl.instruments.watch.run import WatchedRun, decimated, number, numbers
from megatron_rl.instruments.why import find, page
from megatron_rl.monitor.plots import PANELS, matching
from megatron_rl.monitor.run_directory import read_metrics
from megatron_rl.monitor.samples import printable
from megatron_rl.monitor.terminal import COLUMNS

WINDOW = 1000  # largest number of tokens in one answer
STRIP = 240  # points of a whole response
ORDERS = ("mismatch", "reward", "length", "batch")


@lru_cache(maxsize=4)
def _tokenizer(file: Path, _changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def tokenizer_of(run: WatchedRun) -> Any | None:
    """Return the tokenizer of the recipe's model.path; None if the folder or its tokenizer.json is absent."""
    folder = run.setting("model.path")
    if isinstance(folder, str):
        file = Path(folder) / "tokenizer.json"
        with contextlib.suppress(Exception):  # the library raises a plain Exception for an unreadable file
            return _tokenizer(file, file.stat().st_mtime_ns)
    return None


def texts(tokenizer: Any | None, tokens: np.ndarray) -> list[str]:
    """Return the text of each token, or its number without a tokenizer. A split character goes to its last token."""
    ids = tokens.tolist()
    if tokenizer is None:
        return [f" {token}" for token in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [printable(stream.step(tokenizer, token) or "") for token in ids]


def responses(run: WatchedRun, step: int, order: str, start: int, number: int) -> dict[str, Any]:
    """Return figures of ``number`` responses of a batch, from place ``start`` of the order."""
    if order not in ORDERS:
        raise InputError(f"order {order!r}: one of {', '.join(ORDERS)}")
    batch = run.batch(step)
    abouts = batch.described["sequences"]
    largest = batch.largest_log_rho
    if order == "mismatch" and largest is None:
        order = "batch"
    keys = {
        "mismatch": largest,
        "reward": np.array([about["reward"] for about in abouts]),
        "length": batch.lengths,
        "batch": -np.arange(len(abouts)),
    }
    chosen = np.argsort(-keys[order], kind="stable")[max(start, 0) :][:number].tolist()
    return {
        "step": step,
        "order": order,
        "total": len(abouts),
        "responses": [
            {
                "sequence": i,
                "id": printable(str(abouts[i]["id"])),
                "reward": _plain(abouts[i]["reward"]),
                "advantage": _plain(abouts[i]["advantage"]),
                "length": int(batch.lengths[i]),
                "largest_log_rho": None if largest is None else _plain(largest[i]),
            }
            for i in chosen
        ],
    }


def response(run: WatchedRun, step: int, sequence: int, start: int, number: int = WINDOW) -> dict[str, Any]:
    """Return tokens [start, start + number) of a response: text, rho = po/mu, both probabilities; and rho over all."""
    stored = run.batch(step).response(sequence)
    about = run.batch(step).described["sequences"][sequence]
    tokenizer = tokenizer_of(run)
    start = min(max(start, 0), max(len(stored.tokens) - 1, 0))
    window = slice(start, start + min(max(number, 1), WINDOW))
    log_rho = stored.log_rho
    with np.errstate(over="ignore", invalid="ignore"):
        answer = {
            "mu": numbers(np.exp(stored.inference_logprobs[window].astype(np.float64))),
            "log_rho": None if log_rho is None else numbers(log_rho[window]),
            "po": None if log_rho is None else numbers(np.exp(stored.learner_logprobs[window].astype(np.float64))),
        }
    return {
        "step": step,
        "sequence": sequence,
        "id": printable(str(about["id"])),
        "reward": _plain(about["reward"]),
        "advantage": _plain(about["advantage"]),
        "prompt": "".join(texts(tokenizer, stored.prompt[-WINDOW:])),
        "prompt_left_out": max(len(stored.prompt) - WINDOW, 0),
        "length": len(stored.tokens),
        "start": start,
        "has_tokenizer": tokenizer is not None,
        "ids": stored.tokens[window].tolist(),
        "texts": texts(tokenizer, stored.tokens[window]),
        "trained": stored.loss_mask[window].astype(int).tolist(),
        "version": stored.policy_versions[window].tolist(),
        "strip": None if log_rho is None else _strip(log_rho),
        **answer,
    }


def _strip(log_rho: np.ndarray) -> list[float | None]:
    """Return the log rho farthest from 0 in each of up to `STRIP` equal parts."""
    if not len(log_rho):
        return []
    starts = np.linspace(0, len(log_rho), min(STRIP, len(log_rho)), endpoint=False).astype(np.int64)
    low, high = np.minimum.reduceat(log_rho, starts), np.maximum.reduceat(log_rho, starts)
    return numbers(np.where(-low > high, low, high))


def _plain(value: Any) -> float | None:
    return numbers(np.array([value], dtype=np.float64))[0]


MAX_POINTS, ROUTE_COLUMNS = 2000, 200
EVENTS_SHOWN, BATCHES_SHOWN = 200, 300
BAND, LAYER = "mismatch/rho_count/", "router/agree_frac/layer_"
BAND_FIGURES = ("count", "mean", "std", "q05", "q50", "q95")
# Explanations for data that only some recipes record.
HINTS = {
    "bands": "This run compares no probabilities: metrics.jsonl has no mismatch/rho_count/<band>.",
    "band_detail": "objective.mismatch_detail: true adds the spread and the quantiles of each band.",
    "routes": "This run compares no routes. routing.telemetry: true does, as does routing.replay: r3.",
    "samples": "samples.jsonl has nothing yet. monitor.samples.every says how often a step's samples are written.",
    "batches": "No batch is on disk. recorder.evidence keeps those of the newest steps.",
    "alarms": "The recipe has no alarms. monitor.alarms has rules such as "
    "{name: mismatch, metric: mismatch/rho_std, above: 0.1, then: [warn, record_batch]}.",
    "learner_logprobs": "The batch has no log-probs of the learner, so there is no rho to colour tokens by.",
    "tokenizer": "The tokenizer of model.path is not on this machine: tokens are shown as numbers.",
}


def state(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Return the progress of each run; small, as it is requested every few seconds."""
    return {"runs": [_run_state(run) for run in runs], "hints": HINTS}


def _run_state(run: WatchedRun) -> dict[str, Any]:
    with run.lock:
        columns, total = run.columns, run.setting("num_steps")
        status, seconds = run.status(), run.columns.seconds_a_step()
        done = 0 if columns.last_step is None else columns.last_step + 1
        total = total if isinstance(total, int) else None
        is_going = status == "running" and seconds is not None and total is not None
        events, batches = run.alarm_events(), run.batch_steps()
        return {
            "label": run.label,
            "folder": printable(str(run.directory.root)),
            "version": run.version,
            "status": status,
            "share_read": run.share_read,
            "broken_lines": columns.broken_lines,
            "step": columns.last_step,
            "done_steps": min(done, total) if total else done,
            "num_steps": total,
            "eta_s": seconds * max(total - done, 0) if is_going else None,
            "age_s": None if columns.last_time is None else max(time.time() - columns.last_time, 0.0),
            "summary": {title: number(columns.latest(metric)) for title, metric, _, _ in COLUMNS},
            "rules": [_rule(rule, run) for rule in _rules(run)],
            "events": [vars(event) for event in events[:EVENTS_SHOWN]],
            "num_events": len(events),
            "batches": batches[-BATCHES_SHOWN:],
            "num_batches": len(batches),
            "num_samples": run.num_samples,
        }


def _rules(run: WatchedRun) -> list[dict[str, Any]]:
    """The recipe's rules, and those on levels that none of them replaces."""
    own = [rule for rule in run.setting("monitor.alarms") or () if isinstance(rule, dict)]
    if run.setting("monitor.levels") is not True:
        return own
    taken = {rule.get("name") for rule in own}
    return own + [rule.model_dump() for rule in level_rules(run.recipe()) if rule.name not in taken]


def _rule(rule: dict[str, Any], run: WatchedRun) -> dict[str, str]:
    """An alarm's rule: its name, what it waits for in words, and since when it can see."""
    if rule.get("statistic") == "not_finite":
        condition = f"{rule.get('metric')} is not finite"
    else:
        above = rule.get("above") is not None
        bound = f"above {rule['above']}" if above else f"below {rule.get('below')}"
        of = "" if rule.get("statistic") == "value" else f"{rule.get('statistic')} of "
        condition = f"{of}{rule.get('metric')} {bound}"
    steps = rule.get("for_steps")
    condition += f" for {steps} steps" if steps and steps != 1 else ""
    condition += _sight(rule, run)
    then = rule.get("then")
    then = then if isinstance(then, list) else []
    return {
        "name": printable(str(rule.get("name"))),
        "text": printable(f"{condition}; then: {', '.join(map(str, then))}"),
    }


def _sight(rule: dict[str, Any], run: WatchedRun) -> str:
    """The window of a rule, and the step from which it is full; "" where the rule looks at one value."""
    window = rule.get("window")
    if rule.get("statistic", "value") in ("value", "not_finite") or not isinstance(window, int):
        return ""
    steps = run.columns.series(str(rule.get("metric")))[1]
    needed = window + (rule["statistic"] == "ratio")
    since = f"full since step {steps[needed - 1]}" if len(steps) >= needed else f"has {len(steps)} of {needed}"
    return f" (window of {window}, {since})"


def panels(runs: Sequence[WatchedRun], axis: str, points: int, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Return all panels with values, with a curve per metric and run; the metrics of ``extra`` first."""
    points = min(max(points, 2), MAX_POINTS)
    names = [set(run.columns.names) for run in runs]
    drawn_panels: list[dict[str, Any]] = [
        {"title": name, "is_log": False, "is_extra": True, "curves": _curves(runs, [name], axis, points)}
        for name in extra
    ]
    zero = []
    for panel in PANELS:
        available = matching(panel.metrics, set().union(*names))
        drawn = [name for name in available if any(_is_not_zero(run, name) for run in runs)]
        if available and not drawn:
            zero.append(panel.title)
        equal = _equal(runs, drawn)
        drawn = list(equal)
        if panel.limit is not None:
            drawn = _largest(runs, drawn, panel.limit if len(runs) == 1 else min(panel.limit, 2))
        if drawn:
            curves = _curves(runs, drawn, axis, points)
            equal_names = {name: equal[name] for name in drawn if equal[name]}
            drawn_panels.append(
                {
                    "title": panel.title,
                    "is_log": panel.is_log,
                    "is_extra": False,
                    "curves": curves,
                    "equal": equal_names,
                }
            )
    return {"axis": axis, "panels": drawn_panels, "zero": zero}


def metric_names(runs: Sequence[WatchedRun]) -> list[str]:
    """Return all metrics of the runs."""
    return sorted({name for run in runs for name in run.columns.names})


def _is_not_zero(run: WatchedRun, name: str) -> bool:
    return bool(np.any(run.columns.series(name)[2] != 0))


def _equal(runs: Sequence[WatchedRun], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the distinct metrics, each with those that are equal to it in every run."""
    by_first: dict[str, list[str]] = {}
    first: dict[tuple[bytes, ...], str] = {}
    for name in names:
        key = tuple(part.tobytes() for run in runs for part in run.columns.series(name)[1:])
        by_first.setdefault(first.setdefault(key, name), []).append(name)
    return {name: equal[1:] for name, equal in by_first.items()}


def _largest(runs: Sequence[WatchedRun], names: list[str], limit: int) -> list[str]:
    """Return the ``limit`` names with the largest mean over steps and runs."""

    def mean(name: str) -> float:
        values = np.concatenate([run.columns.series(name)[2] for run in runs])
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else 0.0

    return sorted(names, key=mean, reverse=True)[:limit]


def _curves(runs: Sequence[WatchedRun], names: Sequence[str], axis: str, points: int) -> list[dict[str, Any]]:
    curves = []
    for index, run in enumerate(runs):
        along = run.columns.along(axis)
        for name in names:
            rows, _, values = run.columns.series(name)
            if len(rows):
                curves.append({"run": index, "metric": name, **decimated(along[rows], values, points)})
    return curves


def bands(runs: Sequence[WatchedRun], step: int | None, points: int) -> dict[str, Any]:
    """Return rho by band of the token's probability: at ``step`` (or the last one before with data), and over steps."""
    points = min(max(points, 2), MAX_POINTS)
    labels = sorted(
        {name.removeprefix(BAND) for run in runs for name in run.columns.names if name.startswith(BAND)},
        key=lambda label: float(label.partition("-")[0]),
    )
    over_steps = [
        {
            "title": f"mean rho, tokens of probability {label.replace('-', ' to ')}",
            "is_log": False,
            "is_extra": False,
            "curves": _curves(runs, [f"mismatch/rho_mean/{label}"], "step", points),
        }
        for label in labels
    ]
    return {"labels": labels, "runs": [_bands_at(run, labels, step) for run in runs], "panels": over_steps}


def _bands_at(run: WatchedRun, labels: Sequence[str], step: int | None) -> dict[str, Any]:
    steps = np.concatenate([run.columns.series(BAND + label)[1] for label in labels] or [np.zeros(0, np.int64)])
    early = steps if step is None else steps[steps <= step]
    if not len(early):
        return {"step": None, "first": None, "last": None, "rows": []}
    at = int(early.max())
    rows = []
    for label in labels:
        values = {figure: run.columns.at(f"mismatch/rho_{figure}/{label}", at) for figure in BAND_FIGURES}
        rows.append({figure: number(value) for figure, value in values.items()})
    return {"step": at, "first": int(steps.min()), "last": int(steps.max()), "rows": rows}


def routes(run: WatchedRun, wanted_columns: int = ROUTE_COLUMNS) -> dict[str, Any]:
    """Return 1 - agreement by MoE layer [L] and step; with many steps, a column is the mean of neighbouring steps.

    ``values``: [L][C]; ``ends``: the last step of each of the C columns.
    """
    wanted_columns = min(max(wanted_columns, 1), MAX_POINTS)
    layers = sorted(int(name.removeprefix(LAYER)) for name in run.columns.names if name.startswith(LAYER))
    series = [run.columns.series(f"{LAYER}{layer}") for layer in layers]
    steps = np.unique(np.concatenate([one_series[1] for one_series in series] or [np.zeros(0, np.int64)]))
    values = np.full((len(layers), len(steps)), np.nan)
    for row, (_, its_steps, agreed) in zip(values, series, strict=True):
        row[np.searchsorted(steps, its_steps)] = 1.0 - agreed
    if len(steps) > wanted_columns:
        starts = np.linspace(0, len(steps), wanted_columns, endpoint=False).astype(np.int64)
        is_finite = np.isfinite(values)
        with np.errstate(invalid="ignore"):
            values = np.add.reduceat(np.where(is_finite, values, 0.0), starts, axis=1) / np.add.reduceat(
                is_finite.astype(np.float64), starts, axis=1
            )
        steps = steps[np.append(starts[1:], len(steps)) - 1]
    return {"label": run.label, "layers": layers, "ends": steps.tolist(), "values": [numbers(row) for row in values]}


def why(run: WatchedRun) -> dict[str, Any]:
    """Return the page of `run why`: what was seen, in order, and what may have caused it."""
    try:
        records = read_metrics(run.directory.root)
        history = history_of(run.directory, records)
        finding = find(run.label, records, run.recipe(), history) if records else None
    except (InputError, ValidationError) as error:  # no run yet, or one that cannot be read
        return {"healthy": None, "text": printable(str(error))}
    if finding is None:
        return {"healthy": None, "text": "No step is recorded yet."}
    return {"healthy": finding.is_healthy, "text": printable(page(finding, run.directory.root))}


def samples(run: WatchedRun, before: int | None, number_wanted: int) -> dict[str, Any]:
    """Return sampled responses, the newest first; ``next``: the ``before`` of the next call, None at the end."""
    samples = run.samples(before, min(max(number_wanted, 1), 50))
    shown = [
        {key: printable(value) if isinstance(value, str) else value for key, value in sample.items()}
        for sample in samples
    ]
    more = shown[-1]["line"] if shown and shown[-1]["line"] > 0 else None
    return {"samples": [_finite(sample) for sample in shown], "next": more}


def _finite(value: Any) -> Any:
    """Return ``value`` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
