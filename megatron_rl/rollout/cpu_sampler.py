"""vLLM's sampler on a CPU, without results that are not used.

*One uniform random number per token.* vLLM 0.30 samples a seeded request by argmax over v of p_v / q_v, q_v ~ Exp(1)
drawn for the whole vocabulary from the request's own torch generator: for one token V numbers of about 20 ns each, one
request after the other. Here the token is the first one whose cumulated probability exceeds u, u ~ U[0, 1): the same
distribution from one number. u comes from a Philox stream that is keyed by the request's seed, as in the exact engine,
so that both draw the same responses wherever their log-probs agree closely enough, and a response still does not depend
on its batch.

*The log-prob of the sampled token alone.* vLLM also selects the 0 most probable others and counts the more probable
tokens, in a function that it compiles.

Shapes: B requests, V vocabulary entries.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops import topk_topp_sampler as vllm_sampler
from vllm.v1.sample.sampler import Sampler

from megatron_rl.rollout.uniforms import UniformStream

_gather_with_ranks = Sampler.gather_logprobs  # vLLM's
_streams: WeakKeyDictionary[torch.Generator, UniformStream] = WeakKeyDictionary()


def install() -> None:
    """Put this into vLLM's sampler for CPUs. Call it before an engine starts in this process."""
    vllm_sampler.TopKTopPSampler.forward_cpu = forward_cpu
    Sampler.gather_logprobs = staticmethod(gather_logprobs)


def forward_cpu(
    self: vllm_sampler.TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``logits`` [B, V] float32, after temperature; ``generators``: by row → tokens [B] int64, and what to return."""
    logits = vllm_sampler.apply_top_k_top_p(logits, k, p)
    returned = None
    if self.logprobs_mode == "processed_logits":
        returned = logits
    elif self.logprobs_mode == "processed_logprobs":
        returned = logits.log_softmax(dim=-1, dtype=torch.float32)
    return select(logits.softmax(dim=-1, dtype=torch.float32), uniforms(generators, len(logits))), returned


def uniforms(generators: dict[int, torch.Generator], size: int) -> torch.Tensor:
    """[size] float64: the next number of every row's stream; rows without a seed take torch's global generator."""
    found = torch.rand(size, dtype=torch.float64) if len(generators) < size else torch.empty(size, dtype=torch.float64)
    drawn = np.empty(len(generators))
    for i, generator in enumerate(generators.values()):
        stream = _streams.get(generator)
        if stream is None:
            stream = _streams[generator] = UniformStream(generator.initial_seed())
        drawn[i] = stream.next()
    found[list(generators)] = torch.from_numpy(drawn)
    return found


def select(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse distribution function: ``probs`` [B, V] ≥ 0, ``uniforms`` [B] float64 in [0, 1) → tokens [B] int64.

    A token of probability 0 is never drawn, because its cumulated probability is that of the token before it. The
    target is below the total however it is rounded: the largest u is 1 - 2⁻⁵³, and total · 2⁻⁵³ is at least half a unit
    in the total's last place, exactly half only for powers of two, below which units are half as large.
    """
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, targets, right=True).squeeze(1)
    return tokens.clamp_(max=probs.shape[1] - 1)  # for NaN, which is reported by its log-prob


def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """``logprobs`` [B, V], ``token_ids`` [B] → the tokens' log-probs. Their ranks are 0 where no others are wanted."""
    if num_logprobs:
        return _gather_with_ranks(logprobs, num_logprobs, token_ids)
    tokens = token_ids[:, None]
    return LogprobsTensors(tokens.to(torch.int32), logprobs.gather(1, tokens), torch.zeros_like(token_ids))
