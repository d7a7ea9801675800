"""Finds the logs below a path and reads them: TensorBoard, W&B offline, MLflow, JSON lines, JSON, CSV.

Each becomes a `Log` of points (name, step, value) under the names that the project gave them.
"""

from __future__ import annotations

import csv
import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import InputError, shown
from megatron_rl.instruments.foreign.wire import Points, number_of, read_events, read_wandb

# The step of a row, by the first of these that it has: slime and miles count rollouts, updates and evaluations apart.
STEP_KEYS = (
    "rollout/step",
    "train/step",
    "eval/step",
    "train/global_step",
    "training/global_step",
    "global_step",
    "step",
    "Step",
    "_step",
)
DEPTH = 5  # folders below the one that was given: mlruns/EXPERIMENT/RUN/metrics, prime-rl's runs
EXPECTED = (
    "a run directory of megatron-rl, or a log of verl, slime, miles, NeMo-RL, prime-rl or TRL: events.out.tfevents.*, "
    "run-*.wandb, a run's folder in mlruns, mlflow.db, trainer_state.json, *.jsonl or *.csv"
)
_LARGEST = 1.7976931348623157e308  # MLflow's databases have it for infinity


@dataclass(frozen=True)
class Log:
    """The points of one log. ``group``: logs of one group are stretches of one run, the newest last."""

    kind: str
    path: Path
    points: Points
    group: str = ""


def find_logs(path: Path) -> list[Log]:
    """The logs at ``path``: a file, a folder with logs of one kind below it, or DATABASE/RUN for MLflow.

    Of several kinds in a folder the first is taken that keeps all digits: W&B, MLflow, JSON, CSV, then TensorBoard.
    """
    if path.is_file():
        return _read_file(path)
    if path.parent.is_file() and _is_database(path.parent):
        return [_read_database(path.parent, path.name)]
    if not path.is_dir():
        raise InputError(f"{path}: no such file; expected {EXPECTED}")
    files = sorted(_below(path, DEPTH))
    if ours := [str(file.parent) for file in files if file.name == "recipe.resolved.yaml"]:
        raise InputError(f"{path}: holds run directories of megatron-rl; give one of {', '.join(ours[:10])}")
    if found := [file for file in files if file.suffix == ".wandb"]:
        return [_read_wandb(file) for file in found]
    if found := sorted({file.parents[_depth_in_run(file)] for file in files if _depth_in_run(file)}):
        return [_read_store(folder) for folder in found]
    if found := [file for file in files if _is_database(file)]:
        return [log for file in found for log in _read_file(file)]
    if found := [file for file in files if file.name == "trainer_state.json"]:
        newest = max(found, key=lambda file: (file.stat().st_mtime, file))  # each checkpoint has the whole history
        return _read_file(newest)
    if found := [file for file in files if file.suffix in {".jsonl", ".csv"} and _has_metrics(file, path)]:
        return [log for file in found for log in _read_file(file)]
    folders = sorted({file.parent for file in files if ".tfevents." in file.name})
    if folders:
        return [_read_events(folder, [f for f in files if f.parent == folder and _is_events(f)]) for folder in folders]
    raise InputError(f"{path}: no log found; expected {EXPECTED}")


def _below(folder: Path, depth: int) -> Iterable[Path]:
    for entry in folder.iterdir():
        if entry.is_file():
            yield entry
        elif depth and entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from _below(entry, depth - 1)


def _is_events(file: Path) -> bool:
    return ".tfevents." in file.name


def _is_database(file: Path) -> bool:
    return file.suffix in {".db", ".sqlite", ".sqlite3"}


def _depth_in_run(file: Path) -> int:
    """How many folders above ``file`` a run of an MLflow folder is; 0 if ``file`` is no metric of one."""
    for depth, folder in enumerate(file.parents):
        if folder.name == "metrics":
            return depth + 1 if (folder.parent / "meta.yaml").is_file() else 0
    return 0


def _has_metrics(file: Path, folder: Path) -> bool:
    """Whether ``file`` holds metrics: by name, or in ``folder`` itself, by its first line. Others hold rollouts."""
    if file.name in {"metrics.jsonl", "metrics.csv"}:
        return True
    if file.parent != folder:
        return False
    with file.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
    if file.suffix == ".csv":
        return any(cell.strip().strip('"') in STEP_KEYS for cell in first.split(","))
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and any(key in row for key in STEP_KEYS)


def _read_file(file: Path) -> list[Log]:
    if _is_events(file):
        return [_read_events(file, [file])]
    if file.suffix == ".wandb":
        return [_read_wandb(file)]
    if _is_database(file):
        return [_read_database(file)]
    try:
        if file.suffix == ".csv":
            return [Log("CSV", file, _read_csv(file))]
        if file.suffix == ".json":
            return [Log("JSON", file, _points(_history_of(file), file))]
        if file.suffix == ".jsonl":
            return [Log("JSON lines", file, _points(_json_lines(file), file))]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from error
    raise InputError(f"{file}: not a log that is known; expected {EXPECTED}")


def _read_events(path: Path, files: list[Path]) -> Log:
    try:
        return Log("TensorBoard", path, read_events(files))
    except ImportError as error:
        raise InputError(f"{path}: event files are read with TensorBoard: pip install 'tensorboard>=2.20'") from error


def _read_wandb(file: Path) -> Log:
    run = file.stem.removeprefix("run-")
    return Log("W&B", file, _points(read_wandb(file), file), group=run)


def _read_store(folder: Path) -> Log:
    """A run of an MLflow folder: `metrics/NAME` has lines "time value step", NAME may have folders."""
    points: Points = []
    for file in sorted((folder / "metrics").rglob("*")):
        if file.is_file():
            name = str(file.relative_to(folder / "metrics"))
            for line in file.read_text(encoding="utf-8").splitlines():
                cells = line.split()
                if len(cells) < 3:
                    raise InputError(f"{file}: {shown(line, 60)} is no line of MLflow; expected time, value and step")
                points.append((name, int(cells[2]), float(cells[1])))
    return Log("MLflow", folder, points)


def _read_database(file: Path, run: str | None = None) -> Log:
    """A run of an MLflow database: that with the name or id ``run``, or the only one."""
    try:
        database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        try:
            runs = database.execute("SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active'").fetchall()
            chosen = [uuid for uuid, name in runs if run is None or run in (uuid, name)]
            if len(chosen) != 1:
                names = ", ".join(f"{file}/{name or uuid}" for uuid, name in runs[:20])
                raise InputError(f"{file}: {len(chosen)} runs{f' named {run}' if run else ''}; give one: {names}")
            rows = database.execute(
                "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY step, timestamp", chosen
            ).fetchall()
        finally:
            database.close()
        points = [(str(key), int(step), _from_database(value, nan)) for key, step, value, nan in rows]
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise InputError(f"{file}: not a database of MLflow ({error})") from error
    return Log("MLflow", file, points)


def _from_database(value: float, is_nan: int) -> float:
    if is_nan:
        return math.nan
    return math.copysign(math.inf, value) if abs(value) >= _LARGEST else float(value)


def _json_lines(file: Path) -> list[Mapping[str, object]]:
    rows, lines = [], file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # of a run that was killed while it wrote
                break
            raise InputError(f"{file}, line {number}: not valid JSON ({error}); delete or repair the line") from error
        if not isinstance(row, dict):
            raise InputError(f"{file}, line {number}: {shown(line, 60)} is no object; expected a step's metrics")
        data = row.pop("data", None)  # verl's file: {"step": 1, "data": {…}}
        rows.append({**row, **data} if isinstance(data, dict) else row)
    return rows


def _history_of(file: Path) -> list[Mapping[str, object]]:
    """`log_history` of a trainer_state.json."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON ({error})") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise InputError(f"{file}: no log_history; expected the trainer_state.json of a checkpoint")
    return history


def _points(rows: Iterable[Mapping[str, object]], file: Path) -> Points:
    """The numbers of ``rows``; the step is not one of them."""
    points: Points = []
    for count, row in enumerate(rows, start=1):
        key = next((key for key in STEP_KEYS if key in row), None)
        step = number_of(row[key]) if key else None
        if step is None or not step.is_integer():
            keys = ", ".join(STEP_KEYS)
            raise InputError(f"{file}, row {count}: no step; expected a whole number under one of {keys}")
        for name, value in row.items():
            if name not in STEP_KEYS and not name.startswith("_") and (number := number_of(value)) is not None:
                points.append((name, int(step), number))
    return points


def _read_csv(file: Path) -> Points:
    """A table with a column of steps; also what W&B exports: columns "RUN - NAME", each with MIN and MAX."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        table = list(csv.reader(lines))
    head = [cell.strip() for cell in table[0]] if table else []
    if "Wall time" in head and "Value" in head:
        raise InputError(f"{file}: TensorBoard exports one metric without its name; give the event files")
    column = next((head.index(key) for key in STEP_KEYS if key in head), None)
    if column is None:
        raise InputError(f"{file}: no column of steps; expected one of {', '.join(STEP_KEYS)} in its first line")
    names = {at: name.rpartition(" - ")[2] for at, name in enumerate(head) if at != column}
    names = {at: name for at, name in names.items() if name not in STEP_KEYS and not name.endswith(("__MIN", "__MAX"))}
    if twice := [name for name in names.values() if list(names.values()).count(name) > 1]:
        raise InputError(f"{file}: {twice[0]} has several columns; export one run")
    points: Points = []
    for number, cells in enumerate(table[1:], start=2):
        if not any(cells):
            continue
        try:
            step = float(cells[column])
            for at, name in names.items():
                if at < len(cells) and cells[at].strip():
                    points.append((name, int(step), float(cells[at])))
        except (ValueError, IndexError, OverflowError) as error:
            raise InputError(f"{file}, line {number}: {error}; expected numbers") from error
    return points
