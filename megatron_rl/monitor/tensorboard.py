"""TensorBoard event files of a run."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.monitor.jsonl import append_whole


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
        """Make TensorBoard hide the events of ``step`` and later in earlier files."""
        self._resumed_step = step

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the events that wait, then that of ``step``. Raises OSError if it cannot be written yet."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # imported late: a recipe may turn TensorBoard off

        if self._file is None:
            self._begin()
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._waiting.append(_record(step=step, summary=Summary(value=values)))
        self._flush()

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Append one event with texts by tag. TensorBoard shows them unchanged, as code rather than Markdown."""
        if self._file is None:
            self._begin()
        values = [_text(tag, text) for tag, text in texts.items()]
        self._waiting.append(_record(step=step, summary=_summary(values)))
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


def _summary(values: list) -> object:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=values)


def _text(tag: str, text: str) -> object:
    """Return a value for TensorBoard's text plugin. Four spaces of indentation make each line code in Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    code = "\n".join(f"    {line}" for line in text.split("\n"))
    data = code.encode("utf-8", "backslashreplace")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return Summary.Value(
        tag=f"{tag}/text_summary",
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype="DT_STRING", string_val=[data], tensor_shape=shape),
    )


def _record(**fields: object) -> bytes:
    """Return one event as a record of an event file: its length, its bytes and the checksums of both."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()
