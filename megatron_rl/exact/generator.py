"""The exact engine: sampling from the learner's own forward pass, so that mu = po bit for bit [VX].

It has no weights of its own and nothing to refit. The forward passes are the learner's (`exact.decode`), reached
through the small `Policy` interface; this module draws tokens and wraps responses. Each response has a random stream of
its own, keyed like every engine's requests (`requests.request_seed`), so that responses depend neither on the layout
nor on the batch.

A token costs one pass of the training model, in Python and without fused kernels. docs/exact.md has the ratio to vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.exact.doses import PROMPT_SAMPLE, Dose, size_of
from megatron_rl.rollout.calls import check_version, throughput
from megatron_rl.rollout.generator import Sampling
from megatron_rl.rollout.payload import make_rollout
from megatron_rl.rollout.requests import Request, make_groups, make_requests, request_seed
from megatron_rl.types import Group, Prompt, Rollout


class Policy(Protocol):
    """The learner's forward passes, as `exact.decode.Decoder` offers them. Collective, like everything here."""

    @property
    def speaks(self) -> bool: ...
    def run(self, prompts: list[list[int]], max_new_tokens: int, pick: Callable[..., Any]) -> range: ...
    def logprobs(self, logits: torch.Tensor, tokens: list[int], temperature: float) -> torch.Tensor: ...
    def whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor: ...
    def share(self, mine: list[Any]) -> list[Any]: ...
    def dosed(self, dose: Dose, seeds: list[int], prompt_seeds: list[int]) -> AbstractContextManager: ...
    def score(self, prompts: list[list[int]], responses: list[list[int]], temperature: float) -> list[np.ndarray]: ...
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
        mine = self._generate(requests, sampling, step, self._dose if is_dosed else Dose(None, self._config.seed))
        rollouts = self._policy.share(mine)
        self._stats |= throughput(rollouts, time.perf_counter() - start)
        if is_dosed and is_training:
            self._stats |= size_of(mine if self._policy.speaks else [])
        return make_groups(prompts, num_samples, rollouts)

    def _generate(self, requests: list[Request], sampling: Sampling, step: int, dose: Dose) -> list[Rollout]:
        """This replica's share of the responses."""
        draws = [_Draw(request.seed, request.prompt.tokens) for request in requests]

        def pick(running: list[int], logits: torch.Tensor) -> list[tuple[int, bool]]:
            scaled = self._policy.whole_vocabulary(logits).double().numpy(force=True) / (sampling.temperature or 1.0)
            noise = [dose.logit_noise(draws[i].random, draws[i].last, scaled.shape[1]) for i in running]
            is_noisy = noise[0] is not None
            if is_noisy:
                scaled += np.stack(noise)
            if sampling.temperature == 0:
                tokens = scaled.argmax(1).tolist()
            else:
                tokens = _sample(scaled, [draws[i].uniform() for i in running])
            computed = self._policy.logprobs(logits, tokens, sampling.temperature or 1.0).tolist()
            sampled = _log_softmax_at(scaled, tokens) if is_noisy else computed
            for i, token, clean, log_mu in zip(running, tokens, computed, sampled, strict=True):
                draws[i].add(token, clean, log_mu)
            return [(token, draws[i].ended(self._stop, sampling)) for i, token in zip(running, tokens, strict=True)]

        prompts = [request.prompt.tokens for request in requests]
        prompt_seeds = [request_seed(self._config.seed, step, r.prompt.id, PROMPT_SAMPLE) for r in requests]
        with self._policy.dosed(dose, [request.seed for request in requests], prompt_seeds):
            mine = self._policy.run(prompts, sampling.max_response_length, pick)
        rollouts = [self._wrap(requests[i], draws[i]) for i in mine]
        if dose.changes_model:
            responses = [draws[i].tokens for i in mine]
            clean = self._policy.score([prompts[i] for i in mine], responses, sampling.temperature or 1.0)
            for rollout, found in zip(rollouts, clean, strict=True):
                rollout.exact_logprobs = found
        return rollouts

    def _wrap(self, request: Request, draw: _Draw) -> Rollout:
        reason = "stop" if draw.tokens[-1] in self._stop else "length"
        text = self._decode(draw.tokens)
        rollout = make_rollout(request, draw.tokens, draw.log_mu, reason, self._policy_version, text=text)
        rollout.exact_logprobs = np.asarray(draw.clean, dtype=np.float32)
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


class _Draw:
    """One response on its way: its random stream, its tokens, and their log-probs."""

    def __init__(self, seed: int, prompt: list[int]):
        self.random = np.random.Generator(np.random.Philox(key=seed))
        self._prompt = prompt
        self.tokens: list[int] = []
        self.clean: list[float] = []  # log po, as the learner computes it
        self.log_mu: list[float] = []  # of what was sampled from, noise included

    def last(self, number: int) -> list[int]:
        """Up to ``number`` tokens that the next one follows."""
        return [*self._prompt, *self.tokens[-number:]][-number:]

    def uniform(self) -> float:
        return self.random.random()

    def add(self, token: int, clean: float, log_mu: float) -> None:
        self.tokens.append(token)
        self.clean.append(clean)
        self.log_mu.append(log_mu)

    def ended(self, stop: frozenset[int], sampling: Sampling) -> bool:
        return self.tokens[-1] in stop or len(self.tokens) >= sampling.max_response_length


def _sample(scaled: np.ndarray, uniforms: list[float]) -> list[int]:
    """Inverse distribution function: the first token whose cumulated probability exceeds the uniform number."""
    cumulated = np.exp(scaled - scaled.max(1, keepdims=True)).cumsum(1)
    targets = np.asarray(uniforms) * cumulated[:, -1]
    return [
        min(int(np.searchsorted(row, target, side="right")), len(row) - 1)
        for row, target in zip(cumulated, targets, strict=True)
    ]


def _log_softmax_at(scaled: np.ndarray, tokens: list[int]) -> list[float]:
    top = scaled.max(1, keepdims=True)
    log_total = np.log(np.exp(scaled - top).sum(1)) + top[:, 0]
    return (scaled[np.arange(len(tokens)), tokens] - log_total).tolist()
