"""Lengths of responses for the simulation of a pipeline: a distribution, a file, or a run's recorded batches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_rl.errors import InputError

NUMBER = r"(\d+(?:\.\d+)?)"
LOGNORMAL = re.compile(rf"lognormal:{NUMBER},{NUMBER}(?:,{NUMBER})?")
SAMPLE = 1 << 16  # number of draws for a distribution's mean
SEED = 0
HOW = "write lognormal:MEDIAN,SIGMA[,MAX], a file with one length a line, or a run directory with recorded batches"


@dataclass
class Lengths:
    """Draws response lengths in tokens; equal calls on equal objects give equal numbers.

    ``found``: lengths to draw from, with replacement; None: log-normal with ``median`` and ``sigma``.
    """

    source: str
    longest: float
    found: np.ndarray | None = None
    median: float = 0.0
    sigma: float = 0.0
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED), repr=False)

    def draw(self, prompts: int, samples: int) -> np.ndarray:
        """Return lengths [prompts, samples], whole numbers from 1 to ``longest``."""
        if self.found is not None:
            drawn = self._random.choice(self.found, (prompts, samples))
        else:
            drawn = np.ceil(self._random.lognormal(np.log(self.median), self.sigma, (prompts, samples)))
        return np.clip(drawn, 1, self.longest)

    def again(self) -> Lengths:
        """Return a copy that starts again from the first draw."""
        return Lengths(self.source, self.longest, self.found, self.median, self.sigma)

    def sample(self) -> np.ndarray:
        """Return all found lengths, or many draws of the distribution."""
        return np.clip(self.found, 1, self.longest) if self.found is not None else self.again().draw(SAMPLE, 1)[:, 0]


def read_lengths(text: str, longest: int) -> Lengths:
    """Return the lengths for `--lengths`, cut at ``longest`` (`rollout.max_response_length`). Raises `InputError`."""
    if text.startswith("lognormal"):
        match = LOGNORMAL.fullmatch(text)
        if match is None or float(match[1]) <= 0:
            raise InputError(f"--lengths {text}: {HOW}")
        most = min(float(match[3] or longest), longest)
        return Lengths(text, most, None, float(match[1]), float(match[2]))
    path = Path(text)
    if path.is_dir():
        lengths = _recorded(path)
    elif path.is_file():
        lengths = _listed(path)
    else:
        raise InputError(f"--lengths {text}: no such file or directory; {HOW}")
    return Lengths(text, longest, lengths)


def _listed(path: Path) -> np.ndarray:
    lengths = []
    for number, line in enumerate(path.read_text().split(), 1):
        if not line.isdigit() or int(line) < 1:
            raise InputError(f"--lengths {path}: entry {number} is {line!r}; expected a whole number of tokens")
        lengths.append(int(line))
    if not lengths:
        raise InputError(f"--lengths {path}: the file is empty; {HOW}")
    return np.asarray(lengths)


def _recorded(run: Path) -> np.ndarray:
    """Return the lengths of all responses in a run's recorded batches (`stored.batches`)."""
    from safetensors import safe_open

    folder, parts = run / "batches", []
    for path in sorted(folder.glob("step_*.safetensors")):
        with safe_open(path, "np") as file:
            parts.append(np.diff(file.get_tensor("cu_response")))
    lengths = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not (lengths > 0).any():
        raise InputError(
            f"--lengths {run}: no recorded batches in {folder}; run with recorder.record_batches: all or last_n, or "
            "give a file with one length a line"
        )
    return lengths[lengths > 0]
