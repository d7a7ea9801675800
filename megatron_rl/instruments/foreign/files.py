"""Finds the logs below a path and reads them: TensorBoard, W&B offline, JSON lines, JSON, CSV, console.

Each becomes a `Log` of points (name, step, value) under the names that the project gave them.

A `.wandb` file is a log of LevelDB: blocks of 32 KiB of fragments, each with checksum, length and type. Its records are
read without the client, whose reader has changed places between versions; the four fields that matter have not.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import InputError, shown

Points = list[tuple[str, int, float]]  # name, step, value, in the order in which they were written

_BLOCK, _HEADER = 32768, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4  # types of a fragment; 3 is one in the middle
_NUMBER_TYPES = {0, 1, 2, 5}  # varint, 8 bytes, length-delimited, 4 bytes


def read_events(files: list[Path]) -> Points:
    """The scalars of the event files ``files`` of one folder. A cut last record is left out."""
    from tensorboard.compat.proto.event_pb2 import Event  # imported late: other formats do not need it
    from tensorboard.util.tensor_util import make_ndarray

    points: Points = []
    for file in sorted(files, key=lambda path: path.name):  # names begin with the time
        for data in _events(file):
            try:
                event = Event.FromString(data)
            except Exception as error:  # protobuf's DecodeError has another class in each implementation
                raise InputError(f"{file}: not an event file of TensorBoard ({error})") from error
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points.append((value.tag, int(event.step), float(value.simple_value)))
                elif value.HasField("tensor") and value.tensor.dtype in (1, 2):  # float, double; 7 is text
                    points.append((value.tag, int(event.step), float(make_ndarray(value.tensor).reshape(-1)[0])))
    return points


def _events(file: Path) -> Iterator[bytes]:
    """The records of a TFRecord file: length (8), its checksum (4), data, its checksum (4)."""
    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if at + 16 + length > len(data):
            if at == 0:
                raise InputError(f"{file}: not an event file of TensorBoard (its first record is not whole)")
            return
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def read_wandb(file: Path) -> list[dict[str, float]]:
    """The numbers of each `wandb.log` of an offline run, with `_step`; nested names are joined by "." as W&B does."""
    rows = []
    for data in _fragments(file):
        try:
            rows += [_history(value) for number, value in _fields(data) if number == 2]  # Record.history
        except (ValueError, TypeError, AttributeError, IndexError, RecursionError, struct.error) as error:
            raise InputError(f"{file}: a record that the client cannot have written ({error})") from error
    return rows


def _fragments(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    if data[:4] != b":W&B":
        raise InputError(f"{file}: not a file of an offline run of Weights & Biases (it does not begin with :W&B)")
    at, whole = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # too small for a fragment: filled with zeros
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEADER : at + _HEADER + length]
        if kind == 0 or len(part) < length:  # the client was killed while it wrote
            return
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise InputError(f"{file}: broken at byte {at} (wrong checksum); copy it again, or cut it there")
        whole = part if kind in (_WHOLE, _FIRST) else whole + part
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield whole


def _history(data: bytes) -> dict[str, float]:
    row: dict[str, float] = {}
    for number, value in _fields(data):
        if number == 2:  # HistoryRecord.step
            row["_step"] = float(next((num for field, num in _fields(value) if field == 1), 0))
        elif number == 1:  # HistoryRecord.item
            name, number_of_item = _item(value)
            if number_of_item is not None:
                row[name] = number_of_item
    return row


def _item(data: bytes) -> tuple[str, float | None]:
    """Name and number of a HistoryItem; None for text, tables and pictures.

    Up to 0.20 every value is JSON (field 16); later versions have a field for each type.
    """
    key, nested, number_read = "", [], None
    for number, value in _fields(data):
        if number == 1:
            key = value.decode("utf-8", "replace")
        elif number == 2:
            nested.append(value.decode("utf-8", "replace"))
        elif number == 5:  # integer, zigzag
            number_read = float((value >> 1) ^ -(value & 1))
        elif number == 6:
            (number_read,) = struct.unpack("<d", value)
        elif number == 16:
            number_read = number_of(json.loads(value))
    return key or ".".join(nested), number_read


def number_of(value: object) -> float | None:
    """Return ``value`` as a number, None if it is none. Numbers that are not finite may be written as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str) and value.strip().lower().lstrip("+-") in {"nan", "inf", "infinity"}:
        return float(value)
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an int for a varint, else its bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind not in _NUMBER_TYPES:
            raise ValueError(f"a field of type {kind}")
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, at = _varint(data, at)
        if at + length > len(data):
            raise ValueError("a field that is longer than its record")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


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
_TEXTS = ("Name", "State", "Created", "Runtime")  # columns of W&B's tables of runs
DEPTH = 5  # folders below the one that was given, as of prime-rl's runs
EXPECTED = (
    "a run directory of megatron-rl, or a log of verl, slime, miles, NeMo-RL, prime-rl or TRL: events.out.tfevents.*, "
    "run-*.wandb, trainer_state.json, *.json, *.jsonl, *.csv, or a run's output"
)


@dataclass(frozen=True)
class Log:
    """The points of one log. ``group``: logs of one group are stretches of one run, the newest last."""

    kind: str
    path: Path
    points: Points
    group: str = ""


def find_logs(path: Path) -> list[Log]:
    """The logs at ``path``: a file, or a folder with logs of one kind below it.

    Of several kinds in a folder the first is taken that keeps all digits: W&B, JSON, CSV, then TensorBoard.
    """
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such file; expected {EXPECTED}")
    files = sorted(_below(path, DEPTH))
    if ours := [str(file.parent) for file in files if file.name == "recipe.resolved.yaml"]:
        raise InputError(f"{path}: holds run directories of megatron-rl; give one of {', '.join(ours[:10])}")
    if runs := [file for file in files if file.suffix == ".wandb"]:
        return [_read_wandb(file) for file in runs]
    if states := [file for file in files if file.name == "trainer_state.json"]:
        newest = max(states, key=lambda file: (file.stat().st_mtime, file))  # each checkpoint has the whole history
        return _read_file(newest)
    if tables := [file for file in files if file.suffix in {".jsonl", ".csv"} and _has_metrics(file, path)]:
        return [log for file in tables for log in _read_file(file)]
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
    try:
        if file.suffix == ".csv":
            return [Log("CSV", file, _read_csv(file))]
        if file.suffix == ".json":
            return [Log("JSON", file, _points(_history_of(file), file))]
        if file.suffix == ".jsonl":
            return [Log("JSON lines", file, _points(_json_lines(file), file))]
        if rows := _printed(file):
            return [Log("console", file, _points(rows, file))]
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
            raise InputError(f"{file}, line {number}: {shown(line, 60)} is not an object; expected a step's metrics")
        data = row.pop("data", None)  # verl's file: {"step": 1, "data": {…}}
        rows.append({**row, **data} if isinstance(data, dict) else row)
    return rows


def _history_of(file: Path) -> list[Mapping[str, object]]:
    """The rows of a JSON file: a list of them, or `log_history` of a trainer_state.json."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON ({error})") from error
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise InputError(
            f"{file}: no log_history and no list of rows; expected the trainer_state.json of a checkpoint, or "
            '[{"step": 1, "name": 0.5}, …]'
        )
    return history


# What runs print for a step: verl "step:12 - critic/score/mean:0.5 - …", slime and miles "rollout 3: {…}" and
# "step 3: {…}", TRL "{'reward': 0.5, …}", which names no step.
_VERL_LINE = re.compile(r"\bstep:(\d+) - (\S+:.*)")
_DICT_LINE = re.compile(r"(?:\b(step|rollout|eval|perf) (\d+): *)?(\{'.*\})")
_NUMBER = re.compile(r"[-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)(?![\w.])", re.IGNORECASE)


def _printed(file: Path) -> list[Mapping[str, object]]:
    """The steps in the output of a run. TRL's lines name no step: they are counted."""
    rows: list[Mapping[str, object]] = []
    counted = 0
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := _VERL_LINE.search(line):
            pairs = (part.rpartition(":") for part in match[2].split(" - "))
            row = {name.strip(): _text_number(text) for name, _, text in pairs if name}
            rows.append({"step": int(match[1])} | row)
        elif match := _DICT_LINE.search(line):
            row = _printed_dict(match[3])
            if match[1]:
                rows.append({"train/step" if match[1] == "step" else "rollout/step": int(match[2])} | row)
            elif row.keys() & {"reward", "eval_reward"}:
                counted += "reward" in row
                rows.append({"step": counted} | row)
    return rows


def _printed_dict(text: str) -> dict[str, float]:
    try:
        row = ast.literal_eval(re.sub(r"(?<![\w'])(-?(?:nan|inf))(?![\w'])", r"'\1'", text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(name): number for name, value in row.items() if (number := _text_number(value)) is not None}


def _text_number(value: object) -> float | None:
    """Return the number that ``value`` is, or the text of: 0.5, "0.5", "np.float64(0.5)"."""
    if not isinstance(value, str):
        return number_of(value)
    found = _NUMBER.findall(value.replace("float64", "").replace("float32", ""))
    return float(found[0]) if len(found) == 1 else None


def _points(rows: Iterable[Mapping[str, object]], file: Path) -> Points:
    """The numbers of ``rows``; the step is not one of them."""
    points: Points = []
    for count, row in enumerate(rows, start=1):
        key = next((key for key in STEP_KEYS if row.get(key) is not None), None)
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
    if not set(head) & set(STEP_KEYS):
        raise InputError(f"{file}: no column of steps; expected one of {', '.join(STEP_KEYS)} in its first line")
    names = [name.rpartition(" - ")[2] for name in head]
    kept = [at for at, name in enumerate(names) if name and not name.endswith(("__MIN", "__MAX"))]
    if twice := [names[at] for at in kept if [names[other] for other in kept].count(names[at]) > 1]:
        raise InputError(f"{file}: {twice[0]} has several columns; export one run")
    rows = []
    for number, cells in enumerate(table[1:], start=2):
        row: dict[str, float] = {}
        for at in (at for at in kept if at < len(cells) and cells[at].strip()):
            try:
                row[names[at]] = float(cells[at])
            except ValueError as error:
                if not names[at].startswith("_") and names[at] not in _TEXTS:
                    raise InputError(f"{file}, line {number}: {error}; expected numbers") from error
        rows += [row] if row else []
    return _points(rows, file)
