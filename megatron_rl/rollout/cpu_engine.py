"""vLLM on a CPU: a sampler that draws as exact mode does, faster norms, and what its kernels leave out.

*The log-prob of one sampled token* is gathered alone, without a count of more probable tokens.

*One uniform random number per token.* vLLM samples a seeded request by argmax over v of p_v / q_v, q_v ~ Exp(1) drawn
for the whole vocabulary from the request's own torch generator: V numbers of about 20 ns each for one token. Here the
token is the first one whose cumulated probability exceeds u, u ~ U[0, 1): the same distribution from one number. u
comes from a Philox stream that is keyed by the request's seed, as in the exact engine. Both therefore draw the same
responses wherever their log-probs agree closely enough, and a response still does not depend on its batch.

*Norms.* vLLM builds C++ norms for CPUs too, but offers them to GPUs only. Without compilation a CPU runs a norm as five
operations, a tenth of a decoding step of a small model. Importing this module registers the kernels; the engine uses
them when it is given `PRIORITY`.

*Rotary embeddings of queries with a dimension for heads*, as latent attention gives them. vLLM 0.30's kernel for CPUs
turns the first head alone, and raises no error; its own PyTorch form is right.

*Attention sinks.* vLLM 0.30's kernel takes them in bf16 alone, whatever type the engine has; it gets them so.

Shapes: B requests, V vocabulary entries.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm import _custom_ops, ir
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops import topk_topp_sampler as vllm_sampler
from vllm.v1.sample.sampler import Sampler

_attend = _custom_ops.cpu_attention_with_kv_cache  # vLLM's


PROVIDER = "megatron_rl_cpu"
PRIORITY = {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}


def _is_plain_fp32(x: torch.Tensor, weight: torch.Tensor | None, *sizes: object) -> bool:
    # In bf16 and fp16 the kernel rounds once and the single operations twice, which is another policy.
    fits = weight is not None and weight.dtype == x.dtype == torch.float32
    return fits and all(size is None for size in sizes)


def _norm_fits(x, weight, epsilon, variance_size=None) -> bool:
    return _is_plain_fp32(x, weight, variance_size)


def _fused_fits(x, x_residual, weight, epsilon, variance_size=None) -> bool:
    return _is_plain_fp32(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


if PROVIDER not in ir.ops.rms_norm.impls:  # a re-import must not raise
    is_cpu = current_platform.is_cpu()
    ir.ops.rms_norm.register_impl(PROVIDER, supported=is_cpu, supports_args=_norm_fits)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=is_cpu, supports_args=_fused_fits, inplace=True)(
        fused_add_rms_norm
    )


BLOCK = 32  # numbers drawn at a time; the sequence does not depend on it


class UniformStream:
    """Uniform numbers in [0, 1), multiples of 2⁻⁵³, from a Philox counter that is keyed by ``seed`` (64 bits)."""

    def __init__(self, seed: int):
        self._random = np.random.Generator(np.random.Philox(key=seed))
        self._drawn: list[float] = []

    def next(self) -> float:
        if not self._drawn:
            self._drawn = self._random.random(BLOCK)[::-1].tolist()
        return self._drawn.pop()


_gather_with_ranks = Sampler.gather_logprobs  # vLLM's
_streams: WeakKeyDictionary[torch.Generator, UniformStream] = WeakKeyDictionary()


_rotate_on_cpu = RotaryEmbedding.forward_cpu  # vLLM's


def install_rotary() -> None:
    """Put this into vLLM's rotary embedding. Call it before a model is built in this process."""
    RotaryEmbedding.forward_cpu = rotate


def rotate(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``query`` and ``key`` [B, heads · D] or [B, heads, D], turned by the angles of ``positions`` [B]."""
    turn = _rotate_on_cpu if query.dim() == 2 else RotaryEmbedding.forward_native
    return turn(self, positions, query, key)


def install_sinks() -> None:
    """Put this before vLLM's kernel of attention."""
    _custom_ops.cpu_attention_with_kv_cache = attend


def attend(*, s_aux: torch.Tensor | None, **options: Any) -> None:
    """vLLM's kernel. ``s_aux``: the sinks [heads]."""
    _attend(s_aux=None if s_aux is None else s_aux.to(torch.bfloat16), **options)


def install_sampler() -> None:
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
    numbers = (
        torch.rand(size, dtype=torch.float64) if len(generators) < size else torch.empty(size, dtype=torch.float64)
    )
    drawn = np.empty(len(generators))
    for i, generator in enumerate(generators.values()):
        stream = _streams.get(generator)
        if stream is None:
            stream = _streams[generator] = UniformStream(generator.initial_seed())
        drawn[i] = stream.next()
    numbers[list(generators)] = torch.from_numpy(drawn)
    return numbers


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
