"""What decides the next token of a response: its own random numbers, or tokens that are given.

Each response has a random stream of its own, keyed like every engine's requests (`requests.request_seed`). Its numbers
are drawn on the host, for some steps ahead; the choice is made where the logits are.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from megatron_rl.exact.doses import Dose
from megatron_rl.learner.layers.invariant import padded


class Policy(Protocol):
    """What `exact.decode.Decoder` says of logits [n, V/tp]."""

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor: ...
    def whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor: ...


class Draws:
    """Tokens drawn with one uniform number each, for requests with these seeds; see `exact.turns.Chooser`.

    ``temperature`` 0: the most probable token. ``dose``: its noise on the logits that are drawn from.
    """

    def __init__(self, policy: Policy, prompts: list[list[int]], seeds: list[int], temperature: float, dose: Dose):
        self._policy, self._temperature, self._dose = policy, temperature, dose
        self._streams = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]
        self._tokens = prompts  # with what noise has been drawn for
        # Noise is drawn on the host when the logits are there, from the stream that the uniform number comes from.
        self.most_steps = 1 if dose.is_on_logits else None
        self._asked: list[int] = []
        if dose.is_on_logits:
            self._tokens = [list(prompt) for prompt in prompts]

    def ahead(self, sequences: list[int], made: np.ndarray, count: int) -> np.ndarray:
        self._asked = sequences
        if self._temperature == 0 or self._dose.is_on_logits:
            return np.zeros((len(sequences), count))
        return np.stack([self._streams[i].random(count) for i in sequences])

    def choose(self, logits: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        temperature = self._temperature or 1.0
        scaled = self._policy.whole_vocabulary(logits).double() / temperature
        if self._dose.is_on_logits:
            needed = self._add_noise(scaled).to(needed)
        tokens = scaled.argmax(1) if self._temperature == 0 else sample(scaled, needed)
        clean = self._policy.logprobs(logits, tokens, temperature)
        if not self._dose.is_on_logits:
            return tokens, clean, clean
        for sequence, token in zip(self._asked, tokens.tolist(), strict=False):  # rows of padding follow
            self._tokens[sequence].append(token)
        return tokens, clean, log_softmax_at(scaled, tokens).float()

    def _add_noise(self, scaled: torch.Tensor) -> torch.Tensor:
        """To the rows that were asked for; the uniform numbers [n] that come after it in each stream."""
        uniforms = torch.zeros(len(scaled), dtype=torch.float64)
        for row, sequence in enumerate(self._asked):
            stream, tokens = self._streams[sequence], self._tokens[sequence]
            noise = self._dose.logit_noise(stream, lambda n, tokens=tokens: tokens[-n:], scaled.size(1))
            scaled[row] += torch.from_numpy(noise).to(scaled.device)
            uniforms[row] = stream.random()
        return uniforms


class GivenTokens:
    """Responses that are known, generated again; see `exact.turns.Chooser`."""

    most_steps = None

    def __init__(self, responses: list[np.ndarray], device: torch.device):
        self._responses, self._nothing = responses, torch.zeros(1, device=device)

    def ahead(self, sequences: list[int], made: np.ndarray, count: int) -> np.ndarray:
        found = np.zeros((len(sequences), count), np.int64)
        for row, sequence, start in zip(found, sequences, made, strict=True):
            given = self._responses[sequence][start : start + count]
            row[: len(given)] = given
        return found

    def choose(self, logits: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nothing = self._nothing.expand(len(needed))
        return needed.long(), nothing, nothing


def sample(scaled: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse distribution function: of each row of logits [n, V] float64 the first token [n] whose cumulated
    probability exceeds its uniform number [n]."""
    cumulated = padded(torch.exp)(scaled - scaled.amax(1, keepdim=True)).cumsum(1)
    targets = uniforms[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, targets, right=True).squeeze(1).clamp_(max=scaled.size(1) - 1)


def log_softmax_at(scaled: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[n] of logits [n, V] at ``tokens`` [n]."""
    top = scaled.amax(1)
    log_total = padded(torch.log)(padded(torch.exp)(scaled - top[:, None]).sum(1)) + top
    return scaled.gather(1, tokens[:, None]).squeeze(1) - log_total
