"""TensorBoard event files of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoardSink:
    """Writes every metric as a scalar. The writer starts with the first record, when a resumed step is known."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import; recipes may have it off

        self._writer_class = SummaryWriter
        self.folder = folder
        self._purge_step: int | None = None
        self._writer = None

    def resume_at(self, step: int) -> None:
        """Have TensorBoard hide what earlier event files say of ``step`` and later."""
        self._purge_step = step

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric; flushed, so that a killed run has its last step.

        After an error (disk full) the next step begins a new file: a writer that has failed once fails for ever.
        """
        if self._writer is None:
            self._writer = self._writer_class(log_dir=str(self.folder), purge_step=self._purge_step)
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(name, float(value), global_step=step)
            self._writer.flush()
        except Exception:
            self._writer, self._purge_step = None, None
            raise

    def close(self) -> None:
        """Finish the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
