"""Gated delta nets in a plan: parameters, operations, and memory, by arithmetic. Both engines read tokens in chunks.

Symbols: those of `plan.learner`; S columns of the projection into the net, D of them that the convolution reads; H
heads of values, K and V the widths of a head's key and value. Where a model has no delta nets, functions return 0.
"""

from __future__ import annotations

from megatron_rl.model.architecture import Architecture
from megatron_rl.model.decoder import LinearAttention

CHUNK = 64  # tokens
STATE_BYTES = 4  # of a number of a state, whatever the dtype


def layers(a: Architecture) -> int:
    """Return the number of layers that have a delta net."""
    return sum(a.linear_layers)


def _columns(linear: LinearAttention) -> tuple[int, int, int]:
    """Return S, D, and H · V."""
    keys, _, values, *_ = linear.sections
    return sum(linear.sections), 2 * keys + values, values


def _state(linear: LinearAttention) -> int:
    """Return the numbers of a sequence's state in one layer."""
    return linear.value_heads * linear.key_width * linear.value_width


def columns(a: Architecture) -> int:
    """Return the columns of the two projections of a layer."""
    return 0 if a.linear is None else _columns(a.linear)[0] + _columns(a.linear)[2]


def parameters(a: Architecture, tp: int) -> int:
    """Return the parameters of a layer's delta net and two norms: all over tp, but for the norms."""
    if a.linear is None:
        return 0
    total, mixed, values = _columns(a.linear)
    cut = a.hidden_size * (total + values) + a.linear.kernel * mixed + 2 * a.linear.value_heads
    return cut // tp + a.linear.value_width + 2 * a.hidden_size


def adapters(a: Architecture, tp: int) -> int:
    """Return the numbers of both factors of rank 1 of the two projections."""
    if a.linear is None:
        return 0
    total, _, values = _columns(a.linear)
    return 2 * a.hidden_size + (total + values) // tp


def flops(a: Architecture) -> float:
    """Return the operations of a token in all delta nets, without those of parameters.

    Of a head: 2 C K for each of k·kᵀ and q·kᵀ, C (K + V) to solve the chunk's system, 2 C V for the values, and 6 K V
    between tokens and the state.
    """
    if a.linear is None:
        return 0.0
    key, value = a.linear.key_width, a.linear.value_width
    head = CHUNK * (4 * key + (key + value) + 2 * value) + 6 * key * value
    return float(layers(a) * a.linear.value_heads * head)


def sequence_bytes(a: Architecture, b: int, tp: int) -> float:
    """Return the bytes that an engine's GPU keeps of one sequence, of any length: the last inputs of convolutions, and
    the states."""
    if a.linear is None:
        return 0.0
    inputs = (a.linear.kernel - 1) * _columns(a.linear)[1] * b
    return layers(a) * (inputs + _state(a.linear) * STATE_BYTES) / tp


def activations(a: Architecture, b: int) -> float:
    """Return the bytes a token that autograd keeps between the norm and the layer's sum, over all tensor ranks.

    They are the projection's output, the convolution's input and output, queries and keys of every head of values, the
    values that come out, the gated ones, decays and strengths, and a row of the chunk's system.
    """
    if a.linear is None:
        return 0.0
    total, mixed, values = _columns(a.linear)
    heads = a.linear.value_heads
    return b * (total + 2 * mixed + 2 * heads * a.linear.key_width + 2 * values + heads * CHUNK) + 3 * 4 * heads


def backward(a: Architecture, b: int) -> float:
    """Return the bytes a token of a backward pass, over all tensor ranks: states of all chunks, and their gradients;
    gradients of the projection's output, and of the convolution's."""
    if a.linear is None:
        return 0.0
    total, mixed, _ = _columns(a.linear)
    return 2 * STATE_BYTES * _state(a.linear) / CHUNK + b * (total + mixed)
