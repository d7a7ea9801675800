"""Lengths of responses for the simulation of a pipeline: a distribution, a file, or a run's recorded batches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_rl.errors import InputError

NUMBER = r"(\d+(?:\.\d+)?)"
LOGNORMAL = re.compile(rf"lognormal:{NUMBER},{NUMBER}(?:,{NUMBER})?")
SAMPLE = 1 << 16  # of a distribution, for its mean
SEED = 0
HOW = "write lognormal:MEDIAN,SIGMA[,MAX], a file with one length a line, or a run directory with recorded batches"


@dataclass
class Lengths:
    """Draws lengths, tokens of a response; equal calls on equal objects give equal numbers.

    ``found``: lengths to draw from, with replacement; None: log-normal with ``median`` and ``sigma``.
    """

    source: str
    longest: float
    found: np.ndarray | None = None
    median: float = 0.0
    sigma: float = 0.0
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED), repr=False)

    def draw(self, prompts: int, samples: int) -> np.ndarray:
        """[prompts, samples] whole numbers, at least 1 and at most ``longest``."""
        if self.found is not None:
            drawn = self._random.choice(self.found, (prompts, samples))
        else:
            drawn = np.ceil(self._random.lognormal(np.log(self.median), self.sigma, (prompts, samples)))
        return np.clip(drawn, 1, self.longest)

    def again(self) -> Lengths:
        """The same, from its first draw on."""
        return Lengths(self.source, self.longest, self.found, self.median, self.sigma)

    def sample(self) -> np.ndarray:
        """What is known of the distribution: all lengths that were found, or many that were drawn."""
        return np.clip(self.found, 1, self.longest) if self.found is not None else self.again().draw(SAMPLE, 1)[:, 0]


def read_lengths(text: str, longest: int) -> Lengths:
    """What `--lengths` says; a response is cut at ``longest`` (`rollout.max_response_length`). Raises `InputError`."""
    if text.startswith("lognormal"):
        match = LOGNORMAL.fullmatch(text)
        if match is None or float(match[1]) <= 0:
            raise InputError(f"--lengths {text}: {HOW}")
        most = min(float(match[3] or longest), longest)
        return Lengths(text, most, None, float(match[1]), float(match[2]))
    path = Path(text)
    if path.is_dir():
        found = _recorded(path)
    elif path.is_file():
        found = _listed(path)
    else:
        raise InputError(f"--lengths {text}: no such file or directory; {HOW}")
    return Lengths(text, longest, found)


def _listed(path: Path) -> np.ndarray:
    found = []
    for number, line in enumerate(path.read_text().split(), 1):
        if not line.isdigit() or int(line) < 1:
            raise InputError(f"--lengths {path}: entry {number} is {line!r}; expected a whole number of tokens")
        found.append(int(line))
    if not found:
        raise InputError(f"--lengths {path}: the file is empty; {HOW}")
    return np.asarray(found)


def _recorded(run: Path) -> np.ndarray:
    """Lengths of all responses that a run learned from, where it recorded its batches (`stored.batches`)."""
    from safetensors import safe_open

    folder, found = run / "batches", []
    for path in sorted(folder.glob("step_*.safetensors")):
        with safe_open(path, "np") as file:
            found.append(np.diff(file.get_tensor("cu_response")))
    lengths = np.concatenate(found) if found else np.empty(0, np.int64)
    if not (lengths > 0).any():
        raise InputError(
            f"--lengths {run}: no recorded batches in {folder}; run with recorder.record_batches: all or last_n, or "
            "give a file with one length a line"
        )
    return lengths[lengths > 0]
