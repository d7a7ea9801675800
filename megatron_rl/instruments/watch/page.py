"""The pages of `run watch --page`: HTML without scripts, which a browser loads again while a run goes on."""

from __future__ import annotations

import contextlib
import html
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.instruments.why.changed import history_of
from megatron_rl.instruments.why.onset import find, page
from megatron_rl.monitor.html_page import html_page, html_table
from megatron_rl.monitor.plots import (
    CURVES_STYLE,
    X_LABELS,
    Curves,
    Panel,
    View,
    curves_html,
    draw_disagreement,
    figure_svg,
    matching,
    panel_svg,
)
from megatron_rl.monitor.run_directory import read_metrics
from megatron_rl.monitor.samples import printable, read_samples, render
from megatron_rl.monitor.terminal import COLUMNS, format_duration
from megatron_rl.run.recorded_batches import batch_path, load_batch

RELOAD_S = 15
ALARMS, SAMPLES, BATCHES, RESPONSES = 20, 10, 20, 50  # how many are listed
WINDOW = 4000  # tokens of a response that are shown
FIGURES = ("count", "mean", "std", "q05", "q50", "q95")
MEAN, COUNT = "mismatch/rho_mean/", "mismatch/rho_count/"
STYLE = f"""{CURVES_STYLE}
.token {{ border-radius: 2px; }} .untrained {{ text-decoration: underline dotted; }}
"""
STATUSES = {"alarmed": "done, with alarms", "collapsed": "done, reward collapsed"}


def overview(runs: Sequence[WatchedRun], axis: str = "step") -> str:
    """Return the first page: state and alarms of each run, curves, mismatch by band, routes, sampled texts."""
    if axis not in X_LABELS:
        raise InputError(f"x={axis!r}: one of {', '.join(X_LABELS)}")
    axes = " ".join(f'<a href="?x={name}">{label}</a>' for name, label in X_LABELS.items())
    body = [_states(runs), *(_alarms(run) for run in runs), f"<p>Curves over: {axes}</p>", _figures(runs, axis)]
    body += [_texts(i, run) for i, run in enumerate(runs)]
    is_going = any(run.status() in ("running", "waiting") for run in runs)
    head = f'<meta http-equiv="refresh" content="{RELOAD_S}">' if is_going else ""
    return html_page("megatron-rl watch", "\n".join(body), STYLE, head)


def _escaped(text: Any) -> str:
    return html.escape(printable(str(text)))


def number(value: float | None) -> str:
    """Return four digits of a value; "" for none."""
    return "" if value is None else f"{value:.4g}"


def _states(runs: Sequence[WatchedRun]) -> str:
    rows = [["run", "", "step", "left", *(title for title, *_ in COLUMNS), ""]]
    for index, run in enumerate(runs):
        status, eta, total = run.status(), run.eta_s(), run.setting("num_steps")
        mark = ' class="bad"' if status in ("alarmed", "collapsed", "silent") else ""
        step = f"{'–' if run.last_step is None else run.last_step}{f' of {total}' if isinstance(total, int) else ''}"
        step += f" ({run.broken_lines} broken lines)" if run.broken_lines else ""
        cells = [f"<span{mark}>{STATUSES.get(status, status)}</span>", step]
        cells += ["" if eta is None else format_duration(eta)]
        cells += [number(run.latest(metric)) for _, metric, *_ in COLUMNS]
        rows.append([_escaped(run.label), *map(str, cells), f'<a href="why?run={index}">why</a>'])
    return html_table(rows)


def _alarms(run: WatchedRun) -> str:
    alarms = run.alarms()
    lines = [f"{run.label}, step {alarm.step}: {alarm.name} {alarm.text}" for alarm in alarms[:ALARMS]]
    lines += [f"{run.label}: {len(alarms) - ALARMS} earlier alarms"] if len(alarms) > ALARMS else []
    return "\n".join(f'<p class="bad">{_escaped(line)}</p>' for line in lines)


def _groups(runs: Sequence[WatchedRun]) -> list[Curves]:
    return [Curves(printable(run.label), [run.records]) for run in runs]


_drawn: dict[str, tuple[Any, str]] = {}


def _figures(runs: Sequence[WatchedRun], axis: str) -> str:
    """Return all that is drawn; it is drawn again where a run has a new record."""
    key = [(str(run.directory.root), len(run.records), run.last_step, run.latest("time")) for run in runs]
    if axis not in _drawn or _drawn[axis][0] != key:
        parts = [curves_html(_groups(runs), View(axis))]
        parts += [part for run in runs for part in (_mismatch(run, axis), _routes(run))]
        _drawn[axis] = (key, "\n".join(parts))
    return _drawn[axis][1]


def _mismatch(run: WatchedRun, axis: str) -> str:
    """Return the mean rho by band of a token's probability over steps, and all figures of the last step with bands."""
    last = next((record for record in reversed(run.records) if any(name.startswith(COUNT) for name in record)), None)
    if last is None:
        return "<p>This run compares no probabilities: metrics.jsonl has no mismatch/rho_count/&lt;band&gt;.</p>"
    bands = [name.removeprefix(COUNT) for name in matching((f"{COUNT}.+",), set(last))]
    rows = [[f"po at step {last['step']:g}", *(f"rho {figure}" for figure in FIGURES)]]
    rows += [[_escaped(band), *(number(last.get(f"mismatch/rho_{name}/{band}")) for name in FIGURES)] for band in bands]
    panel = Panel(f"{printable(run.label)}: mean rho by po", (f"{MEAN}.+",))
    return (
        f'<div class="panels"><figure>{panel_svg(panel, _groups([run]), View(axis))}</figure></div>{html_table(rows)}'
    )


def _routes(run: WatchedRun) -> str:
    figure = draw_disagreement(run.records, printable(run.label))
    if figure is None:
        return "<p>This run compares no routes. routing.telemetry: true does, as does routing.replay: r3.</p>"
    return f"<figure>{figure_svg(figure, f'routes of {run.label}')}</figure>"


def _texts(index: int, run: WatchedRun) -> str:
    """Return links to recorded batches, and the newest sampled texts."""
    links = [f'<a href="batch?run={index}&amp;step={step}">{step}</a>' for step in run.batch_steps()[-BATCHES:]]
    said = f"recorded batches, token by token: step {', '.join(links)}" if links else "no batch is on disk"
    try:
        samples = list(read_samples(run.directory.samples))[-SAMPLES:]
    except InputError as error:
        return f"<p>{_escaped(run.label)}: {said}. {_escaped(error)}</p>"
    shown = "\n".join(f"<pre>{html.escape(render(sample))}</pre>" for sample in reversed(samples))
    return f"<p>{_escaped(run.label)}: {said}</p>\n{shown}"


def why_page(run: WatchedRun) -> str:
    """Return the page of `run why`: what was seen, in order, and what may have caused it."""
    try:
        records = read_metrics(run.directory.root)
        finding = find(run.label, records, run.recipe(), history_of(run.directory, records)) if records else None
        text = "No step is recorded yet." if finding is None else page(finding, run.directory.root)
    except (InputError, ValidationError) as error:  # no run yet, or one that cannot be read
        text = str(error)
    return html_page(f"why: {printable(run.label)}", f"<pre>{_escaped(text)}</pre>", STYLE)


@lru_cache(maxsize=1)
def _batch(path: Path, _changed: int) -> Any:
    return load_batch(path, with_routes=False).batch


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


def batch_page(run: WatchedRun, step: int, chosen: int | None, index: int = 0) -> str:
    """Return the responses of a recorded batch, the largest |log rho| first, and one of them token by token."""
    path = batch_path(run.directory.batches, step)
    if not path.is_file():
        raise InputError(
            f"step {step}: no recorded batch; there are: {', '.join(map(str, run.batch_steps())) or 'none'}"
        )
    sequences = _batch(path, path.stat().st_mtime_ns).sequences
    gaps = [sequence.log_rho for sequence in sequences]
    largest = [
        0.0 if gap is None or not len(gap) else float(np.abs(np.nan_to_num(gap, nan=np.inf)).max()) for gap in gaps
    ]
    order = sorted(range(len(sequences)), key=lambda i: -largest[i])
    if chosen is not None and chosen >= len(sequences):
        raise InputError(f"step {step}: sequence {chosen}; it has {len(sequences)}")
    rows = [["response", "reward", "advantage", "tokens", "largest |log rho|"]]
    for i in order[:RESPONSES]:
        it = sequences[i]
        link = f'<a href="batch?run={index}&amp;step={step}&amp;sequence={i}">{_escaped(it.id)}</a>'
        rows.append([link, number(it.reward), number(it.advantage), str(it.length), number(largest[i])])
    response = "" if not order else _response(run, sequences[order[0] if chosen is None else chosen])
    return html_page(f"{printable(run.label)}, step {step}", f"{response}\n{html_table(rows)}", STYLE)


def _response(run: WatchedRun, sequence: Any) -> str:
    """Return the tokens of a response: blue where rho = po / mu is below 1, orange above, stronger with distance."""
    tokenizer, gap = tokenizer_of(run), sequence.log_rho
    prompt, response = np.asarray(sequence.prompt), sequence.tokens
    finite = np.abs(gap[np.isfinite(gap)]) if gap is not None else np.zeros(0)
    reach = max(1e-9, float(finite.max(initial=0.0)))
    spans, mask = [], sequence.loss_mask
    for i, text in enumerate(texts(tokenizer, response[:WINDOW])):
        told = f"token {i} ({response[i]}), mu {math.exp(sequence.inference_logprobs[i]):.4g}"
        style = ""
        if gap is not None:
            told += f", rho {math.exp(min(gap[i], 700)):.4g}"
            strength = min(1.0, abs(gap[i]) / reach) if math.isfinite(gap[i]) else 1.0
            style = f' style="background: rgb({"214 96 0" if gap[i] > 0 else "0 96 168"} / {0.75 * strength:.3f})"'
        trained = mask[i]
        told += f", weights of step {sequence.policy_versions[i]}"
        names = "token" if trained else "token untrained"
        spans.append(f'<span class="{names}" title="{told}"{style}>{html.escape(text)}</span>')
    left = f" … {len(response)} tokens" if len(response) > WINDOW else ""
    about = f"{printable(str(sequence.id))}: reward {number(sequence.reward)}, {len(response)} tokens. "
    about += (
        "The batch has no log-probs of the learner, so there is no rho to colour tokens by."
        if gap is None
        else f"rho {math.exp(-reach):.4g} (blue) to {math.exp(reach):.4g} (orange); dotted: not trained on."
    )
    about += "" if tokenizer else " The tokenizer of model.path is not on this machine: tokens are shown as numbers."
    asked = html.escape("".join(texts(tokenizer, prompt[-WINDOW:])))
    return f"<p>{html.escape(about)}</p>\n<pre>{asked}</pre>\n<pre>{''.join(spans)}{left}</pre>"
