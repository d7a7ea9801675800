"""What vLLM is asked for one response, and what it answers: the same in this process and in a server."""

from __future__ import annotations

from typing import Any

from megatron_rl.rollout.generator import RolloutError, Sampling


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


def sampling_params(fields: dict[str, Any]) -> Any:
    """vLLM's `SamplingParams` of `sampling_fields`. Raises `ValueError` (or `TypeError`) for what vLLM refuses."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **fields,
        ignore_eos=True,  # stop_token_ids are all that stops
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled_tokens(completion: Any, name: str = "") -> tuple[list[int], list[float]]:
    """Tokens of vLLM's ``completion`` and their log-probs. `RolloutError`, begun with ``name``, where they differ."""
    tokens, logprobs = list(completion.token_ids), completion.logprobs
    if list(logprobs.token_ids) != tokens:
        raise RolloutError(f"{name}log-probs belong to other tokens than were sampled")
    return tokens, logprobs.logprobs
