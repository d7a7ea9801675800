"""Gated delta nets in float64: the rule of the paper; every way to compute it is within its bound, a fault is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from megatron_rl.instruments.parity import arithmetic
from megatron_rl.instruments.parity.arithmetic import Bounded, Rounding
from megatron_rl.instruments.parity.definition import Checkpoint
from megatron_rl.instruments.parity.delta_net import Heads, evaluation_of, split_projection
from megatron_rl.instruments.parity.record import Record
from megatron_rl.layers.delta_net import chunked_delta_rule
from tools.dev.parity_bench import make_models

LENGTHS = [150, 1, 70]
FP32 = Rounding.of(torch.float32)
RATES = {"slow": 0.003, "usual": 0.3, "fast": 20.0}


def drawn(rate: float, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys of two heads, values of four, logarithms of decays, and strengths."""
    random = torch.Generator().manual_seed(seed)
    num = sum(LENGTHS)
    query, key, value = (torch.randn(num, heads, 16, generator=random) for heads in (2, 2, 4))
    decay = -rate * torch.rand(num, 4, generator=random) * torch.tensor([0.1, 0.5, 1.0, 2.0])
    return [query, key, value, decay, torch.rand(num, 4, generator=random)]


def bounded(parts: list[torch.Tensor], lengths: list[int] = LENGTHS, to: Rounding = FP32) -> Bounded:
    return arithmetic.delta_rule(*map(Bounded.exact, parts), lengths, to)


def of_the_paper(parts: list[torch.Tensor]) -> np.ndarray:
    """S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ and o_t = S_t q_t (arXiv 2412.06464, equation 10)."""
    q, k, v, g, beta = (part.double().numpy() for part in parts)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    out = np.zeros_like(v)
    for head in range(v.shape[1]):
        start = 0
        for length in LENGTHS:
            S = np.zeros((v.shape[2], k.shape[2]))
            for t in range(start, start + length):
                k_t, b = k[t, head // 2], beta[t, head]
                S = np.exp(g[t, head]) * S @ (np.eye(len(k_t)) - b * np.outer(k_t, k_t)) + b * np.outer(v[t, head], k_t)
                out[t, head] = S @ q[t, head // 2] / np.sqrt(k.shape[2])
            start += length
    return out


def chunks(parts: list[torch.Tensor], lengths: list[int] = LENGTHS) -> torch.Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return chunked_delta_rule(*(part[None] for part in parts), cu_seqlens=starts)[0][0]


def alone(parts: list[torch.Tensor], rule: str) -> torch.Tensor:
    """transformers' form, each sequence by itself."""
    outputs = []
    for sequence in zip(*(part.split(LENGTHS) for part in parts), strict=True):
        query, key, *rest = (part[None] for part in sequence)
        query, key = query.repeat_interleave(2, 2), key.repeat_interleave(2, 2)
        outputs.append(getattr(theirs, rule)(query, key, *rest, use_qk_l2norm_in_kernel=True)[0][0])
    return torch.cat(outputs)


def share(computed: torch.Tensor, wanted: Bounded) -> float:
    return float(((computed.double() - wanted.value).abs() / wanted.error).max())


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
def test_the_rule_is_that_of_the_paper_and_each_way_is_within_its_bound(rate):
    parts = drawn(rate)
    wanted = bounded(parts)
    assert np.allclose(wanted.value.numpy(), of_the_paper(parts), rtol=1e-10, atol=1e-14)
    ways = [chunks(parts), *(alone(parts, f"torch_{how}_gated_delta_rule") for how in ("chunk", "recurrent"))]
    assert max(share(way, wanted) for way in ways) <= 1


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
def test_what_is_not_the_rule_is_beyond_the_bound(rate):
    parts = drawn(rate)
    query, key, value, decay, strength = parts
    wanted = bounded(parts)
    assert share(chunks([query, key, value, decay, strength * 0.99]), wanted) > 1
    assert share(chunks([query, key.roll(1, 1), value, decay, strength]), wanted) > 1
    if rate < 1:  # else nothing is left of a state
        assert share(chunks(parts, [sum(LENGTHS)]), wanted) > 1
        assert share(chunks([query, key, value, decay * 0.9, strength]), wanted) > 1


def test_what_each_sum_over_a_state_may_lose_adds_up():
    """A state that is written little by little in one direction is too large by the error of a sum in every step."""
    num, beta = 150, 0.01
    direction = torch.eye(16, dtype=torch.float64)[0].expand(num, 1, 16)
    value, strength = torch.ones(num, 1, 1, dtype=torch.float64), torch.full((num, 1), beta, dtype=torch.float64)
    wanted = bounded([direction, direction, value, torch.zeros(num, 1), strength], [num])
    key = direction[0, 0] / np.sqrt(1 + 1e-6)
    state, outputs, error = torch.zeros(16, dtype=torch.float64), [], arithmetic.gamma(arithmetic.CHUNK + 2 * 16)
    for _ in range(num):
        state = (state + beta * (1 - state @ key) * key) * (1 + error)
        outputs.append(state @ key / 16**0.5)
    assert share(torch.stack(outputs)[:, None, None], wanted) <= 1
    assert float(((outputs[-1] - wanted.value[-1, 0, 0]) / (outputs[-1] * error)).abs()) > 10  # of many steps


@pytest.mark.parametrize("which", range(5))
def test_errors_of_the_inputs_are_carried_on(which):
    """Each input alone is moved by its error, in random directions: the output is within the bound of that."""
    parts = drawn(RATES["usual"])
    moved = [Bounded.exact(part) for part in parts]
    size = 1e-2 * parts[which].abs().double()
    moved[which] = Bounded(parts[which].double(), size)
    wanted, plain = (arithmetic.delta_rule(*x, LENGTHS, FP32) for x in (moved, map(Bounded.exact, parts)))
    random = torch.Generator().manual_seed(9)
    signs = torch.randint(2, size.shape, generator=random) * 2 - 1
    others = [part.double() + (signs * size if i == which else 0) for i, part in enumerate(parts)]
    other = arithmetic.delta_rule(*map(Bounded.exact, others), LENGTHS, FP32)
    assert share(other.value, wanted) <= 1
    assert share(other.value, plain) > 1


def test_a_convolution_and_a_decay():
    random = torch.Generator().manual_seed(3)
    x, weight = torch.randn(12, 6, generator=random), torch.randn(6, 4, generator=random)
    positions = torch.cat([torch.arange(7), torch.arange(5)])
    wanted = arithmetic.causal_conv(Bounded.exact(x), weight.double(), positions, FP32)

    def convolved(*sequences: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
        return torch.cat([theirs.causal_conv1d_fn(s.t()[None], weight, activation="silu")[0].t() for s in sequences])

    assert share(convolved(x[:7], x[7:]), wanted) <= 1
    assert share(convolved(x), wanted) > 1
    assert share(convolved(x[:7], x[7:], weight=weight.roll(1, -1)), wanted) > 1
    a, bias, log = 8 * torch.randn(50, 4, generator=random), torch.randn(4, generator=random), torch.randn(4)
    decay = arithmetic.log_decay(Bounded.exact(a), bias.double(), log.double())
    sound = -log.exp() * torch.nn.functional.softplus(a + bias)
    assert share(sound, decay) <= 1
    assert share(-log.exp() * torch.log(1 + torch.exp(a + bias)), decay) <= 1
    assert share(sound * (1 + 1e-4), decay) > 1


def test_columns_of_a_projection_by_heads_and_one_after_the_other():
    heads = Heads(2, 4, 1, 3)
    names = [
        f"{name}{head}{i}" for head in range(2) for name, n in zip("qkvz", (1, 1, 6, 6), strict=True) for i in range(n)
    ]
    by_head = split_projection(torch.arange(28)[None], "qkvz", heads, by_head=True)
    assert [names[i] for i in by_head["qkv"][0, :6]] == ["q00", "q10", "k00", "k10", "v00", "v01"]
    assert [names[i][0] for i in by_head["z"][0]] == ["z"] * 12
    flat = split_projection(torch.arange(28)[None], "qkvz", heads, by_head=False)
    assert (flat["qkv"][0].tolist(), flat["z"][0].tolist()) == (list(range(16)), list(range(16, 28)))
    parts = split_projection(torch.arange(8)[None], "ba", heads, by_head=True)
    assert (parts["b"][0].tolist(), parts["a"][0].tolist()) == ([0, 1, 4, 5], [2, 3, 6, 7])


def test_layers_have_delta_nets_as_the_configuration_says(tmp_path):
    (path,) = make_models(tmp_path, ["qwen3_next"]).values()
    checkpoint = Checkpoint(path)
    evaluation = evaluation_of(checkpoint, Record("w", [2], torch.arange(2), torch.float32))
    assert [evaluation.has_delta_net(layer) for layer in range(2)] == [True, False]
    del checkpoint.config["layer_types"]  # then every fourth layer has attention
    assert [evaluation.has_delta_net(layer) for layer in range(8)] == [True, True, True, False] * 2
