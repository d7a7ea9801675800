"""Exact mode's kernels at a model's shapes: bits of rows in other batches, and speed beside torch's (docs/gpu.md).

    python -m tools.dev.exact_kernels [--model Qwen3-30B-A3B] [--rows 8192] [--dtypes bf16 fp16 fp32]

Wants a GPU that nothing else uses. With TRITON_INTERPRET=1 it runs on a CPU, for a model as small as
recipes/tiny/model; times are then of the interpreter. Exit status 1 where a row has other bits in another batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_rl.exact.kernels import attention as attention_kernels
from megatron_rl.exact.kernels import gemm
from megatron_rl.model.architecture import Architecture, shape_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FEW = 64  # rows of a decoding step
REPEATS = 10

Tensor = torch.Tensor


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call, the mean of `REPEATS` in a CUDA graph, which waits for no launch."""
    if gemm.INTERPRETED:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(REPEATS):
                call()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / REPEATS


def products(a: Architecture) -> dict[str, tuple[int, int]]:
    """Return the dense products of the model: inner width and columns."""
    query, key = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return {
        "q, k, v": (a.hidden_size, query + 2 * key),
        "output": (query, a.hidden_size),
        "head": (a.hidden_size, a.vocab_size),
    }


def batches(total: int) -> Iterator[Tensor]:
    """Yield random rows of ``total``, in batches of 1 to 1000."""
    for size in sorted({min(size, total) for size in (1, 2, 3, 7, 17, 33, 64, 200, 1000)}):
        yield torch.randperm(total)[:size]


def dense(a: Architecture, rows: int, dtype: torch.dtype) -> int:
    """Print a line for each dense product; return in how many batches a row had other bits."""
    different = 0
    for name, (inner, columns) in products(a).items():
        x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype) / inner**0.5
        whole, few = gemm.linear(x, weight), x[:FEW]
        others = sum(not torch.equal(gemm.linear(x[some], weight), whole[some]) for some in batches(rows))
        rate = 2e-12 * rows * inner * columns
        own, torchs = seconds(lambda x=x, w=weight: gemm.linear(x, w)), seconds(lambda x=x, w=weight: F.linear(x, w))
        step = seconds(lambda x=few, w=weight: gemm.linear(x, w))
        print(
            f"{name:<12} {rows} × {inner} × {columns}: {rate / own:.3g} TFLOP/s, torch {rate / torchs:.3g}; "
            f"{len(few)} rows {step * 1e6:.0f} µs; other bits in {others} batches"
        )
        different += others
    return different


def expert_weights(a: Architecture, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Return the matrices of all experts by product."""
    shapes = {
        "gate and up": (2 * a.moe_ffn_hidden_size, a.hidden_size),
        "down": (a.hidden_size, a.moe_ffn_hidden_size),
    }
    return {
        name: [torch.randn(shape, dtype=dtype) / shape[1] ** 0.5 for _ in range(a.num_experts)]
        for name, shape in shapes.items()
    }


def routed(a: Architecture, tokens: int) -> Tensor:
    """Return the ends of the experts' rows, where ``tokens`` choose experts at random."""
    chosen = torch.randint(0, a.num_experts, (tokens * a.experts_per_token,))
    return torch.bincount(chosen, minlength=a.num_experts).cumsum(0)


def experts(a: Architecture, rows: int, dtype: torch.dtype) -> int:
    """As `dense`, of the grouped products; an expert's rows are compared with the dense kernel's."""
    different = 0
    for name, weights in expert_weights(a, dtype).items():
        for tokens in (rows, min(rows, FEW)):
            ends = routed(a, tokens)
            x = torch.randn(int(ends[-1]), weights[0].shape[1], dtype=dtype)
            whole, cuts = gemm.grouped_linear(x, weights, ends), ends.cpu()[:-1]
            parts = zip(x.tensor_split(cuts), whole.tensor_split(cuts), weights, strict=True)
            others = sum(not torch.equal(gemm.linear(own, weight), out) for own, out, weight in parts if len(own))
            time_s = seconds(lambda x=x, w=weights, e=ends: gemm.grouped_linear(x, w, e))
            rate = 2e-12 * x.numel() * len(weights[0]) / time_s
            print(
                f"{name:<12} {len(x)} rows of {len(weights)} experts: {rate:.3g} TFLOP/s, {time_s * 1e6:.0f} µs; "
                f"other bits in {others} experts"
            )
            different += others
    return different


def attention(a: Architecture, rows: int, dtype: torch.dtype, steps: int) -> int:
    """As `dense`, of causal passes over 1, 4 and 16 sequences; ``steps`` decoding steps of random rows are compared."""
    different, scale, block = 0, a.head_dim**-0.5, attention_kernels.KEY_BLOCK
    for number in (1, 4, 16):
        length = rows // number
        query = torch.randn(number * length, a.num_heads, a.head_dim, dtype=dtype)
        key, value = torch.randn(2, number * length, a.num_kv_heads, a.head_dim, dtype=dtype).unbind()
        sequences, positions = torch.arange(number).repeat_interleave(length), torch.arange(length).repeat(number)
        tiles = attention_kernels.query_tiles([length] * number, a.num_heads // a.num_kv_heads, query.device)
        lasting = tiles, sequences, positions, torch.arange(number) * length, scale

        def whole_pass(q=query, k=key, v=value, lasting=lasting) -> Tensor:
            return attention_kernels.packed_attention(q, k, v, *lasting)

        heads = [x[:length].transpose(0, 1)[None] for x in (query, key, value)]  # torch's: one sequence after the other
        alone = seconds(lambda h=heads: F.scaled_dot_product_attention(*h, is_causal=True, enable_gqa=True))
        torchs = number * alone
        whole, own = whole_pass(), seconds(whole_pass)
        pages = torch.randperm(number * -(-length // block)).view(number, -1)
        cache = torch.zeros(2, pages.numel(), block, a.num_kv_heads, a.head_dim, dtype=dtype)
        cache[:, pages[sequences, positions // block], positions % block] = torch.stack([key, value])

        def step(some: Tensor, q=query, cache=cache, positions=positions, pages=pages[sequences]) -> Tensor:
            return attention_kernels.step_attention(q[some], *cache, positions[some], pages[some], scale)

        drawn = [torch.randperm(len(query))[: int(torch.randint(1, FEW + 1, ()))] for _ in range(steps)]
        others = sum(not torch.equal(step(some), whole[some]) for some in drawn)
        few, rate = torch.randperm(len(query))[:FEW], 2e-12 * number * a.num_heads * a.head_dim * length**2
        print(
            f"{'attention':<12} {number} × {length}: {rate / own:.3g} TFLOP/s, torch {rate / torchs:.3g}; "
            f"step of {len(few)} rows {seconds(lambda: step(few)) * 1e6:.0f} µs; other bits in {others} steps"  # noqa: B023
        )
        different += others
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=Path("Qwen3-30B-A3B"), help="a folder, or the name of a known one"
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=20, help="decoding steps of attention that are compared")
    options = parser.parse_args()
    if not gemm.INTERPRETED:
        torch.set_default_device("cuda")
    torch.manual_seed(0)
    a, _ = shape_of(options.model)
    different = 0
    for name in options.dtypes:
        print(f"{name}, {options.model.name}:")
        given = a, options.rows, DTYPES[name]
        different += dense(*given) + experts(*given) + attention(*given, options.steps)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
