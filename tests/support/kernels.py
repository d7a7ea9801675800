"""Exact mode's Triton kernels: python -m tests.support.kernels BATCHES TYPES [cuda]. Prints JSON.

A process of its own, because Triton decides at its import whether it interprets, and because the environment holds no
Triton: the tests' folder for TransformerEngine does.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.rounding import assert_as_double, gamma, unit_roundoff
from tests.support.te import run_interpreted

COMPOSITIONS = 70  # of the batch, for each type; the command line may have other numbers of both
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FUNCTION = 8  # roundings that exp, log and the like count as
Tensor = torch.Tensor


def run(compositions: int, types: int) -> dict[str, dict[str, Any]]:
    """What the program prints, from one process for all kernels: so many random batches of the last of the types."""
    return json.loads(run_interpreted("tests.support.kernels", str(compositions), str(types)).splitlines()[-1])


def some_rows(total: int, most: int = 12) -> Tensor:
    """Up to ``most`` of ``total`` rows, in any order."""
    return torch.randperm(total)[: int(torch.randint(1, most + 1, ()))]


def error(computed: Tensor, exact: Tensor, bound: Tensor | float) -> float:
    """Largest error as a share of its bound, to which the rounding to the type of ``computed`` is added."""
    stored = unit_roundoff(computed.dtype) if computed.dtype != torch.float32 else 0.0
    allowed = torch.as_tensor(bound, dtype=torch.float64) * (1 + stored) + stored * exact.abs()
    allowed = allowed + torch.finfo(computed.dtype).smallest_normal
    return float(((computed.double() - exact).abs() / allowed).max())


def compositions(whole: Tensor, call: Callable[[Tensor], Tensor], most: int = 12) -> int:
    """In how many random batches a row of ``call(rows)`` has other bits than in ``whole``."""
    different = 0
    for _ in range(COMPOSITIONS):
        rows = some_rows(len(whole), most)
        different += not torch.equal(call(rows), whole[rows])
    return different


def linear(dtype: torch.dtype) -> dict[str, Any]:
    from megatron_rl.exact import invariant
    from megatron_rl.exact.kernels import gemm

    x, weight = torch.randn(100, 80, dtype=dtype), torch.randn(40, 80, dtype=dtype)
    whole = gemm.linear(x, weight)
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    different = compositions(whole, lambda rows: gemm.linear(x[rows], weight))
    gemm.SMALL, tile = gemm.SMALL._replace(terms=16), gemm.SMALL  # a mutation: sums in other blocks for a small batch
    mutated = torch.equal(gemm.linear(x[:3], weight), whole[:3])
    gemm.SMALL = tile
    return {
        "different": different,
        "error": error(whole, exact, gamma(80, torch.float32) * size),
        "cpu": error(invariant.linear(x, weight), exact, gamma(80, torch.float32) * size),
        "many rows": not x.is_cuda or torch.equal(gemm.linear(x.repeat(11, 1), weight), whole.repeat(11, 1)),
        # A GPU adds fp32 products one by one, so that blocks change nothing.
        "mutation seen": not mutated or dtype != torch.float32 or x.is_cuda,
    }


def grouped(dtype: torch.dtype) -> dict[str, Any]:
    from megatron_rl.exact import invariant
    from megatron_rl.exact.kernels import gemm

    experts, x = torch.randint(0, 5, (90,)).sort().values, torch.randn(90, 48, dtype=dtype)
    experts[experts == 2] = 3  # one without rows
    weights = [torch.randn(24, 48, dtype=dtype) for _ in range(5)]  # wherever each lies in memory
    single = torch.cat([gemm.linear(x[i : i + 1], weights[e]) for i, e in enumerate(experts)])
    exact = torch.stack([x[i].double() @ weights[e].double().t() for i, e in enumerate(experts)])
    size = torch.stack([x[i].double().abs() @ weights[e].double().abs().t() for i, e in enumerate(experts)])
    cpu = torch.cat([invariant.linear(x[experts == e], weights[e]) for e in range(5)])

    def call(rows: Tensor) -> Tensor:
        rows = rows.sort().values
        ends = torch.bincount(experts[rows], minlength=5).cumsum(0)
        spare = F.pad(x[rows], (0, 0, 0, int(torch.randint(0, 9, ()))))  # rows behind the last end are not touched
        return gemm.grouped_linear(spare, weights, ends)[: len(rows)]

    different = 0
    for _ in range(COMPOSITIONS):
        rows = some_rows(90, 20)
        different += not torch.equal(call(rows), single[rows.sort().values])
    if x.is_cuda:  # many rows of each expert
        ends = gemm.MANY * torch.bincount(experts, minlength=5).cumsum(0)
        many = gemm.grouped_linear(x.repeat_interleave(gemm.MANY, 0), weights, ends)
        different += not torch.equal(many, single.repeat_interleave(gemm.MANY, 0))
    bound = gamma(48, torch.float32) * size
    return {"different": different, "error": error(single, exact, bound), "cpu": error(cpu, exact, bound)}


def rms_norm(dtype: torch.dtype) -> dict[str, Any]:
    from megatron_rl.exact.kernels import rows as kernels
    from megatron_rl.layers.cpu_layers import rms_norm as cpu

    x, weight = torch.randn(60, 72, dtype=dtype) * 3, torch.randn(72, dtype=dtype)
    whole = kernels.rms_norm(x, weight, 1e-6)
    exact = F.rms_norm(x.double(), (72,), weight.double(), 1e-6)
    bound = gamma(72 + 8, torch.float32) * exact.abs()  # squares and their sum count half, under the root
    return {
        "different": compositions(whole, lambda rows: kernels.rms_norm(x[rows], weight, 1e-6)),
        "error": error(whole, exact, bound),
        "cpu": error(cpu(x, weight, 1e-6)[0], exact, bound),
    }


def rotate(dtype: torch.dtype) -> dict[str, Any]:
    from megatron_rl.exact.kernels import rows as kernels

    x, angle = torch.randn(40, 3, 20, dtype=dtype), 100 * torch.rand(40, 10)
    cos, sin = angle.cos(), angle.sin()
    whole = kernels.rotate(x, cos, sin)
    first, second = x.double().chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    exact = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    size = torch.cat([(first * c).abs() + (second * s).abs(), (second * c).abs() + (first * s).abs()], dim=-1)
    return {
        "different": compositions(whole, lambda rows: kernels.rotate(x[rows], cos[rows], sin[rows]), most=6),
        "error": error(whole, exact, gamma(2, torch.float32) * size),
    }


def gated_silu(dtype: torch.dtype) -> dict[str, Any]:
    from megatron_rl.exact.kernels import rows as kernels
    from megatron_rl.layers.cpu_layers import gated_silu as cpu

    hidden, probs = torch.randn(60, 66, dtype=dtype), torch.rand(60)
    whole = kernels.gated_silu(hidden, probs)
    gate, up = hidden.double().chunk(2, dim=-1)
    exact = F.silu(gate) * up * probs.double()[:, None]
    bound = gamma(FUNCTION + 4, torch.float32) * exact.abs()
    figures = {
        "different": compositions(whole, lambda rows: kernels.gated_silu(hidden[rows], probs[rows])),
        "error": error(whole, exact, bound),
    }
    if dtype == torch.float32:  # in 16 bits the CPU's rounds in between
        figures["cpu"] = error(cpu(hidden, probs), exact, bound)
    return figures


def route(dtype: torch.dtype) -> dict[str, Any]:
    from megatron_rl.exact.kernels import rows as kernels

    logits = torch.randn(60, 20, dtype=dtype)
    logits[:, 7] = logits[:, 3]  # equal ones: the lower index first
    figures = {}
    for normalize in (True, False):
        experts, probs = kernels.route(logits, 4, normalize)
        softmax = logits.double().softmax(-1)
        order = (-logits.double()).argsort(dim=-1, stable=True)[:, :4].sort(dim=-1).values
        exact = softmax.gather(1, order)
        exact = exact / exact.sum(-1, keepdim=True) if normalize else exact
        figures |= {
            f"experts {normalize}": torch.equal(experts.long(), order),
            f"error {normalize}": error(probs, exact, gamma(2 * FUNCTION + 20 + 4, torch.float32) * exact),
        }
    different = sum(
        not all(map(torch.equal, kernels.route(logits[rows], 4, False), (experts[rows], probs[rows])))
        for rows in (some_rows(60) for _ in range(COMPOSITIONS))
    )
    unknown = kernels.route(torch.full((1, 20), float("nan")), 4, True)
    return figures | {
        "different": different,
        "not a number": unknown[0].tolist() == [[0, 1, 2, 3]] and bool(unknown[1].isnan().all()),
    }


def combine(dtype: torch.dtype) -> dict[str, Any]:
    from megatron_rl.exact import kernel_ops
    from megatron_rl.exact.kernels import rows as kernels

    rows, places = torch.randn(120, 300, dtype=dtype), torch.randperm(120).view(40, 3)
    whole = kernels.combine(rows, places)
    parts = rows.double()[places]
    order = rows[places[:, 0]].float() + rows[places[:, 1]].float() + rows[places[:, 2]].float()
    # A training pass has the rows sorted by expert, and says of each which token it goes to.
    token = torch.empty(120, dtype=torch.long)
    token[places.sort(dim=1).values] = torch.arange(40)[:, None]
    sorted_places = kernels.combine(rows, places.sort(dim=1).values)
    added = kernel_ops.add_rows(torch.zeros(40, 300, dtype=dtype), token, rows)
    some = kernel_ops.add_rows(torch.zeros(50, 300, dtype=dtype), token[:70] + 3, rows[:70])  # some get none
    return {
        "different": compositions(whole, lambda some: kernels.combine(rows, places[some]), most=5),
        "in order": torch.equal(whole, order.to(dtype)),
        "training": torch.equal(added, sorted_places),
        "others": not some[:3].any() and not some[43:].any(),
        "error": error(whole, parts.sum(1), gamma(2, torch.float32) * parts.abs().sum(1)),
    }


def sort_by_expert(dtype: torch.dtype) -> dict[str, Any]:
    """Against a stable sort, whichever experts are here; 400 tokens are two looks of a program."""
    from megatron_rl.exact.kernels.rows import sort_by_expert as kernel

    def differs(number: int, first: int, num_local: int) -> bool:
        chosen, probs = torch.rand(number, 12).topk(3).indices.sort(1).values, torch.rand(number, 3).to(dtype)
        tokens, sorted_probs, places, ends = kernel(chosen, probs, first, num_local)
        is_here = (chosen >= first) & (chosen < first + num_local)
        order = chosen.where(is_here, 12).flatten().argsort(stable=True)
        counts = torch.stack([(chosen == first + expert).sum() for expert in range(num_local)])
        return not (
            torch.equal(tokens, order // 3)
            and torch.equal(sorted_probs, probs.flatten()[order])
            and torch.equal(places.flatten()[order], torch.arange(order.numel()))
            and torch.equal(ends.long(), counts.cumsum(0))
        )

    cases = [(400, 4, 5), *((int(torch.randint(1, 30, ())), first, 12 - first) for first in (0, 3, 11) * 20)]
    return {"different": sum(differs(*case) for case in cases), "cases": len(cases) > 60}


def log_prob(dtype: torch.dtype) -> dict[str, Any]:
    """Statistics of logits, and the log-probs and entropies that come of them, whole and in two parts of which the
    second has padding."""
    from megatron_rl.exact.kernels import rows as kernels

    logits, tokens = 5 * torch.randn(40, 2500, dtype=torch.float32).to(dtype), torch.randint(0, 2500, (40,))
    everything = torch.arange(40)
    whole = kernels.token_statistics(logits, everything, tokens, temperature=0.9).t()

    def call(rows: Tensor) -> Tensor:
        return kernels.token_statistics(logits, rows, tokens[rows], temperature=0.9).t()

    def finished(top: Tensor, total: Tensor, chosen: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
        logsumexp = top + total.log()
        return chosen - logsumexp, logsumexp - weighted / total

    padded = F.pad(logits, (0, 30), value=100.0)
    parts = [
        kernels.token_statistics(part.contiguous(), everything, tokens, first=first, width=width, temperature=0.9)
        for part, first, width in ((padded[:, :1265], 0, 1265), (padded[:, 1265:], 1265, 1235))
    ]
    top = torch.maximum(parts[0][0], parts[1][0])
    shares = [(part[0] - top).exp() for part in parts]
    joined = [sum(part[i] * share for part, share in zip(parts, shares, strict=True)) for i in (1, 3)]
    nothing = kernels.token_statistics(logits, everything, tokens, first=2500, width=0)
    scaled = logits.double() / 0.9
    log_p = scaled.log_softmax(-1)
    exact = log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    largest = scaled.abs().max()
    # Each scaled logit is rounded twice; relative errors of a sum are absolute ones of its logarithm.
    terms = gamma(2, torch.float32) * 3 * largest + gamma(2 * FUNCTION + 2500, torch.float32)
    bounds = [terms + gamma(4, torch.float32) * (e.abs() + largest) for e in exact]
    bounds[1] = bounds[1] + 2 * terms * largest  # of the mean logit, a quotient of two sums
    results = {"whole": finished(*whole.t()), "parts": finished(top, joined[0], parts[0][2] + parts[1][2], joined[1])}
    errors = {
        f"{name} {what}": error(values[i], exact[i], bounds[i])
        for name, values in results.items()
        for i, what in enumerate(("log-prob", "entropy"))
    }
    return errors | {
        "different": compositions(whole, call, most=6),
        "of no columns": nothing.tolist() == [[float("-inf")] * 40, [0.0] * 40, [0.0] * 40, [0.0] * 40],
    }


def gradients(dtype: torch.dtype) -> dict[str, Any]:
    """Of what exact mode calls: those of PyTorch's functions at the same place, bit for bit."""
    from megatron_rl.exact import kernel_ops

    def of(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = function(*leaves)
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        gradient = torch.randn(out.shape, generator=generator).to(dtype)
        return torch.autograd.grad(out, leaves, gradient.to(out.dtype))

    def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for qkv in zip(*(x.split([9, 20]) for x in (q, k, v)), strict=True):
            heads = [x.transpose(0, 1)[None] for x in qkv]
            out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    def plain_rotation(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = angle.cos()[:, None].to(dtype), angle.sin()[:, None].to(dtype)
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1)

    def plain_route(logits: Tensor, normalize: bool) -> Tensor:
        chosen = logits.topk(3).indices.sort(1).values
        of = logits.gather(1, chosen) if normalize else logits
        probs = of.softmax(-1, dtype=torch.float32)
        return (probs if normalize else probs.gather(1, chosen)).to(dtype)

    def plain_experts(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        parts = []
        for rows, p, fc1, fc2 in zip(*(y.split(counts.tolist()) for y in (x, probs)), weights[:3], weights[3:]):
            gate, up = F.linear(rows, fc1).chunk(2, dim=-1)
            parts.append(F.linear(F.silu(gate) * up * p[:, None], fc2))
        return torch.cat(parts)

    def kernel_experts(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        return kernel_ops.trained_experts(x, probs, counts, weights[:3], weights[3:])

    def experts_are_near() -> bool:
        """Their gradients start from what the kernel has put out before the gate, so only their bounds are known."""
        inputs = (x, probs, *fc1, *fc2)
        try:
            assert_as_double(of(kernel_experts, *inputs), lambda *y: of(plain_experts, *y), inputs, longest_sum=32)
        except AssertionError:
            return False
        return True

    def added(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda source: function(torch.zeros(5, 32, dtype=dtype), source)

    places, counts, angle = (
        torch.tensor([3, 0, 3, 4, 0, 0, 3, 1, 1, 4, 3, 0]),
        torch.tensor([5, 0, 7]),
        torch.rand(12, 4),
    )
    fc1, fc2 = ([torch.randn(shape).to(dtype) / 4 for _ in range(3)] for shape in ((32, 32), (32, 16)))
    x, weight, scale = (torch.randn(shape).to(dtype) for shape in ((12, 32), (20, 32), (32,)))
    probs, heads, logits = torch.rand(12).to(dtype), torch.randn(12, 3, 8).to(dtype), torch.randn(12, 7).to(dtype)
    qkv = [torch.randn(29, heads, 16).to(dtype) for heads in (4, 2, 2)]
    pairs = {
        "product": (of(kernel_ops.product, x, weight), of(F.linear, x, weight)),
        "norm": (
            of(lambda x, w: kernel_ops.rms_norm(x, (32,), w, 1e-6), x, scale),
            of(lambda x, w: F.rms_norm(x, (32,), w, 1e-6), x, scale),
        ),
        "attention": (
            of(lambda q, k, v: kernel_ops.packed_attention(q, k, v, [9, 20], 0.3), *qkv),
            of(plain_attention, *qkv),
        ),
    }
    pairs |= {
        "rotation": (of(lambda x: kernel_ops.rotate(x, angle.cos(), angle.sin()), heads), of(plain_rotation, heads)),
        "rows": (
            of(added(lambda target, source: kernel_ops.add_rows(target, places, source)), x),
            of(added(lambda target, source: target.index_add(0, places, source)), x),
        ),
    }
    for normalize in (True, False):
        pairs[f"router {normalize}"] = (
            of(lambda x, n=normalize: kernel_ops.route(x, 3, n)[0], logits),
            of(lambda x, n=normalize: plain_route(x, n), logits),
        )
    same = {name: all(map(torch.equal, *pair)) for name, pair in pairs.items()}
    return {"different": 0, "experts": experts_are_near()} | same


def _sequences(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return sequences, positions, torch.tensor([0, *lengths[:-1]]).cumsum(0)


def attention(dtype: torch.dtype) -> dict[str, Any]:
    """A training pass, and single steps in pages, of any sequences beside each other."""
    from megatron_rl.exact import invariant
    from megatron_rl.exact.kernels import attention as kernels

    kernels.SPLIT = 2  # so that 70 keys are two splits, of which the shorter sequences see one; so has `layer` below
    lengths, heads, kv_heads, width, scale = [70, 9, 33, 1], 6, 2, 24, 0.3
    total = sum(lengths)
    query = torch.randn(total, heads, width, dtype=dtype)
    key, value = torch.randn(2, total, kv_heads, width, dtype=dtype).unbind()
    sequences, positions, starts = _sequences(lengths)
    tiles = kernels.query_tiles(lengths, heads // kv_heads, query.device)
    whole = kernels.packed_attention(query, key, value, tiles, sequences, positions, starts, scale)
    # The cache: pages in any order, what no token was written to is not read.
    pages = torch.randperm(12).view(4, 3)
    cache = torch.full((2, 12, kernels.KEY_BLOCK, kv_heads, width), float("nan"), dtype=dtype)
    cache[:, pages[sequences, positions // 32], positions % 32] = torch.stack([key, value])
    different = 0
    for _ in range(COMPOSITIONS):
        rows = some_rows(total, 4)
        computed = kernels.step_attention(query[rows], *cache.unbind(), positions[rows], pages[sequences[rows]], scale)
        different += not torch.equal(computed, whole[rows])
    padded = [F.pad(x[:70], (0, 0, 0, 0, 0, 26)).transpose(0, 1)[None] for x in (query, key, value)]
    cpu = invariant.attention(*padded, torch.arange(96)[None].clamp(max=69), scale)[0].transpose(0, 1)[:70]
    q, k, v = (x[:70].double().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    exact = (scores.softmax(-1) @ v).transpose(0, 1)
    size = (scores.softmax(-1) @ v.abs()).transpose(0, 1)
    # An absolute error of a score is a relative one of its weight; both sums have 70 terms, and 3 blocks are rescaled
    # and two splits joined, with a rescaling of each.
    slack = gamma(width + 2, torch.float32) * (q.abs() @ k.abs().transpose(1, 2) * scale).max()
    bound = (2 * slack + gamma(2 * (70 + FUNCTION + 7 * (FUNCTION + 2)), torch.float32)) * size
    rounded = bound
    if dtype != torch.float32:  # weights, which fp16 has no more than 2^-24 of below its normal numbers
        least = 2.0**-25 if dtype == torch.float16 else 0.0
        rounded = bound * (1 + unit_roundoff(dtype)) + unit_roundoff(dtype) * size + least * v.abs().sum(1)
    return {
        "different": different,
        "error": error(whole[:70], exact, rounded),
        "cpu": error(cpu, exact, bound),
    }


def layer(dtype: torch.dtype) -> dict[str, Any]:
    """A whole layer of experts: training pass = prompt + steps with a paged cache, beside any other sequences."""
    from megatron_rl.exact.kernels import attention, gemm, rows

    hidden, heads, kv_heads, width, experts, top, inner = 32, 4, 2, 16, 6, 2, 20
    qkv, out = torch.randn((heads + 2 * kv_heads) * width, hidden) / 6, torch.randn(hidden, heads * width) / 8
    router, fc1 = torch.randn(experts, hidden) / 6, torch.randn(experts, 2 * inner, hidden) / 6
    fc2, norm = torch.randn(experts, hidden, inner) / 5, torch.rand(hidden) + 0.5
    qkv, out, router, fc1, fc2, norm = (x.to(dtype) for x in (qkv, out, router, fc1, fc2, norm))

    def forward(x: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        angle = positions[:, None] * 0.5 ** torch.arange(width // 2)
        mixed = gemm.linear(rows.rms_norm(x, norm, 1e-6), qkv).view(len(x), -1, width)
        q, k, v = mixed.split([heads, kv_heads, kv_heads], dim=1)
        q, k = (rows.rotate(part, angle.cos(), angle.sin()) for part in (q, k))
        x = x + gemm.linear(attend(q, k, v.contiguous()).flatten(1), out)
        y = rows.rms_norm(x, norm, 1e-6)
        chosen, probs = rows.route(gemm.linear(y, router), top, True)
        flat, order = chosen.flatten().long().sort(stable=True)
        ends = torch.bincount(flat, minlength=experts).cumsum(0)
        permuted = y[order // top]
        weights = probs.flatten()[order]
        activated = rows.gated_silu(gemm.grouped_linear(permuted, fc1.unbind(), ends), weights)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        return x + rows.combine(gemm.grouped_linear(activated, fc2.unbind(), ends), places.view(-1, top))

    lengths = [37, 5, 18]
    x = torch.randn(sum(lengths), hidden, dtype=dtype)
    sequences, positions, starts = _sequences(lengths)
    tiles = attention.query_tiles(lengths, heads // kv_heads, x.device)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.packed_attention(q, k, v, tiles, sequences, positions, starts, 0.25)

    whole = forward(x, positions, packed)
    pages, cache = torch.tensor([[4, 0], [2, 5], [1, 3]]), torch.zeros(2, 6, 32, kv_heads, width, dtype=dtype)
    joined = torch.empty_like(whole)

    def generate(some: Tensor, tiles: Tensor | None) -> None:
        def paged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            numbers, places = sequences[some], positions[some]
            cache[:, pages[numbers, places // 32], places % 32] = torch.stack([k, v])
            if tiles is None:
                return attention.step_attention(q, *cache.unbind(), places, pages[numbers], 0.25)
            return attention.packed_attention(q, k, v, tiles, numbers, places, first_of_prompts, 0.25)

        joined[some] = forward(x[some], positions[some], paged)

    prompts, first_of_prompts = [30, 2, 7], torch.tensor([0, 30, 32])
    first = torch.cat([torch.arange(n) + start for n, start in zip(prompts, starts, strict=True)])
    generate(first, attention.query_tiles(prompts, heads // kv_heads, x.device))
    for step in range(max(length - n for length, n in zip(lengths, prompts, strict=True))):
        ends = [n + step for n in prompts]
        some = torch.tensor([start + n for n, start, all_ in zip(ends, starts, lengths, strict=True) if n < all_])
        generate(some, None)
    return {"different": int(not torch.equal(joined, whole)), "finite": bool(whole.isfinite().all())}


KERNELS = (
    linear,
    grouped,
    rms_norm,
    rotate,
    gated_silu,
    route,
    combine,
    sort_by_expert,
    log_prob,
    gradients,
    attention,
    layer,
)


def assert_sound(by_type: dict[str, Any], name: str) -> None:
    """That a kernel gives a row the same bits in every batch and the right values, by what the program prints of it."""
    assert "raised" not in by_type, (name, by_type.get("raised"))
    for dtype, values in by_type.items():
        assert values["different"] == 0, (name, dtype)
        for what, value in values.items():
            if what != "different":
                assert value is True if isinstance(value, bool) else value <= 1, (name, dtype, what, value)


def found_of(kernel: Callable[[torch.dtype], dict[str, Any]]) -> dict[str, Any]:
    """By type; what it raised, where it did, so that the other kernels are looked at."""
    torch.manual_seed(20261122)
    try:
        return {str(dtype).removeprefix("torch."): kernel(dtype) for dtype in DTYPES}
    except Exception:  # noqa: BLE001 - the test prints it
        return {"raised": traceback.format_exc()}


if __name__ == "__main__":
    COMPOSITIONS, DTYPES = int(sys.argv[1]), DTYPES[-int(sys.argv[2]) :]
    torch.set_default_device(sys.argv[3] if len(sys.argv) > 3 else "cpu")
    print(json.dumps({kernel.__name__: found_of(kernel) for kernel in KERNELS}))
