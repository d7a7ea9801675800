"""Operators of a decoder in float64, each with a bound on the error of the same operator in a smaller type.

A number comes as `Bounded`: its value, and how far a witness's number may be from it. A tap of a witness has error 0.
An operator adds what its own arithmetic may do: one rounding to the type that it returns (``unit``), and the roundings
of its sums, which engines take in fp32: a sum of n terms is off by at most γ(n) · Σ|term|, γ(n) = n·u / (1 − n·u) with
u = 2⁻²⁴ (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). Errors of the inputs are carried through
to first order by absolute values. A bound holds for every order of summation, so it knows no kernel.

Shapes: N tokens of a pass, T tokens of one sequence, H heads, G heads of keys and values, D head width, V vocabulary;
of latent attention R the width that is turned, L that of a latent vector, V that of a value.

`rotation_of` has the frequencies of the rotary embedding that config.json asks for: plain, Llama 3's and YaRN's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
FP32 = 2.0**-24
UNITS = {torch.float32: FP32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
TINY = {torch.float16: 2.0**-25}
"""Half of the smallest number of a type whose small numbers occur in a model."""
FUNCTION = 4 * FP32
"""Relative error of an exp, rsqrt or division in fp32: vectorised ones are off by up to four units."""


@dataclass(frozen=True)
class Rounding:
    """How a type rounds. ``unit``: largest relative error of one rounding to the type. ``tiny``: absolute error below
    its normal numbers. ``product``: relative error of a product of two numbers before it is added: of TF32, else 0."""

    unit: float
    tiny: float = 0.0
    product: float = 0.0

    @classmethod
    def of(cls, *dtypes: torch.dtype, product: float = 0.0) -> Rounding:
        """The coarsest of ``dtypes``."""
        return cls(max(UNITS[d] for d in dtypes), max(TINY.get(d, 0.0) for d in dtypes), product)


@dataclass(frozen=True)
class Bounded:
    """A ``value`` with the bound of its ``error`` (≥ 0): float64, of one shape."""

    value: Tensor
    error: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Bounded:
        value = value.double()
        return cls(value, torch.zeros_like(value))

    def rounded(self, to: Rounding, times: int = 1) -> Bounded:
        """Allow ``times`` more roundings."""
        return Bounded(self.value, self.error + times * (to.unit * (self.value.abs() + self.error) + to.tiny))

    def view(self, *shape: int) -> Bounded:
        return Bounded(self.value.view(*shape), self.error.view(*shape))

    def __getitem__(self, index: object) -> Bounded:
        return Bounded(self.value[index], self.error[index])


def gamma(terms: int) -> float:
    """Largest relative error of a sum of ``terms`` products in fp32."""
    return terms * FP32 / (1 - terms * FP32)


def linear(x: Bounded, weight: Tensor, bias: Tensor | None, to: Rounding, parts: int = 1) -> Bounded:
    """x · weightᵀ + bias. ``weight`` [outputs, inputs] float64. ``parts``: ranks that share the inputs, whose sums are
    rounded one by one before they are added."""
    magnitude = weight.abs().t()
    value = x.value @ weight.t()
    error = x.error @ magnitude + (gamma(x.value.size(-1) + 1) + to.product) * (x.value.abs() @ magnitude)
    if bias is not None:
        value = value + bias
        error = error + 2 * to.unit * (bias.abs() + value.abs())
    if parts > 1:
        for part, columns in zip(x.value.chunk(parts, -1), weight.chunk(parts, 1), strict=True):
            error = error + parts * to.unit * (part @ columns.t()).abs() + to.tiny
    return Bounded(value, error).rounded(to)


def add(x: Bounded, y: Bounded, to: Rounding) -> Bounded:
    return Bounded(x.value + y.value, x.error + y.error).rounded(to)


def rms_norm(x: Bounded, weight: Tensor, eps: float, to: Rounding) -> Bounded:
    """x / √(mean x² + eps) · weight over the last dimension.

    Four roundings to the type: a sum that was added in the same kernel may not have been rounded, which counts twice
    (in x, and in its square), the normalised number, and the product.
    """
    mean = x.value.square().mean(-1, keepdim=True) + eps
    scale = mean.rsqrt()
    value = x.value * scale * weight
    of_mean = (x.value.abs() * x.error).mean(-1, keepdim=True) / mean  # half of the relative error of the mean
    error = weight.abs() * scale * (x.error + x.value.abs() * of_mean)
    fp32 = gamma(x.value.size(-1) + 2) / 2 + 2 * FUNCTION
    return Bounded(value, error + fp32 * value.abs()).rounded(to, times=4)


def rotate(x: Bounded, angles: Bounded, to: Rounding, scale: float = 1.0) -> Bounded:
    """Rotary embedding of ``x`` [N, H, D] by ``angles`` [N, R/2]: pairs are (i, i + R/2), numbers from R on stay.

    Cosine and sine are multiplied by ``scale``. Errors of ``angles`` come to those of every engine: an angle is
    position · frequency in fp32, and the frequency a power: its exponent and its base's logarithm cost some sixteen
    units. Cosine, sine and both products are rounded to the type, and so is the sum.
    """
    half = angles.value.size(-1)
    cos, sin = scale * angles.value.cos()[:, None], scale * angles.value.sin()[:, None]
    of_angle = scale * (angles.value.abs() * 16 * FP32 + angles.error + FUNCTION)[:, None]
    of_angle = of_angle if scale == 1.0 else of_angle + FP32 * scale
    outputs, errors = [], []
    for a, b, sign in ((0, 1, -1.0), (1, 0, 1.0)):
        first, second = (x[..., i * half : (i + 1) * half] for i in (a, b))
        outputs.append(first.value * cos + sign * second.value * sin)
        products = (first.value * cos).abs() + (second.value * sin).abs()
        error = first.error * cos.abs() + second.error * sin.abs()
        error = error + of_angle * (first.value.abs() + second.value.abs())
        errors.append(error + 2 * to.unit * products + 2 * to.tiny)
    turned = Bounded(torch.cat(outputs, -1), torch.cat(errors, -1)).rounded(to)
    rest = x[..., 2 * half :]
    return Bounded(torch.cat([turned.value, rest.value], -1), torch.cat([turned.error, rest.error], -1))


def attention(
    query: Bounded,
    key: Bounded,
    value: Bounded,
    lengths: Sequence[int],
    to: Rounding,
    scale: float | None = None,
) -> Bounded:
    """Causal attention of sequences back to back: ``query`` [N, H, D], ``key`` [N, G, D], ``value`` [N, G, E] →
    [N, H, E]. ``scale``: of the scores; None: 1 / √D.

    Scores stay in fp32. Probabilities may be rounded to the type before they weigh the values.
    """
    scale = query.value.size(-1) ** -0.5 if scale is None else scale
    heads, groups = query.value.size(1), key.value.size(1)
    outputs, errors, start = [], [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        q, k, v = (x[rows] for x in (query, key, value))
        q, k, v = (Bounded(x.value.transpose(0, 1), x.error.transpose(0, 1)) for x in (q, k, v))
        k, v = (Bounded(*(part.repeat_interleave(heads // groups, 0) for part in (x.value, x.error))) for x in (k, v))
        scores = scale * q.value @ k.value.transpose(1, 2)
        size = q.value.abs() @ k.value.abs().transpose(1, 2)
        moved = q.error @ (k.value.abs() + k.error).transpose(1, 2) + q.value.abs() @ k.error.transpose(1, 2)
        moved = scale * (moved + (gamma(q.value.size(-1) + 3) + to.product) * size)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        highest = scores.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
        moved = moved + FP32 * (scores - highest).abs()  # the difference that goes into exp
        moved = moved.masked_fill(hidden, 0.0) + FUNCTION
        relative = torch.expm1(moved + (probs * moved).sum(-1, keepdim=True)) + gamma(length) + 2 * to.unit
        weights = probs * relative + to.tiny * ~hidden
        error = weights @ (v.value.abs() + v.error) + probs @ v.error + gamma(length) * (probs @ v.value.abs())
        outputs.append((probs @ v.value).transpose(0, 1))
        errors.append(error.transpose(0, 1))
    return Bounded(torch.cat(outputs), torch.cat(errors)).rounded(to)


def causal_conv(x: Bounded, weight: Tensor, positions: Tensor, to: Rounding) -> Bounded:
    """SiLU of a convolution over each token and those before it in its sequence: ``x`` [N, channels], ``weight``
    [channels, width], ``positions`` [N] in their sequences."""
    width, total = weight.size(1), Bounded.exact(torch.zeros_like(x.value))
    for back in range(width):
        factor = weight[:, width - 1 - back] * (positions >= back)[:, None]
        value, moved = x.value.roll(back, 0) * factor, x.error.roll(back, 0) * factor.abs()
        error = total.error + moved + (gamma(width + 1) + to.product) * value.abs()
        total = Bounded(total.value + value, error)
    return gated(total.rounded(to), Bounded.exact(torch.ones_like(x.value)), torch.nn.functional.silu, to)


def log_decay(a: Bounded, bias: Tensor, log: Tensor) -> Bounded:
    """−exp(log) · softplus(a + bias), which engines compute in fp32. As log(1 + exp) its sum is rounded, too."""
    moved = a.value + bias
    rate, soft = log.exp(), torch.logaddexp(moved, torch.zeros_like(moved))
    error = rate * (a.error + FP32 * (moved.abs() + 1)) + rate * soft * 4 * FUNCTION
    return Bounded(-rate * soft, error)


CHUNK = 64
"""Tokens of a sequence that engines read at once, at most."""


def delta_rule(
    query: Bounded,
    key: Bounded,
    value: Bounded,
    decay: Bounded,
    strength: Bounded,
    lengths: Sequence[int],
    to: Rounding,
) -> Bounded:
    """What the states of a gated delta net give the queries, [N, H, V]: one operator, token by token.

    ``query``, ``key`` [N, G, K]; ``value`` [N, H, V]; ``decay`` (its logarithm, at most 0), ``strength`` [N, H]. With
    unit keys k a state S [K, V] becomes α S + k ⊗ w, w = β (v − α kᵀ S), and gives Sᵀ q.

    The bound is one of norms over K, for each head and column of V alone. I − β k kᵀ makes no vector longer, so an
    error of a state decays as the state does; what a token adds to it is carried on by α alone. Masses bound what is
    rounded there: B = Σ e^(G_t − G_j) |k_j| β_j |v_j| ≥ |S|, of all writes, and E, the sum of B that later tokens read
    and write again, decayed in the same way. So |w_j| ≤ β_j |v_j| + β_j |k_j| α_j B_(j−1).

    An engine goes token by token, or solves (I + L) w = β (v − …) for a chunk, L_ij = β_i e^(G_i − G_j) k_iᵀ k_j. For
    substitution, and for an inverse made column by column, the residual of row i is at most ε Σ_j |L_ij| |w_j| ≤
    ε β_i |k_i| (B + E) before token i (Higham, chapters 8 and 14), once for the values and twice for the reading of the
    state before the chunk. A residual is a change of v_i. A state after a chunk and an output are sums of K or `CHUNK`
    terms of B + E. ε: such sums, roundings of the factors to the type, and of the exponents: differences of sums of
    decays of a chunk.
    """
    repeat = value.value.size(1) // key.value.size(1)
    (q, q_moved), (k, k_moved) = (_unit(x, repeat) for x in (query, key))
    scale = q.size(-1) ** -0.5
    q, q_moved = q * scale, q_moved * scale
    sums = gamma(CHUNK + 2 * q.size(-1)) + to.product + 8 * to.unit + 8 * FUNCTION
    outputs, errors, start = [], [], 0
    for length in lengths:
        total = decay.value[start : start + length].abs().cumsum(0)
        in_chunk = total - torch.cat([torch.zeros_like(total[:CHUNK]), total])[:length]
        exponents = 2 * gamma(CHUNK) * in_chunk[..., None]
        state = q.new_zeros(*value.value.shape[1:], q.size(-1))  # [H, V, K]
        mass = again = error = q.new_zeros(value.value.shape[1:])
        for t in range(start, start + length):
            alpha, beta = decay.value[t].exp()[:, None], strength.value[t][:, None]
            v, key_norm = value.value[t].abs(), k[t].norm(dim=-1, keepdim=True)
            state = state * alpha[..., None]
            read = (state * k[t][:, None]).sum(-1)
            state = state + (beta * (value.value[t] - read))[..., None] * k[t][:, None]
            mass, again, error, write = alpha * mass, alpha * again, alpha * error, beta * key_norm * v
            epsilon = sums + exponents[t - start]
            error = error + sums * write + to.tiny + epsilon * (2 * mass + 4 * again)
            error = error + strength.error[t][:, None] * key_norm * (v + key_norm * mass)
            error = error + beta * (key_norm * value.error[t] + k_moved[t] * (v + 2 * key_norm * mass))
            error = error + decay.error[t][:, None] * mass
            mass, again = mass + write, again + beta * key_norm.square() * mass
            outputs.append((state * q[t][:, None]).sum(-1))
            errors.append(2 * q[t].norm(dim=-1, keepdim=True) * error + q_moved[t] * mass)
        start += length
    return Bounded(torch.stack(outputs), torch.stack(errors)).rounded(to)


def _unit(x: Bounded, repeat: int) -> tuple[Tensor, Tensor]:
    """Vectors [N, H, K] of length one, each ``repeat`` times, and the norms [N, H, 1] of their errors."""
    scale = torch.rsqrt(x.value.square().sum(-1, keepdim=True) + 1e-6)
    parts = x.value * scale, x.error.norm(dim=-1, keepdim=True) * scale
    return parts[0].repeat_interleave(repeat, 1), parts[1].repeat_interleave(repeat, 1)


def latent_attention(
    query: Bounded,
    query_rope: Bounded,
    latent: Bounded,
    key_rope: Bounded,
    to_keys: Tensor,
    to_values: Tensor,
    lengths: Sequence[int],
    to: Rounding,
    scale: float,
) -> Bounded:
    """Attention to keys and values that are made of latent vectors: [N, H, V].

    ``query`` [N, H, D] and ``query_rope`` [N, H, R]: the plain and the turned part. ``latent`` [N, L], ``key_rope``
    [N, R]. ``to_keys`` [H, D, L], ``to_values`` [H, V, L]. ``scale``: of the scores. An engine may make keys and values
    first, or bring the queries to the latent vectors and the values back from them; the bound holds for both.
    """
    heads = query.value.size(1)
    shared = Bounded(*(x[:, None].expand(-1, heads, -1) for x in (key_rope.value, key_rope.error)))
    keys, values = (
        stacked([linear(latent, weight, None, to) for weight in weights]) for weights in (to_keys, to_values)
    )
    made_first = attention(beside(query, query_rope), beside(keys, shared), values, lengths, to, scale)
    brought = stacked([linear(query[:, i], to_keys[i].t(), None, to) for i in range(heads)])
    alone = latent.view(len(latent.value), 1, -1)
    one_head = Bounded(key_rope.value[:, None], key_rope.error[:, None])
    among = attention(beside(brought, query_rope), beside(alone, one_head), alone, lengths, to, scale)
    back = stacked([linear(among[:, i], to_values[i], None, to) for i in range(heads)])
    return Bounded(made_first.value, torch.maximum(made_first.error, back.error))


def beside(x: Bounded, y: Bounded) -> Bounded:
    """Both along the last dimension."""
    return Bounded(torch.cat([x.value, y.value], -1), torch.cat([x.error, y.error], -1))


def stacked(heads: Sequence[Bounded]) -> Bounded:
    """[N, D] of each head → [N, H, D]."""
    return Bounded(torch.stack([x.value for x in heads], 1), torch.stack([x.error for x in heads], 1))


def gated(gate: Bounded, up: Bounded, function: Callable[[Tensor], Tensor], to: Rounding) -> Bounded:
    """function(gate) · up. The function's slope is at most 1.13 (silu: 1.1). Both factors and the product are rounded
    to the type; its exp has gate as an argument."""
    activated = function(gate.value)
    error = 1.13 * gate.error + activated.abs() * (FUNCTION * 2 + FP32 * gate.value.abs())
    first = Bounded(activated, error).rounded(to, times=2)
    value = first.value * up.value
    error = first.error * (up.value.abs() + up.error) + first.value.abs() * up.error
    return Bounded(value, error).rounded(to)


def scaled(x: Bounded, factor: Bounded, to: Rounding) -> Bounded:
    error = x.error * factor.value.abs() + (x.value.abs() + x.error) * factor.error
    return Bounded(x.value * factor.value, error).rounded(to)


def route_weights(logits: Bounded, chosen: Tensor, renormalised: bool, to: Rounding) -> Bounded:
    """Weights [N, K] of the experts ``chosen`` [N, K]: a softmax over them, or over all experts."""
    picked = logits[torch.arange(len(chosen))[:, None], chosen]
    among = picked if renormalised else logits
    highest = among.value.amax(-1, keepdim=True)
    total = torch.logsumexp(among.value, -1, keepdim=True)
    value = (picked.value - total).exp()
    error = picked.error + among.error.amax(-1, keepdim=True)
    error = error + FP32 * ((picked.value - highest).abs() + among.value.size(-1)) + 2 * FUNCTION
    if not renormalised:  # as exp(logit − log Σ exp) it is computed in the type of the logits
        error = error + to.unit * (picked.value.abs() + 2 * total.abs() + (picked.value - total).abs())
    return Bounded(value, value * torch.expm1(error)).rounded(to, times=2)


def sigmoid(x: Bounded, to: Rounding) -> Bounded:
    value = x.value.sigmoid()
    return Bounded(value, x.error / 4 + value * (2 * FUNCTION + FP32 * x.value.abs())).rounded(to)


def rotated_pairs(x: Bounded) -> Bounded:
    """Neighbours (2 i, 2 i + 1) of the last dimension at i and i + R/2, where `rotate` takes them."""
    return Bounded(*(halves_of_pairs(part) for part in (x.value, x.error)))


def halves_of_pairs(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def sigmoid_weights(logits: Bounded, chosen: Tensor, scale: float, to: Rounding) -> Bounded:
    """Weights [N, K] of the experts ``chosen`` [N, K]: sigmoids over their sum, times ``scale``."""
    scores = sigmoid(logits[torch.arange(len(chosen))[:, None], chosen], to)
    value = scores.value / scores.value.sum(-1, keepdim=True) * scale
    relative = scores.error / scores.value
    relative = relative + relative.amax(-1, keepdim=True) + gamma(chosen.size(1) + 2) + 2 * FUNCTION + to.unit
    return Bounded(value, value * relative).rounded(to, times=3)


def logprobs(logits: Bounded, tokens: Tensor, temperature: float) -> Bounded:
    """log softmax(logits / temperature) [N] at ``tokens`` [N], which engines compute in fp32."""
    z = Bounded(logits.value / temperature, logits.error / temperature)
    z = Bounded(z.value, z.error + FP32 * z.value.abs())
    total = torch.logsumexp(z.value, -1)
    picked = z[torch.arange(len(tokens)), tokens]
    probs = (z.value - total[:, None]).exp()
    highest = z.value.amax(-1)
    error = picked.error + (probs * (z.error + FP32 * (highest[:, None] - z.value))).sum(-1)
    error = error + gamma(z.value.size(-1)) + 2 * FUNCTION
    error = error + 2 * FP32 * (picked.value.abs() + total.abs() + highest.abs())
    return Bounded(picked.value - total, error)


ROTATIONS = ("default", "llama3", "yarn")


@dataclass(frozen=True)
class Rotation:
    """``frequencies`` [R/2]: angle per position, of the first R numbers of a head. ``uncertain`` [R/2]: their relative
    error in fp32, beside that of the power. ``scale``: of cosine and sine. ``of_scores``: a further factor of the
    scores of attention."""

    frequencies: Tensor
    uncertain: Tensor
    scale: float = 1.0
    of_scores: float = 1.0


def rotation_of(rope: dict[str, Any], theta: float, width: int, longest: int) -> Rotation | None:
    """Return the rotation of ``width`` numbers of a head by ``rope`` (a model's section); None: an unknown kind.

    ``longest``: `max_position_embeddings`."""
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    exact = torch.zeros_like(plain)
    kind = rotation_kind(rope)
    if kind == "default":
        return Rotation(plain, exact)
    if kind == "llama3":
        return Rotation(_llama3(rope, plain), exact)
    return _yarn(rope, theta, width, longest, plain) if kind == "yarn" else None


def rotation_kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _llama3(rope: dict[str, Any], plain: Tensor) -> Tensor:
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    lengths = 2 * math.pi / plain
    smooth = ((old / lengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / rope["factor"] + smooth * plain


def _yarn(rope: dict[str, Any], theta: float, width: int, longest: int, plain: Tensor) -> Rotation:
    """Frequencies with fewer than `beta_slow` turns in the old length are divided by the factor, those with more than
    `beta_fast` stay, and between is a line over their numbers (Peng et al., YaRN, 2023)."""
    old = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or longest / old
    low, high = (
        width * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    divided = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    slow, fast = plain / factor * divided, plain * (1 - divided)
    frequencies = slow + fast
    # In fp32 `divided` has two roundings and the rest, 1 - divided, one more; then come the products and the sum.
    uncertain = FP32 * ((4 * plain / factor + 3 * plain) / frequencies + 4)
    uncertain = torch.where((divided == 0) | (divided == 1), 4 * FP32, uncertain)
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    scale = rope.get("attention_factor")
    if scale is None:
        scale = _magnitude(factor, both[0]) / _magnitude(factor, both[1]) if all(both) else _magnitude(factor, 1.0)
    of_scores = _magnitude(factor, both[1]) ** 2 if both[1] else 1.0
    return Rotation(frequencies, uncertain, scale, of_scores)


def _magnitude(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
