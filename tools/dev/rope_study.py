"""How far apart the rotary embeddings of learner and engine leave attention logits in bf16.

    python -m tools.dev.rope_study
    python -m tools.dev.rope_study BIAS

BIAS, else 0, is added to two components of each key, as biases of keys are in Qwen2.5 (100 and more). Queries
and keys of width 128 are drawn from N(0, 1.5²), at positions up to 32768, with Qwen3's base of 1e6. Printed is the root
mean square of the difference of q·k / √128 under two of three arithmetics, read in the sources of each:

fused    TransformerEngine's kernel: tables and products in fp32, one rounding
unfused  Megatron's own: tables, both products and their sum in bf16, as vLLM's CUDA kernel of earlier releases
vllm     vLLM 0.30, on CPUs and GPUs: tables in bf16, products in fp32, one rounding
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

WIDTH, BASE, STD, NUM_PAIRS = 128, 1e6, 1.5, 50_000
POSITIONS = (64, 1024, 8192, 32768)
Tensor = torch.Tensor


def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [N, WIDTH] float32."""
    frequencies = 1.0 / (BASE ** (torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH))
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos + half_turned(x.float()) * sin).to(x.dtype)


def unfused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.to(x.dtype) + half_turned(x) * sin.to(x.dtype)


def vllm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return fused(x, cos.to(x.dtype).float(), sin.to(x.dtype).float())


ARITHMETICS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (fused, unfused, vllm)


def study(longest: int, num_pairs: int = NUM_PAIRS, bias: float = 0.0) -> dict[str, float]:
    """Return the differences, and the standard deviation of the logits, for positions below ``longest``."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(num_pairs, WIDTH, generator=generator) * STD for _ in range(2)]
    vectors[1][:, WIDTH // 2 - 1 :: WIDTH // 2] += bias  # the pair that turns slowest
    vectors = [vector.bfloat16() for vector in vectors]
    places = torch.randint(0, longest, (2, num_pairs), generator=generator).sort(dim=0, descending=True).values
    turned = [(x, *tables(at)) for x, at in zip(vectors, places, strict=True)]
    logits = {}
    for rotate in ARITHMETICS:
        q, k = (rotate(*one).double() for one in turned)
        logits[rotate.__name__] = (q * k).sum(-1) / WIDTH**0.5
    pairs = {"fused - vllm": ("fused", "vllm"), "unfused - vllm": ("unfused", "vllm")}
    apart = {name: (logits[a] - logits[b]).square().mean().sqrt().item() for name, (a, b) in pairs.items()}
    return {"positions": longest, **apart, "std of logits": logits["vllm"].std().item()}


def table(rows: list[dict[str, float]]) -> list[str]:
    head = "positions  fused - vllm  unfused - vllm  std of logits"
    return [head, *("{:9d}  {:12.4f}  {:14.4f}  {:13.2f}".format(*row.values()) for row in rows)]


if __name__ == "__main__":
    print("\n".join(table([study(longest, bias=float([*sys.argv, "0"][1])) for longest in POSITIONS])))
