"""The exact engine: sampling from the learner's own forward pass, so that mu = po bit for bit [VX].

It has no weights of its own and nothing to refit. The forward passes are the learner's (`exact.decode`), reached
through the small `Policy` interface; `exact.draws` draws tokens, and this module wraps responses. They do not depend on
the batch. Each stays on one rank of the replica that sampled it. docs/exact.md has the cost beside vLLM's.
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
from megatron_rl.exact.draws import Draws
from megatron_rl.exact.turns import Responses
from megatron_rl.process.ranks import together, world_rank
from megatron_rl.rollout.calls import check_version, throughput
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.ownership import known_everywhere
from megatron_rl.rollout.payload import make_rollout
from megatron_rl.rollout.requests import Request, make_groups, make_requests, request_seed
from megatron_rl.types import Group, Prompt, Rollout


class Policy(Protocol):
    """The learner's forward passes, as `exact.decode.Decoder` offers them. Collective, like everything here."""

    @property
    def stats(self) -> dict[str, float]: ...
    def run(
        self, prompts: list[list[int]], limits: list[int], chooser: Draws, stop: frozenset[int]
    ) -> tuple[range, Responses]: ...
    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor: ...
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
        self._config, self._dose, self._policy = rollout, dose, policy
        self._stop, self._decode, self._describe = frozenset(stop_token_ids), decode, describe
        self._policy_version, self._stats = 0, {}

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
        is_dosed = config is not None and (sampling is None or config.in_validation)
        is_training, sampling = sampling is None, sampling or Sampling.from_config(self._config)
        requests = make_requests(prompts, num_samples, seed=self._config.seed, step=step)
        owners = self._policy.owners(len(requests))
        dose = self._dose if is_dosed else Dose(None, self._config.seed)
        held = self._generate(requests, owners, sampling, step, dose)
        rollouts = known_everywhere(requests, owners, held)
        self._stats |= self._policy.stats | throughput(rollouts, time.perf_counter() - start)
        if is_dosed and is_training:
            self._stats |= size_of(held)
        return make_groups(prompts, num_samples, rollouts)

    def _generate(
        self, requests: list[Request], owners: list[int], sampling: Sampling, step: int, dose: Dose
    ) -> list[Rollout]:
        """The responses that this rank owns, of those that its replica has sampled."""
        prompts, seeds = [request.prompt.tokens for request in requests], [request.seed for request in requests]
        prompt_seeds = [request_seed(self._config.seed, step, r.prompt.id, PROMPT_SAMPLE) for r in requests]
        draws = Draws(self._policy, prompts, seeds, sampling.temperature, dose)
        limits = [sampling.max_response_length] * len(requests)
        with self._policy.dosed(dose, seeds, prompt_seeds):
            mine, found = self._policy.run(prompts, limits, draws, self._stop)
        if dose.changes_model:
            responses = [tokens[:length] for tokens, length in zip(found.tokens, found.lengths, strict=True)]
            clean = self._policy.score([prompts[i] for i in mine], responses, sampling.temperature or 1.0)
            for row, logprobs in zip(found.clean, clean, strict=True):
                row[: len(logprobs)] = logprobs
        places = [place for place, number in enumerate(mine) if owners[number] == world_rank()]
        return together(
            "exact generation",
            lambda: [self._wrap(requests[mine[place]], found, place) for place in places],
            fault=RolloutError,
            describe=str,
        )

    def _wrap(self, request: Request, found: Responses, place: int) -> Rollout:
        length = found.lengths[place]
        tokens, log_mu, clean = (column[place, :length].copy() for column in (found.tokens, found.log_mu, found.clean))
        reason = "stop" if int(tokens[-1]) in self._stop else "length"
        text = self._decode(tokens.tolist())
        rollout = make_rollout(request, tokens, log_mu, reason, self._policy_version, text=text)
        rollout.exact_logprobs = clean
        return rollout

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Nothing moves: the weights are the learner's. ``weights`` is not read, so nothing is gathered either."""
        self._policy_version = policy_version
        self._policy.new_weights(self._dose, policy_version)

    def sleep(self) -> None:
        """Holds no memory of its own."""

    def wake(self) -> None:
        """Holds no memory of its own."""

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def describe_precision(self) -> dict[str, str]:
        return self._describe()

    def close(self) -> None:
        """Nothing to end: the learner is closed by its owner."""
