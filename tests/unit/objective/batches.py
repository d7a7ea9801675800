"""Random batches for the objective's tests, in every form: lists, padded rows with garbage, packed tokens."""

import numpy as np
import torch

from megatron_rl.objective import ObjectiveInputs
from tests.support.rounding import CLOSED_FORM
from tests.unit.objective.reference import Seq

BATCH = 4 * CLOSED_FORM
"""Roundings of a loss or metric of a random batch: sums over at most 9 sequences of 9 tokens, of closed forms."""

EXTREMES = 100 * BATCH
"""The same with log-ratios of up to 100: exp makes an absolute error of its argument a relative one of its value."""


def random_batch(seed: int, num_sequences: int = 6, extremes: bool = False) -> list[Seq]:
    """Sequences of 0 to 9 trained tokens (always one of 0, 1 and 9), A of both signs and 0, r and rho near 1.

    With extremes, some log-ratios are ±100 and some inference log-probs -inf.
    """
    rng = np.random.default_rng(seed)
    lengths = [0, 1, 9, *rng.integers(1, 9, size=max(num_sequences - 3, 0))][:num_sequences]
    batch = []
    for i, n in enumerate(lengths):
        po = -rng.exponential(1.2, size=n) - 1e-3
        pi = np.minimum(po + rng.normal(0, 0.3, size=n), -1e-4)
        mu = np.minimum(po + rng.normal(0, 0.4, size=n), -1e-4)
        if i % 2:  # close to on-policy, so that sequence statistics stay inside narrow bounds
            pi, mu = (
                np.minimum(po + 1e-4 * rng.normal(size=n), -1e-5),
                np.minimum(po + 0.02 * rng.normal(size=n), -1e-5),
            )
        if extremes and n > 1:
            pi[0], mu[0] = po[0] - 100, po[0] - 0.1
            pi[-1] = min(po[-1] + 0.5, -1e-4)
            po[-1], mu[-1] = (po[-1] - 100, -np.inf) if i % 2 == 0 else (po[-1], po[-1] - 100)
        a = float(rng.choice([-1.3, -0.4, 0.0, 0.7, 2.0]))
        batch.append(Seq(pi.tolist(), po.tolist(), mu.tolist(), [a] * int(n), id=1000 + 7 * i))
    return batch


def padded(
    batch: list[Seq], seed: int = 0, extra: int = 3, dtype=torch.float64
) -> tuple[ObjectiveInputs, torch.Tensor]:
    """[B, T] inputs whose trained tokens sit at random columns between NaN; and the places [B, T] of trained tokens."""
    rng = np.random.default_rng(seed)
    width = max([len(s) for s in batch] or [0]) + extra
    mask = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, seq in zip(mask, batch):
        row[torch.from_numpy(np.sort(rng.permutation(width)[: len(seq)]))] = True

    def fill(name):
        values = torch.full(mask.shape, torch.nan, dtype=dtype)
        values[mask] = torch.tensor([x for s in batch for x in getattr(s, name)], dtype=dtype)
        return values

    inputs = ObjectiveInputs(
        current_logprobs=fill("pi").requires_grad_(),
        old_logprobs=fill("po"),
        inference_logprobs=fill("mu"),
        advantages=torch.tensor([s.a[0] if len(s) else torch.nan for s in batch], dtype=dtype),
        loss_mask=mask,
        sequence_ids=torch.tensor([s.id for s in batch]),
    )
    return inputs, mask


def packed(
    batch: list[Seq], prompt: int = 2, tail: int = 3, dtype=torch.float64
) -> tuple[ObjectiveInputs, torch.Tensor]:
    """[N] inputs, each sequence behind untrained prompt tokens, NaN there and in a tail that no sequence owns."""
    pieces, mask, offsets = {"pi": [], "po": [], "mu": []}, [], [0]
    for seq in batch:
        for name, values in pieces.items():
            values += [torch.nan] * prompt + getattr(seq, name)
        mask += [False] * prompt + [True] * len(seq)
        offsets.append(len(mask))
    mask = torch.tensor(mask + [False] * tail)
    pi, po, mu = (torch.tensor(pieces[name] + [torch.nan] * tail, dtype=dtype) for name in ("pi", "po", "mu"))
    inputs = ObjectiveInputs(
        current_logprobs=pi.requires_grad_(),
        old_logprobs=po,
        inference_logprobs=mu,
        advantages=torch.tensor([s.a[0] if len(s) else torch.nan for s in batch], dtype=dtype),
        loss_mask=mask,
        cu_seqlens=torch.tensor(offsets),
        sequence_ids=torch.tensor([s.id for s in batch], dtype=torch.int64),
    )
    return inputs, mask


def worked(
    current: torch.Tensor,
    old: torch.Tensor | None,
    inference: torch.Tensor | None,
    advantage: float = 1.0,
    mask: torch.Tensor | None = None,
    **more: torch.Tensor,
) -> ObjectiveInputs:
    """[B, T] inputs of one advantage; all tokens are trained unless ``mask`` says which."""
    advantages = torch.full((len(current),), advantage, dtype=current.dtype)
    mask = torch.ones(current.shape, dtype=torch.bool) if mask is None else mask
    return ObjectiveInputs(current, old, inference, advantages, mask, **more)


def loss_and_gradient(result, inputs: ObjectiveInputs, mask: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The loss, and the gradient of the trained tokens in order; asserts that no other place has one."""
    (gradient,) = torch.autograd.grad(result.loss, inputs.current_logprobs)
    assert torch.all(gradient[~mask] == 0), "a masked place has a gradient"
    return result.loss.item(), gradient[mask]
