"""Where a run's metrics go besides `metrics.jsonl`: TensorBoard and Weights & Biases.

TensorBoard's event files are written here. Weights & Biases is reached by its own client, in a thread of its own, so
that a slow or unreachable service never delays a step. Sinks are copies; the record of a run is its `metrics.jsonl`.
"""

from __future__ import annotations

import importlib.util
import io
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.monitor import SinksConfig, WandbSinkConfig
from megatron_rl.config.yaml12 import parse
from megatron_rl.monitor.run_directory import RunDirectory, append_whole

CLOSING_SECONDS = 120.0  # longest wait at the end of a run for a service to take the remaining steps
MOST_WAITING = 100_000  # steps kept for an unreachable service; beyond, the oldest are dropped


class SinkError(Exception):
    """A service did not accept the data that was sent."""


class WandbSink:
    """Sends each step to Weights & Biases from its own thread; `write` returns at once.

    The next `write` or `close` raises a failure as `SinkError`. If the run could not be opened there, it is not tried
    again. The service accepts a step once, so steps that a resumed run repeats keep their first values.
    """

    def __init__(self, config: WandbSinkConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory
        self._resumes = False
        self._waiting: queue.Queue[tuple[int, dict[str, float], float] | None] = queue.Queue(MOST_WAITING)
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def resume_at(self, step: int) -> None:
        """Continue the service's run of the earlier start."""
        self._resumes = step > 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step. Raises SinkError if an earlier one failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sink", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            if self._waiting.full():
                self._waiting.get()
            self._waiting.put((step, {name: float(value) for name, value in metrics.items()}, time.time()))
        self._raise_failure()

    def close(self) -> None:
        """Wait up to `CLOSING_SECONDS` until all steps are sent. Raises SinkError if they are not."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            raise SinkError(f"not all steps were sent within {CLOSING_SECONDS:.0f} s; metrics.jsonl has all of them")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SinkError(f"{type(failure).__name__}: {failure}") from failure

    def _work(self) -> None:
        try:
            run = self._open()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no error of a client may end the run
            self._failure = error
            return
        while (item := self._waiting.get()) is not None:
            try:
                step, metrics, seconds = item
                run.log({**metrics, "_timestamp": seconds}, step=step)
            except Exception as error:  # noqa: BLE001 - as above
                self._failure = error
        try:
            run.finish()
        except Exception as error:  # noqa: BLE001 - as above
            self._failure = error

    def _open(self) -> Any:
        """Return the run on the service; that of an earlier start, if this one continues it."""
        import wandb

        config, recipe = self._config, self._directory.recipe
        return wandb.init(
            project=config.project,
            entity=config.entity,
            name=self._directory.root.name,
            group=config.group,
            mode=config.mode,
            id=_run_id(self._directory.root / "wandb-run-id", self._resumes),
            resume="allow",
            dir=self._directory.root,
            config=parse(recipe.read_text())[0] if recipe.is_file() else {},
            settings=wandb.Settings(console="off", silent=True),  # only megatron_rl writes to the terminal
        )


def missing_clients(config: SinksConfig) -> list[str]:
    """Return an error message per configured service whose client is not installed."""
    if config.wandb is None or importlib.util.find_spec("wandb") is not None:
        return []
    return ["monitor.sinks.wandb: the package wandb is not installed; `pip install wandb`, or set the key to null"]


def _run_id(file: Path, resumes: bool) -> str:
    """Return this run's id at a service: that of the earlier start, or a new one of letters and digits."""
    if resumes and file.is_file():
        return file.read_text().strip()
    run_id = os.urandom(16).hex()[:21]
    file.write_text(run_id + "\n")
    return run_id


class TensorBoardSink:
    """Appends one event per step with all metrics as scalars; never part of an event.

    The file is created by the first record, when a resumed step is known. Events that cannot be written (disk full)
    wait in memory and are written first when there is space again. TensorBoard's own writer is not used: its thread
    ends at the first failed write, with a traceback on the terminal.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._resumed_step: int | None = None
        self._file: Path | None = None
        self._waiting: list[bytes] = []

    def resume_at(self, step: int) -> None:
        """Begin a new file, whose start makes TensorBoard hide the events of ``step`` and later in earlier ones."""
        self._resumed_step, self._file, self._waiting = step, None, []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the events that wait, then that of ``step``. Raises OSError if it cannot be written yet."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # imported late: a recipe may turn TensorBoard off

        if self._file is None:
            self._begin()
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._waiting.append(_record(step=step, summary=Summary(value=values)))
        self._flush()

    def close(self) -> None:
        """Write the events that still wait. Raises OSError if that fails. No file is kept open."""
        self._flush()

    def _begin(self) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        seconds, nanoseconds = divmod(time.time_ns(), 10**9)  # TensorBoard reads the files of a folder by name
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = self.folder / name
        self._waiting.append(_record(file_version="brain.Event:2"))
        if self._resumed_step is not None:
            self._waiting.append(_record(step=self._resumed_step, session_log=SessionLog(status=SessionLog.START)))

    def _flush(self) -> None:
        while self._waiting:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_whole(self._file, self._waiting[0])
            del self._waiting[0]


def _record(**fields: object) -> bytes:
    """Return one event as a record of an event file: its length, its bytes and the checksums of both."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()
