"""The exact engine: sampling from the learner's own forward pass, so that mu = po bit for bit [VX].

It has no weights of its own and nothing to refit. The forward passes are the learner's (`exact.decode`), reached
through the small `Policy` interface. `Draws` draws tokens. Each response has a random stream of its own, keyed like
every engine's requests (`requests.request_seed`). Its numbers are drawn on the host, for some steps ahead; the choice
is made where the logits are. `ExactGenerator` makes rollouts of responses. They do not depend on the batch. Each stays
on one rank of the replica that sampled it. docs/exact.md compares the cost with vLLM's.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.exact.doses import PROMPT_SAMPLE, Dose, size_of
from megatron_rl.exact.invariant import padded
from megatron_rl.exact.turns import Responses
from megatron_rl.process.ranks import together, world_rank
from megatron_rl.rollout.generator import RolloutError, Sampling, check_version, throughput
from megatron_rl.rollout.requests import (
    Request,
    known_everywhere,
    make_groups,
    make_requests,
    make_rollout,
    request_seed,
)
from megatron_rl.types import Group, Prompt, Rollout


class Draws:
    """Tokens drawn with one uniform number each, for requests with these seeds; see `exact.turns.Chooser`.

    ``temperature`` 0: the most probable token. ``dose``: its noise on the logits that are drawn from. ``head``: k of
    `rollout.sampled_head`, the most probable tokens of what is drawn from.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: list[list[int]],
        seeds: list[int],
        temperature: float,
        dose: Dose,
        head: int = 0,
    ):
        self._policy, self._temperature, self._dose, self.head = policy, temperature, dose, head
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

    def choose(self, logits: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        temperature = self._temperature or 1.0
        scaled = self._policy.whole_vocabulary(logits).double() / temperature
        if self._dose.is_on_logits:
            needed = self._add_noise(scaled).to(needed)
        tokens = scaled.argmax(1) if self._temperature == 0 else sample(scaled, needed)
        head = scaled.topk(self.head).indices if self.head else None
        clean, *of_head = self._policy.logprobs(logits, tokens, temperature, head)
        if not self._dose.is_on_logits:
            return tokens, clean, clean, *([] if head is None else [head, *of_head])
        for sequence, token in zip(self._asked, tokens.tolist(), strict=False):  # rows of padding follow
            self._tokens[sequence].append(token)
        chosen = tokens[:, None] if head is None else torch.cat([tokens[:, None], head], 1)
        log_mu = log_softmax_at(scaled, chosen).float()
        return tokens, clean, log_mu[:, 0], *([] if head is None else [head, log_mu[:, 1:]])

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

    most_steps, head = None, 0

    def __init__(self, responses: list[np.ndarray], device: torch.device):
        self._responses, self._nothing = responses, torch.zeros(1, device=device)

    def ahead(self, sequences: list[int], made: np.ndarray, count: int) -> np.ndarray:
        tokens = np.zeros((len(sequences), count), np.int64)
        for row, sequence, start in zip(tokens, sequences, made, strict=True):
            given = self._responses[sequence][start : start + count]
            row[: len(given)] = given
        return tokens

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
    """[n, k] of logits [n, V] at ``tokens`` [n, k]."""
    top = scaled.amax(1)
    log_total = padded(torch.log)(padded(torch.exp)(scaled - top[:, None]).sum(1)) + top
    return scaled.gather(1, tokens) - log_total[:, None]


class Policy(Protocol):
    """The learner's forward passes, as `exact.decode.Decoder` offers them. Collective, like everything here."""

    @property
    def stats(self) -> dict[str, float]: ...
    def run(
        self, prompts: list[list[int]], limits: list[int], chooser: Draws, stop: frozenset[int]
    ) -> tuple[range, Responses]: ...
    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, head: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]: ...
    def whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor: ...
    def owners(self, number: int) -> list[int]: ...
    def dosed(self, dose: Dose, seeds: list[int], prompt_seeds: list[int]) -> AbstractContextManager: ...
    def score(self, prompts: list[list[int]], responses: list[np.ndarray], temperature: float) -> list[np.ndarray]: ...
    def new_weights(self, dose: Dose, version: int) -> None: ...


class ExactGenerator:
    """`Generator` on the learner's own forward pass; see `Generator` for the methods.

    ``dose``: of mismatch. ``policy``: the learner's decoder. ``stop_token_ids``: what ends a response. ``decode``:
    token ids → text. ``describe``: the learner's column of the precision contract, which is this engine's too.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        dose: Dose,
        policy: Policy,
        *,
        stop_token_ids: list[int],
        decode: Callable[[list[int]], str],
        describe: Callable[[], dict[str, str]],
    ) -> None:
        self._config, self._dose, self.policy = rollout, dose, policy
        self._stop, self._decode, self._describe = frozenset(stop_token_ids), decode, describe
        self._policy_version, self._stats, self._measured = 0, {}, None

    def rollout(
        self,
        prompts: list[Prompt],
        num_samples: int,
        *,
        policy_version: int,
        step: int,
        sampling: Sampling | None = None,
    ) -> list[Group]:
        check_version("the learner holds", self._policy_version, policy_version)
        start, config = time.perf_counter(), self._dose.config
        is_dosed = config is not None and sampling is None  # validation measures the policy without the dose
        sampling = sampling or Sampling.from_config(self._config)
        requests = make_requests(prompts, num_samples, seed=self._config.seed, step=step)
        owners = self.policy.owners(len(requests))
        dose = self._dose if is_dosed else Dose(None, self._config.seed)
        held = self._generate(requests, owners, sampling, step, dose)
        rollouts = known_everywhere(requests, owners, held)
        self._stats |= self.policy.stats | throughput(rollouts, time.perf_counter() - start)
        if is_dosed and step != self._measured:  # `acceptance` samples again in the same step
            self._measured = step
            self._stats |= (measured := size_of(held)) | {"exact/dose": self._dose.size}
            if measured:
                self._dose.adjust(measured["exact/log_rho_std"])
        return make_groups(prompts, num_samples, rollouts)

    def _generate(
        self, requests: list[Request], owners: list[int], sampling: Sampling, step: int, dose: Dose
    ) -> list[Rollout]:
        """The responses that this rank owns, of those that its replica has sampled."""
        prompts, seeds = [request.prompt.tokens for request in requests], [request.seed for request in requests]
        prompt_seeds = [
            request_seed(self._config.seed, step, r.prompt.id, PROMPT_SAMPLE, r.occurrence) for r in requests
        ]
        draws = Draws(self.policy, prompts, seeds, sampling.temperature, dose, sampling.head)
        limits = [sampling.max_response_length] * len(requests)
        with self.policy.dosed(dose, seeds, prompt_seeds):
            numbers_here, sampled = self.policy.run(prompts, limits, draws, self._stop)
        if dose.changes_model:
            responses = [tokens[:length] for tokens, length in zip(sampled.tokens, sampled.lengths, strict=True)]
            clean = self.policy.score([prompts[i] for i in numbers_here], responses, sampling.temperature or 1.0)
            for row, logprobs in zip(sampled.clean, clean, strict=True):
                row[: len(logprobs)] = logprobs
        places = [place for place, number in enumerate(numbers_here) if owners[number] == world_rank()]
        version = dose.sampler_version(self._policy_version)
        return together(
            "exact generation",
            lambda: [self._wrap(requests[numbers_here[place]], sampled, place, version) for place in places],
            fault=RolloutError,
            describe=str,
        )

    def _wrap(self, request: Request, responses: Responses, place: int, version: int) -> Rollout:
        length = responses.lengths[place]
        columns = (responses.tokens, responses.log_mu, responses.clean, *responses.heads)
        tokens, log_mu, clean, *heads = (column[place, :length].copy() for column in columns)
        reason = "stop" if int(tokens[-1]) in self._stop else "length"
        text = self._decode(tokens.tolist())
        of_head = dict(zip(("head_tokens", "head_logprobs"), heads, strict=False))
        rollout = make_rollout(request, tokens, log_mu, reason, version, text=text, **of_head)
        rollout.exact_logprobs = clean
        return rollout

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Nothing moves: the weights are the learner's. ``weights`` is not read, so nothing is gathered either."""
        self._policy_version = policy_version
        self.policy.new_weights(self._dose, policy_version)

    def sleep(self) -> None:
        """Holds no memory of its own."""

    def wake(self) -> None:
        """Holds no memory of its own."""

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def state_dict(self) -> dict[str, float]:
        """The dose as it is held."""
        return {"dose": self._dose.size}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take what `state_dict` gave; a state without a dose leaves the recipe's."""
        self._measured = None
        if self._dose.config is not None and self._dose.config.hold is not None:
            self._dose.size = state.get("dose", self._dose.size)

    def describe_precision(self) -> dict[str, str]:
        return self._describe()

    def close(self) -> None:
        """Nothing to end: the learner is closed by its owner."""
