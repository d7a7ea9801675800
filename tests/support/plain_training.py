"""A few updates in plain PyTorch on transformers' model: the computation whose rounding bounds that of the learner.

The same stored rollouts, loss, clipping and Adam as the learner's, in any type. Run in float32 and in float64 it says
what rounding does to log-probs, gradients and weights of this model, Adam's amplification included; see
`tests.support.rounding.bound_from_double`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.utils.parametrize

from megatron_rl.model.families import FAMILIES
from megatron_rl.types import Batch
from tests.support.in_double import widened
from tests.support.plain_routers import near_ties, watched_routers
from tests.support.rounding import bound_from_double, norm_from_double
from tests.support.tiny import MODEL, stored_rollouts

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # ppo_clip's defaults
MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)

Model = torch.nn.Module
Mutation = Callable[[Model], None]


def load(path: str | Path, dtype: torch.dtype) -> Model:
    """The checkpoint in transformers; experts one by one, because its grouped product has no float64.

    Where ``dtype`` is float64 every step is; see `tests.support.in_double`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in FAMILIES.values():
        family.register()
    experts = (
        {}
        if AutoConfig.from_pretrained(path).model_type in ("qwen2", "qwen3", "llama")
        else {"experts_implementation": "eager"}
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", **experts)
    return widened(model) if dtype is torch.float64 else model


def logits(model: Model, batch: Batch) -> torch.Tensor:
    """[R, V] of the places that predict a response's tokens, sequence after sequence."""
    length = max(s.whole_length for s in batch.sequences)
    tokens = torch.zeros(len(batch.sequences), length, dtype=torch.long)  # causal attention never sees the padding
    for row, s in zip(tokens, batch.sequences):
        row[: s.whole_length] = torch.from_numpy(s.whole)
    out = model(input_ids=tokens, use_cache=False).logits
    return torch.cat([row[s.prompt_length - 1 : s.whole_length - 1] for row, s in zip(out, batch.sequences)])


def logprobs(model: Model, batch: Batch) -> torch.Tensor:
    """[R] of the responses' tokens, sequence after sequence."""
    labels = torch.cat([torch.from_numpy(s.tokens).long() for s in batch.sequences])
    return logits(model, batch).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


def minibatch(batch: Batch, part: list[int]) -> Batch:
    return Batch(batch.step, [batch.sequences[i] for i in part], [list(range(len(part)))])


@dataclass
class Updates:
    """What some updates computed, as float64: everything that a learner reports of the same updates."""

    before: np.ndarray
    after: np.ndarray = field(default_factory=lambda: np.zeros(0))
    logprobs: list[np.ndarray] = field(default_factory=list)  # of each update's batch, by the weights before it
    entropy: list[np.ndarray] = field(default_factory=list)  # likewise, token by token
    losses: list[float] = field(default_factory=list)
    gradients: list[np.ndarray] = field(default_factory=list)  # of all weights, before clipping
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    sizes: list[int] = field(default_factory=list)  # of the tensors behind each other in gradients and weights
    router_logits: list[np.ndarray] = field(default_factory=list)  # [layers × tokens, E], of each update
    topk: int = 0


def run(
    dtype: torch.dtype,
    num_steps: int,
    minibatches: int = 1,
    lr: float = 1e-4,
    eps: float = 1e-8,
    path: str = str(MODEL),
    mutate: Mutation | None = None,
) -> Updates:
    """`run_on` with ``num_steps`` batches of stored rollouts. Several tests read one run: change nothing in it."""
    return _run(dtype, num_steps, minibatches, lr, eps, path, mutate)


@functools.lru_cache(maxsize=8)
def _run(dtype: torch.dtype, num_steps: int, minibatches: int, *arguments: Any) -> Updates:
    return run_on([stored_rollouts(step, minibatches=minibatches) for step in range(num_steps)], dtype, *arguments)


def run_on(
    batches: Sequence[Batch],
    dtype: torch.dtype,
    lr: float = 1e-4,
    eps: float = 1e-8,
    path: str = str(MODEL),
    mutate: Mutation | None = None,
    replay: bool = False,
) -> Updates:
    """Updates on ``batches``; ``mutate`` changes the model before, ``replay`` gives it the routes of ``batches``."""
    model = load(path, dtype)
    if mutate:
        mutate(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=BETAS, eps=eps, weight_decay=0.0)
    with torch.no_grad():
        updates = Updates(_double(logprobs(model, stored_rollouts(100))))
    for batch in batches:
        parts = [minibatch(batch, part) for part in batch.minibatches]
        old = []
        for part in parts:
            with torch.no_grad(), watched_routers(model, part, [], replay):
                old.append(logprobs(model, part))
        for part, old_logprobs in zip(parts, old):
            seen: list[np.ndarray] = []
            with watched_routers(model, part, seen, replay):
                _update(model, optimizer, part, old_logprobs, updates)
            updates.router_logits.append(np.concatenate(seen) if seen else np.zeros((0, 2)))
    with torch.no_grad():
        updates.after = _double(logprobs(model, stored_rollouts(100)))
    updates.weights = np.concatenate([_double(p).ravel() for p in trained])
    updates.sizes = [p.numel() for p in trained]
    updates.topk = getattr(model.config, "num_experts_per_tok", 0)
    return updates


def _update(model, optimizer, batch: Batch, old: torch.Tensor, updates: Updates) -> None:
    x = logits(model, batch).log_softmax(-1)
    labels = torch.cat([torch.from_numpy(s.tokens).long() for s in batch.sequences])
    current = x.gather(1, labels[:, None]).squeeze(1)
    mask = torch.cat([torch.from_numpy(s.loss_mask) for s in batch.sequences])
    advantages = torch.cat([torch.full((len(s.loss_mask),), s.advantage, dtype=x.dtype) for s in batch.sequences])
    ratio = (current - old).exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    loss = terms[mask].sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    updates.gradients.append(np.concatenate([_double(gradient).ravel() for gradient in gradients]))
    updates.logprobs.append(_double(current))
    updates.entropy.append(_double(-(x.exp() * x).sum(-1)))
    updates.losses.append(loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()


def _double(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


@dataclass(frozen=True)
class Limits:
    """How far two correct float32 runs of the same updates may lie apart, from `run` in float32 and in float64."""

    logprobs: float  # of one token, by any of the weights
    entropy: float  # of one token
    gradients: tuple[float, ...]  # norm of the difference, update by update; and so of the norms' difference
    tensor_gradients: float  # norm of the difference of one tensor's gradient, relative to its norm
    weights: float  # of one weight after the last update, with what Adam makes of the gradients' rounding
    mean_advantage: float  # Σ|A| / tokens: by how much the loss follows the ratios
    largest_rho: float
    ties: tuple[int, ...]  # of each update: choices of routers that rounding may turn

    def of_metric(self, name: str, update: int | None = None) -> float:
        """Limit of a metric that averages over tokens; ``update``: the one that it is of, None for the worst."""
        ratio = math.expm1(2 * self.logprobs)  # r and rho divide two probabilities
        gradient = max(self.gradients) if update is None else self.gradients[update]
        return {
            "actor/grad_norm": gradient,
            "actor/pg_loss": self.mean_advantage * ratio,
            "actor/entropy": self.entropy,
            "actor/ppo_kl": 2 * self.logprobs,
            "mismatch/rho_std": self.largest_rho * ratio,
        }[name]


def limits(single: Updates, double: Updates, batches: list[Batch]) -> Limits:
    """Twice `bound_from_double`, as neither of the two runs is the one in float64; sums are over a batch's tokens."""
    longest_sum = max(sum(s.whole_length for s in batch.sequences) for batch in batches)
    sequences = [s for batch in batches for s in batch.sequences]
    mu = np.concatenate([s.inference_logprobs for s in sequences])

    def bound(pairs) -> float:
        return 2 * max(bound_from_double(a, b, longest_sum) for a, b in pairs)

    return Limits(
        logprobs=bound(
            [(single.before, double.before), (single.after, double.after), *zip(single.logprobs, double.logprobs)]
        ),
        entropy=bound(zip(single.entropy, double.entropy)),
        gradients=tuple(
            2 * norm_from_double(a, b, longest_sum) for a, b in zip(single.gradients, double.gradients, strict=True)
        ),
        tensor_gradients=2 * max(_relative_errors(single, double, longest_sum)),
        weights=bound([(single.weights, double.weights)]),
        mean_advantage=float(np.mean([abs(s.advantage) for s in sequences])),
        largest_rho=float(np.exp(np.concatenate(double.logprobs) - mu).max()),
        ties=tuple(
            near_ties(a, b, longest_sum, double.topk)
            for a, b in zip(single.router_logits, double.router_logits, strict=True)
        ),
    )


def _relative_errors(single: Updates, double: Updates, longest_sum: int) -> list[float]:
    ends = np.cumsum(single.sizes)[:-1]
    return [
        norm_from_double(a, b, longest_sum) / float(np.linalg.norm(b))
        for gradients in zip(single.gradients, double.gradients, strict=True)
        for a, b in zip(*(np.split(gradient, ends) for gradient in gradients), strict=True)
        if b.any()
    ]


@functools.cache
def float32_limits(
    num_steps: int,
    minibatches: int = 1,
    lr: float = 1e-4,
    eps: float = 1e-8,
    path: str = str(MODEL),
    mutate: Mutation | None = None,
) -> Limits:
    """`limits` of ``num_steps`` batches of stored rollouts."""
    single, double = (
        run(dtype, num_steps, minibatches, lr, eps, path, mutate) for dtype in (torch.float32, torch.float64)
    )
    return limits(single, double, [stored_rollouts(step, minibatches=minibatches) for step in range(num_steps)])


def float32_limits_on(batches: Sequence[Batch], **changes) -> Limits:
    """`limits` of updates on ``batches``; ``changes``: arguments of `run_on`."""
    return limits(*(run_on(batches, dtype, **changes) for dtype in (torch.float32, torch.float64)), batches)


@functools.cache
def relative_gradient_error(dtype: torch.dtype) -> float:
    """How far two correct gradients of the first batch may lie apart in a half-precision type, relative to the norm.

    Each is as far from float64's as that of the plain model, all of which is stored in ``dtype``. Sums are in float32
    whatever their order, so that the order does not enlarge the error.
    """
    half, double = (run(which, 1).gradients[0] for which in (dtype, torch.float64))
    return 2 * float(np.linalg.norm(half - double) / np.linalg.norm(double))


class _Merged(torch.nn.Module):
    """W + scale · B A."""

    def __init__(self, weight: torch.Tensor, rank: int, scale: float):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(rank, weight.size(1), generator=generator) / math.sqrt(weight.size(1))
        self.a = torch.nn.Parameter(a.to(weight.dtype))
        self.b = torch.nn.Parameter(weight.new_zeros(weight.size(0), rank))
        self.scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


def adapters(rank: int, scale: float) -> Mutation:
    """Freezes a model and gives every linear layer but the head an adapter, for `run`'s ``mutate``."""

    def adapt(model: Model) -> None:
        model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                merged = _Merged(module.weight, rank, scale)
                torch.nn.utils.parametrize.register_parametrization(module, "weight", merged, unsafe=True)

    return adapt


def relative_norm_error(num_batches: int, num_sequences: int, path: str = str(MODEL)) -> float:
    """How far two correct float32 norms of the same gradient may lie apart, relative to the norm.

    `bound_from_double` of the norms themselves, one for each of ``num_batches`` batches of ``num_sequences`` stored
    sequences by the weights at ``path``. Rounding errors of single elements mostly cancel in a norm, which is
    therefore an order more exact than the gradient.
    """
    batches = [stored_rollouts(number, num_sequences) for number in range(num_batches)]

    def norms(dtype: torch.dtype) -> np.ndarray:
        model, updates = load(path, dtype), Updates(np.zeros(0))
        nothing = torch.optim.SGD(model.parameters(), lr=0.0)
        for batch in batches:
            with torch.no_grad():
                old = logprobs(model, batch)
            _update(model, nothing, batch, old, updates)
        return np.array([np.linalg.norm(gradient) for gradient in updates.gradients])

    single, double = norms(torch.float32), norms(torch.float64)
    longest_sum = max(sum(s.whole_length for s in batch.sequences) for batch in batches)
    return 2 * bound_from_double(single / double, np.ones_like(double), longest_sum)
