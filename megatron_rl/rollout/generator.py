"""The interface of an engine that generates, vLLM's parameters for one response, and checks that every engine makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import ValidationConfig
from megatron_rl.errors import Fault, InputError
from megatron_rl.model.architecture import Architecture
from megatron_rl.types import MAX_LOGPROB, Group, Prompt, Rollout, Scores


class RolloutError(Fault):
    """Generation failed: the engine stopped, passed its deadline, or returned what cannot be true.

    `Generator.rollout` raises it on every rank or on none, because the loop then saves, which all ranks take part in.
    """


@dataclass(frozen=True)
class Sampling:
    """The distribution that responses are drawn from, and when they end.

    Example: ``Sampling(max_response_length=24, temperature=0.0)`` is greedy decoding, for validation.
    """

    max_response_length: int  # tokens, stop token included
    temperature: float = 1.0  # 0: the most probable token each time
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    wants_routes: bool = True  # False: routes are left out, though the engine records them
    candidates: int = 0  # most tokens of each kept set (`Rollout.kept_tokens`); 0: sets are not asked for
    head: int = 0  # tokens of each head (`Rollout.head_logprobs`); 0: heads are not asked for

    @property
    def num_logprobs(self) -> int:
        """Most probable tokens that come with each."""
        return self.candidates or self.head

    @classmethod
    def from_config(cls, config: RolloutConfig, vocab_size: int | None = None) -> Sampling:
        """Return how training samples. ``vocab_size``: of the model, where the engine may return kept sets."""
        candidates = min(config.candidates, vocab_size or 0)
        limits = config.max_response_length, config.temperature, config.top_p, config.top_k
        return cls(*limits, candidates=candidates, head=config.sampled_head)

    @classmethod
    def of_validation(cls, rollout: RolloutConfig, validation: ValidationConfig) -> Sampling:
        return cls(rollout.max_response_length, validation.temperature, validation.top_p, wants_routes=False)


class RolloutInterrupted(RolloutError):
    """A stop was requested while nothing could be sampled, so the wait was given up."""


@dataclass(frozen=True)
class LegCounts:
    """How weight updates met some responses that were under way (`rollout.in_flight`): sums over the responses."""

    legs: int = 0  # requests whose tokens make them up
    versions: int = 0  # policies that sampled them
    recomputed_tokens: int = 0  # tokens of theirs that later legs read again

    def __add__(self, other: LegCounts) -> LegCounts:
        return LegCounts(
            self.legs + other.legs,
            self.versions + other.versions,
            self.recomputed_tokens + other.recomputed_tokens,
        )

    def metrics(self, num_responses: int) -> dict[str, float]:
        return {
            "rollout/recomputed_tokens": float(self.recomputed_tokens),
            "rollout/legs_mean": self.legs / num_responses,
            "rollout/versions_mean": self.versions / num_responses,
        }


class Generator(Protocol):
    """An engine that samples responses and takes new weights.

    With several ranks every method is collective: all ranks call it, with the same arguments. All return the same
    groups, but the arrays and the text of a response may be on one rank alone (`Rollout.owner`).
    """

    def rollout(
        self,
        prompts: list[Prompt],
        num_samples: int,
        *,
        policy_version: int,
        step: int,
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """Sample ``num_samples`` responses to each prompt, in the order of ``prompts``.

        ``policy_version``: optimizer step of the weights the engine must hold; a refit that was forgotten is an error.
        ``step``: enters the seeds. ``sampling``: instead of the recipe's, for validation. Log-probs are log mu of the
        distribution actually sampled from. Under greedy decoding (temperature 0) they are the model's at temperature 1,
        and must not be trained on.
        """
        ...

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replace all weights. ``weights``: name and tensor as in the Hugging Face checkpoint, one at a time, all of
        them, in any floating dtype (converted straight to the engine's). A tensor must keep its values until the
        stream ends, because some engines gather a layer before they load it."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back while the learner works, where the platform can."""
        ...

    def wake(self) -> None:
        """Take the memory again. The weights are those that the engine had when it fell asleep."""
        ...

    def stats(self) -> dict[str, float]:
        """Metrics of the last rollout and refit: names under ``perf/``."""
        ...

    def close(self) -> None:
        """End the engine, leaving the learner's process groups as they are. Safe to call twice."""
        ...


Listener = Callable[[Prompt, list[Rollout]], None]
"""Gets a prompt and complete responses to it that this rank owns; each response once."""


@runtime_checkable
class AnnouncingGenerator(Protocol):
    """A `Generator` that tells of responses while it samples others, so that they can be scored meanwhile."""

    def announce_to(self, listener: Listener) -> None:
        """Call ``listener`` with each response that becomes complete from now on. It must return at once; any thread
        may call it."""
        ...


def sampling_fields(sampling: Sampling, seed: int, stop_token_ids: list[int]) -> dict[str, Any]:
    """What differs from call to call, as JSON can hold it."""
    return {
        "max_tokens": sampling.max_response_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
        "stop_token_ids": stop_token_ids,
    }


def sampling_params(fields: dict[str, Any], num_logprobs: int = 0) -> Any:
    """vLLM's `SamplingParams` of `sampling_fields`. Raises `ValueError` (or `TypeError`) for what vLLM refuses.

    ``num_logprobs``: as in `Sampling`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **fields,
        ignore_eos=True,  # stop_token_ids are all that stops
        logprobs=num_logprobs,  # 0: of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params(top_k: int = 0) -> Any:
    """vLLM's `SamplingParams` of a request for the log-prob of each token of its prompt, and of the ``top_k`` most
    probable ones at each place."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=top_k,  # beside the prompt's own token
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_scores(output: Any, first: int, top_k: int = 0) -> Scores:
    """`Scores` of a prompt's tokens from ``first`` on (1 or more), from vLLM's answer.

    Raises `RolloutError` where they belong to other tokens.
    """
    flat = output.prompt_logprobs
    if flat is None:
        raise RolloutError("a prompt came back without log-probs")
    _, *found = _with_head(list(output.prompt_token_ids)[1:], flat, top_k, "prompt: ")
    logprobs, tokens, of_tokens = (array[first - 1 :] for array in found)
    return Scores(logprobs, tokens, of_tokens) if top_k else Scores(logprobs)


def checked_scores(rollout: Rollout, scores: Scores, top_k: int = 0) -> Scores:
    """Return ``scores`` if they can be those of the tokens of ``rollout``; -inf can. Else raise `RolloutError`."""
    logprobs, tokens, of_tokens = scores
    if len(logprobs) != rollout.length:
        raise RolloutError(f"response {rollout.id}: {rollout.length} tokens came back with {len(logprobs)} log-probs")
    if not (logprobs <= MAX_LOGPROB).all():
        worst = int(np.argmax(~(logprobs <= MAX_LOGPROB)))
        raise RolloutError(f"response {rollout.id}: log-prob {logprobs[worst]} of token {worst} is impossible")
    if top_k and not (tokens is not None and tokens.shape == of_tokens.shape == (rollout.length, top_k)):
        raise RolloutError(f"response {rollout.id}: not {top_k} log-probs of each token (teacher.top_k) came back")
    if top_k and not (of_tokens <= MAX_LOGPROB).all():
        raise RolloutError(f"response {rollout.id}: a log-prob of the teacher's most probable tokens is impossible")
    return scores


def sampled_tokens(completion: Any, name: str = "") -> tuple[list[int], list[float]]:
    """Tokens of vLLM's ``completion`` and their log-probs. `RolloutError`, begun with ``name``, where they differ."""
    tokens, logprobs = list(completion.token_ids), completion.logprobs
    if list(logprobs.token_ids) != tokens:
        raise RolloutError(f"{name}log-probs belong to other tokens than were sampled")
    return tokens, logprobs.logprobs


COMPLETE = 1e-4
"""A kept set whose probabilities add up to 1 within this is complete. Log-probs in float32 of logits up to 128 are off
by up to 7.6e-6 each; tokens that are missing with less probability change no ratio by more than this."""


Sampled = tuple[list[int], np.ndarray, np.ndarray, np.ndarray]
"""Tokens [R], their log-probs [R] float32, and at each place some of the most probable tokens [R, k] int32 with theirs
[R, k] float32."""


def sampled_with_head(completion: Any, head: int, name: str = "") -> Sampled:
    """What vLLM's ``completion`` says of the sampled and of the ``head`` most probable tokens. Raises `RolloutError`,
    begun with ``name``, where the answer is another."""
    return _with_head(list(completion.token_ids), completion.logprobs, head, name)


def _with_head(tokens: list[int], logprobs: Any, head: int, name: str) -> Sampled:
    """The same of vLLM's flat ``logprobs`` of ``tokens``."""
    shape = (len(tokens), head + 1)
    count = shape[0] * shape[1]
    if not len(logprobs.token_ids) == len(logprobs.logprobs) == count:
        raise RolloutError(f"{name}{len(logprobs.token_ids)} log-probs of {shape[0]} tokens, not {shape[1]} of each")
    ids = np.fromiter(logprobs.token_ids, np.int32, count).reshape(shape)  # half of the time of np.array
    values = np.fromiter(logprobs.logprobs, np.float32, count).reshape(shape)
    if ids[:, 0].tolist() != tokens:
        raise RolloutError(f"{name}log-probs belong to other tokens than were sampled")
    return tokens, values[:, 0].copy(), ids[:, 1:].copy(), values[:, 1:].copy()


def sampled_with_sets(completion: Any, candidates: int, name: str = "") -> Sampled:
    """The same with the kept sets [R, C] int32, then -1, whose log-probs are -inf there.

    vLLM returned the ``candidates`` most probable tokens at each place; what top-k and top-p cut has log-prob -inf.
    More tokens than that can be kept where many tie with the last one. The set is then the tokens at hand, and mu is
    given over it: mu(y) / Σ mu. Raises what `sampled_with_head` does.
    """
    tokens, sampled, ids, values = sampled_with_head(completion, candidates, name)
    kept, chosen = np.where(np.isneginf(values), -1, ids), np.array(tokens, np.int32)
    absent = ~(kept == chosen[:, None]).any(axis=1)  # it ties with the last candidate
    kept[absent, -1], values[absent, -1] = chosen[absent], sampled[absent]
    mass = np.exp(values.astype(np.float64)).sum(axis=1)
    short = mass < 1 - COMPLETE
    sampled[short] -= np.log(mass[short])
    values[short] -= np.log(mass[short, None])
    return tokens, sampled, kept, values


def check_version(who_holds: str, held: int, wanted: int) -> None:
    """Raise `RolloutError` unless the weights that are asked for are there. ``who_holds`` begins the message."""
    if wanted != held:
        raise RolloutError(
            f"{who_holds} the weights of policy version {held}, rollouts of {wanted} were asked for: a refit is missing"
        )


def check_token_versions(name: str, versions: np.ndarray, begun_with: int, exactly: bool) -> int:
    """How many policies sampled a response: ``versions`` [R] of its tokens, each ``begun_with`` or later.

    Raises `RolloutError`, begun with ``name``, for a token of older weights; with ``exactly``, of any others.
    """
    wrong = versions != begun_with if exactly else versions < begun_with
    if wrong.any():
        token = int(wrong.argmax())
        due = f"{begun_with}" if exactly else f"{begun_with} or a later one, with which its batch was begun"
        raise RolloutError(f"{name}: token {token} was sampled by policy version {versions[token]}, expected {due}")
    return 1 + int(np.count_nonzero(np.diff(versions)))


TOO_SHORT = (
    "vLLM would begin it with the state of another sequence: give two tokens, or set rollout.enforce_eager: true"
)


def shortest_prompt(architecture: Architecture, eager: bool) -> int:
    """Return 2 where vLLM would take a prompt of one token for a step of decoding (see `delta_net`), else 1."""
    return 1 if architecture.linear is None or eager else 2


def check_lengths(
    prompts: list[Prompt], sampling: Sampling, max_prompt_length: int, max_response_length: int, shortest: int = 1
) -> None:
    """Raise `InputError` where ``prompts`` or ``sampling`` go beyond what the engine was started for.

    ``shortest``: see `shortest_prompt`.
    """
    if sampling.max_response_length > max_response_length:
        raise InputError(
            f"sampling: max_response_length {sampling.max_response_length} is above the engine's "
            f"{max_response_length} (rollout.max_response_length)"
        )
    for prompt in prompts:
        if not shortest <= len(prompt.tokens) <= max_prompt_length:
            raise InputError(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens; {shortest} … {max_prompt_length} are allowed "
                f"({TOO_SHORT if len(prompt.tokens) == 1 else 'data.prompt.max_length'})"
            )


def throughput(rollouts: list[Rollout], seconds: float) -> dict[str, float]:
    """`perf/*` of a call that took ``seconds``. Tokens are those that were sampled."""
    num_tokens = sum(rollout.num_sampled for rollout in rollouts)
    return {"perf/rollout_tokens": float(num_tokens), "perf/tokens_per_s/rollout": num_tokens / seconds}
