"""Log-probabilities of chosen tokens from vocabulary-parallel logits, without an fp32 copy of the logits.

`head_logprobs` computes the output layer and the log-probabilities in one: the logits of a few hundred tokens exist at
a time. At Qwen3's vocabulary of 151,936 the logits of 16k tokens are 5 GB in bf16, and so is their gradient. Both
passes go over the tokens in pieces. The backward pass computes each piece of logits again: one more matrix product of
the output layer, a third more of its work.

Shapes: N packed tokens, n of them predict a response token, H hidden width, V vocabulary, V/tp its share on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_rl.config.learner import LOGIT_CHUNK_ROWS
from megatron_rl.exact.invariant import kernel_ops, on_kernels


def token_logprobs(
    logits: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    exact: bool = False,
    entropy_gradient: bool = False,
    kept: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """``log softmax(logits[positions] / temperature)[labels]`` and the entropy of the same distributions.

    Args:
        logits: [N, V/tp], learner dtype; this rank's columns.
        positions: [n] int64, distinct rows of ``logits``.
        labels: [n] int64 in [0, vocab_size).
        vocab_size: true vocabulary; columns beyond it are padding and take no probability.
        temperature: the sampling temperature, so that pi is the distribution that mu sampled from.
        group: tensor-parallel group; None or of size one: the logits are whole.
        exact: of exact mode, whose kernels are used where there are any.
        entropy_gradient: the entropy is differentiable, too.
        kept: [n, C] int64, the tokens that each distribution is over, then -1; labels are among them. None: all.
        head: [n, k] int64, further tokens, -1 for none, whose log-probs are wanted. None: none.

    Returns:
        log-probs [n] float32, differentiable; entropy in nats [n] float32, detached unless ``entropy_gradient``; with
        ``head``, its log-probs [n, k] float32, differentiable, any number without a gradient where there is no token.
    """
    return _TokenLogprobs.apply(
        logits, positions, labels, vocab_size, temperature, group, exact, entropy_gradient, kept, head
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, positions, labels, vocab_size, temperature, group, exact, entropy_gradient, kept, head):
        first = logits.size(1) * (group.rank() if group is not None else 0)
        if exact and on_kernels(logits):
            width = min(max(0, vocab_size - first), logits.size(1))
            statistics = kernel_ops().token_statistics(
                logits.contiguous(), positions, labels, first=first, width=width, temperature=temperature
            )
            logprobs, entropy, logsumexp = _joined(*statistics, group)
        else:
            logprobs = torch.empty(len(positions), dtype=torch.float32, device=logits.device)
            entropy, logsumexp = torch.empty_like(logprobs), torch.empty_like(logprobs)
            for rows in torch.arange(len(positions), device=logits.device).split(LOGIT_CHUNK_ROWS):
                x = _scaled(logits, positions[rows], vocab_size, first, temperature)
                keep_sets(x, kept, rows, first)
                logprobs[rows], entropy[rows], logsumexp[rows] = row_statistics(x, labels[rows], first, group)
        if head is not None:
            local, inside = local_labels(head, first, logits.size(1))
            of_head = logits[positions[:, None], local].float() / temperature
            of_head = _of_all_ranks(of_head.masked_fill_(~inside, 0.0), group) - logsumexp[:, None]
        ctx.save_for_backward(logits, positions, labels, logsumexp, entropy, kept, head)
        ctx.numbers = (vocab_size, temperature, first)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return (logprobs, entropy) if head is None else (logprobs, entropy, of_head)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, grad_head=None):
        logits, positions, labels, logsumexp, entropy, kept, head = ctx.saved_tensors
        vocab_size, temperature, first = ctx.numbers
        grad = torch.zeros_like(logits)
        for rows in torch.arange(len(positions), device=logits.device).split(LOGIT_CHUNK_ROWS):
            x = _scaled(logits, positions[rows], vocab_size, first, temperature)
            keep_sets(x, kept, rows, first)
            of_entropy = (grad_entropy[rows], entropy[rows]) if ctx.entropy_gradient else None
            of_head = None if head is None else (grad_head[rows], head[rows])
            _logit_gradient(
                x, labels[rows], first, logsumexp[rows], temperature, grad_logprobs[rows], of_entropy, of_head
            )
            grad[positions[rows]] = x.to(grad.dtype)
            del x  # frees this piece before the next one is made
        return grad, None, None, None, None, None, None, None, None, None


def _logit_gradient(
    x: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    logsumexp: torch.Tensor,
    temperature: float,
    grad_logprobs: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    of_head: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Turn logits over temperature ``x`` [rows, V/tp] into the gradient of the loss in the logits z, in place.

    d log p(y) / d z_v = (1[v = y] − p_v) / temperature; d H / d z_v = −p_v (log p_v + H) / temperature.
    ``of_entropy``: gradient of the loss in H, and H, both [rows]; None where H has none. ``of_head``: gradient in the
    log-probs of a head, and its tokens, both [rows, k].
    """
    scale = grad_logprobs / temperature
    x.sub_(logsumexp[:, None])
    slope = scale[:, None]
    if of_entropy is not None:
        grad_entropy, entropy = of_entropy
        # p log p of a masked column is 0 · (-inf), so it is left out
        slope = slope + (x.masked_fill(x.isneginf(), 0.0) + entropy[:, None]) * (grad_entropy / temperature)[:, None]
    if of_head is not None:
        grad_head, head = of_head
        of_head = grad_head.masked_fill(head < 0, 0.0) / temperature
        slope = slope + of_head.sum(dim=1, keepdim=True)
    x.exp_().mul_(-slope)
    local, inside = local_labels(labels, first, x.size(1))
    x.scatter_add_(1, local[:, None], (scale * inside)[:, None])
    if of_head is not None:
        local, inside = local_labels(head, first, x.size(1))
        x.scatter_add_(1, local, of_head * inside)


def _scaled(logits, positions, vocab_size, first, temperature) -> torch.Tensor:
    return scale_and_mask(logits[positions].float(), vocab_size, first, temperature)


def scale_and_mask(x: torch.Tensor, vocab_size: int, first: int, temperature: float) -> torch.Tensor:
    """Divide fp32 logits [rows, V/tp] by ``temperature`` in place; columns from ``vocab_size`` on become −∞.

    ``first``: number of this rank's first column."""
    if temperature != 1.0:
        x.div_(temperature)
    if first + x.size(1) > vocab_size:
        x[:, max(0, vocab_size - first) :] = float("-inf")
    return x


def keep_sets(x: torch.Tensor, kept: torch.Tensor | None, rows: torch.Tensor, first: int) -> None:
    """Set logits ``x`` [rows, V/tp] of tokens outside the sets ``kept[rows]`` to −∞, in place; None keeps all.

    A token outside has probability 0 and no gradient. ``first``: number of this rank's first column."""
    if kept is None:
        return
    local, inside = local_labels(kept[rows], first, x.size(1))
    # One more column takes what is not this rank's, and the -1 after a set's last token.
    outside = torch.ones(len(x), x.size(1) + 1, dtype=torch.bool, device=x.device)
    outside.scatter_(1, local.masked_fill(~inside, x.size(1)), False)
    x.masked_fill_(outside[:, :-1], float("-inf"))


def row_statistics(
    x: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob of the label, entropy and log Σ exp of each row of ``x`` [rows, V/tp], all [rows] float32."""
    tp = group.size() if group is not None else 1
    top = x.amax(dim=1)
    if tp > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    weights = (x - top[:, None]).exp_()
    local, inside = local_labels(labels, first, x.size(1))
    label_logit = x.gather(1, local[:, None]).squeeze(1).masked_fill(~inside, 0.0)
    # p log p of a masked column is 0 · (-inf), so it is left out
    mean_logit = (weights * x.masked_fill(weights == 0, 0.0)).sum(dim=1)
    return _finished(top, torch.stack([weights.sum(dim=1), label_logit, mean_logit]), group)


@torch.no_grad()
def most_probable(
    rows: torch.Tensor,
    positions: torch.Tensor,
    k: int,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    kept: torch.Tensor | None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ``k`` most probable tokens [n, k] int64 at each position, the same on every tensor-parallel rank; -1 where
    there are fewer. ``rows``: logits [N, V/tp], or with ``weight`` hidden states; the rest as for `token_logprobs`.
    """
    size = 1 if group is None else group.size()
    first = (rows if weight is None else weight.t()).size(1) * (0 if group is None else group.rank())
    found = torch.empty(len(positions), k, dtype=torch.int64, device=rows.device)
    for here in torch.arange(len(positions), device=rows.device).split(LOGIT_CHUNK_ROWS):
        x = rows[positions[here]]
        x = scale_and_mask((x if weight is None else x @ weight.t()).float(), vocab_size, first, 1.0)
        keep_sets(x, kept, here, first)
        values, ids = x.topk(min(k, x.size(1)), dim=1)
        ids += first
        if size > 1:
            of_ranks = [[torch.empty_like(own) for _ in range(size)] for own in (values, ids)]
            for all_of_them, own in zip(of_ranks, (values, ids), strict=True):
                dist.all_gather(all_of_them, own, group=group)
            values, ids = (torch.cat(all_of_them, dim=1) for all_of_them in of_ranks)
            values, places = values.topk(k, dim=1)
            ids = ids.gather(1, places)
        found[here] = ids.masked_fill_(values.isneginf(), -1)
    return found


def _of_tokens(x: torch.Tensor, tokens: torch.Tensor, first: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Logits of ``tokens`` [rows, k] in ``x`` [rows, V/tp] of all ranks; 0 where there is no token."""
    local, inside = local_labels(tokens, first, x.size(1))
    return _of_all_ranks(x.gather(1, local).masked_fill(~inside, 0.0), group)


def _of_all_ranks(chosen: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(chosen, group=group)
    return chosen


def _joined(
    top: torch.Tensor,
    total: torch.Tensor,
    label_logit: torch.Tensor,
    weighted: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `row_statistics`, of what `kernels.rows.token_statistics` found in this rank's columns, all [rows]."""
    if group is not None and group.size() > 1:
        own = top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        share = (own - top).exp()  # 0 where all columns are padding
        total, weighted = total * share, weighted * share
    return _finished(top, torch.stack([total, label_logit, weighted]), group)


def _finished(
    top: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``sums`` [3, rows] of this rank's columns: Σ exp(z − top), the label's z, Σ exp(z − top)·z."""
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    logsumexp = top + sums[0].log()
    return sums[1] - logsumexp, logsumexp - sums[2] / sums[0], logsumexp


def local_labels(labels: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's column of each label, and whether it has one."""
    local = labels - first
    inside = (local >= 0) & (local < width)
    return local.clamp(0, width - 1), inside


class FusedHead:
    """Makes ``model``'s output layer pass hidden states through, and takes log-probs from them afterwards.

    What hooks do to the layer's input and weight (an fp32 head) happens as before. A subclass cannot do it, because
    `GPTModel` names the layer's class itself.
    """

    def __init__(self, model: GPTModel):
        self.config = model.config
        self._weight: torch.Tensor | None = None
        if model.post_process:
            self._layer = model.output_layer
            self._layer.forward = self._pass_through

    def _pass_through(self, input_: torch.Tensor, weight: torch.Tensor | None = None, **_: Any) -> tuple:
        self._weight = self._layer.weight if weight is None else weight  # tied embeddings arrive as an argument
        return input_, None

    def token_logprobs(
        self, hidden: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        """``hidden`` [1, N/tp, H]: what the model's forward pass just returned. The rest as for `head_logprobs`."""
        return head_logprobs(self._whole(hidden), self._weight, positions, labels, **options)

    def most_probable(self, hidden: torch.Tensor, positions: torch.Tensor, k: int, **options: Any) -> torch.Tensor:
        """As `most_probable`, of ``hidden`` as in `token_logprobs`."""
        return most_probable(self._whole(hidden), positions, k, weight=self._weight, **options)

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.transpose(0, 1)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)  # backward: adds up what the ranks' columns give
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden.squeeze(1)


def head_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy_gradient: bool = False,
    kept: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """``log softmax(hidden[positions] · weightᵀ / temperature)[labels]`` and the entropy of the same distributions.

    Args:
        hidden: [N, H], the same on every tensor-parallel rank.
        weight: [V/tp, H], this rank's rows.
        positions, labels, vocab_size, temperature, group, entropy_gradient, kept, head: as for `token_logprobs`.

    Returns:
        log-probs [n] float32, differentiable (in ``hidden`` the part of this rank's columns); entropy in nats [n]
        float32, detached unless ``entropy_gradient``; with ``head``, its log-probs [n, k] float32, differentiable.
    """
    return _HeadLogprobs.apply(
        hidden, weight, positions, labels, vocab_size, temperature, group, entropy_gradient, kept, head
    )


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, positions, labels, vocab_size, temperature, group, entropy_gradient, kept, head):
        first = len(weight) * (group.rank() if group is not None else 0)
        logprobs = torch.empty(len(positions), dtype=torch.float32, device=hidden.device)
        entropy, logsumexp = torch.empty_like(logprobs), torch.empty_like(logprobs)
        of_head = None if head is None else torch.empty(head.shape, dtype=torch.float32, device=hidden.device)
        for rows in torch.arange(len(positions), device=hidden.device).split(LOGIT_CHUNK_ROWS):
            x = _logits(hidden[positions[rows]], weight, vocab_size, first, temperature)
            keep_sets(x, kept, rows, first)
            logprobs[rows], entropy[rows], logsumexp[rows] = row_statistics(x, labels[rows], first, group)
            if head is not None:
                of_head[rows] = _of_tokens(x, head[rows], first, group) - logsumexp[rows, None]
        ctx.save_for_backward(hidden, weight, positions, labels, logsumexp, entropy, kept, head)
        ctx.numbers = (vocab_size, temperature, first)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return (logprobs, entropy) if head is None else (logprobs, entropy, of_head)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, grad_head=None):
        hidden, weight, positions, labels, logsumexp, entropy, kept, head = ctx.saved_tensors
        vocab_size, temperature, first = ctx.numbers
        grad_hidden = torch.zeros_like(hidden)
        # The sum over pieces is fp32: in 16 bits every further piece would lose a little.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in torch.arange(len(positions), device=hidden.device).split(LOGIT_CHUNK_ROWS):
            states = hidden[positions[rows]]
            x = _logits(states, weight, vocab_size, first, temperature)
            keep_sets(x, kept, rows, first)
            of_entropy = (grad_entropy[rows], entropy[rows]) if ctx.entropy_gradient else None
            of_head = None if head is None else (grad_head[rows], head[rows])
            _logit_gradient(
                x, labels[rows], first, logsumexp[rows], temperature, grad_logprobs[rows], of_entropy, of_head
            )
            x = x.to(weight.dtype)
            grad_hidden[positions[rows]] = x @ weight
            if grad_weight is not None:
                grad_weight += x.t() @ states
            del x  # frees this piece before the next one is made
        grad_weight = grad_weight.to(weight.dtype) if grad_weight is not None else None
        return grad_hidden, grad_weight, None, None, None, None, None, None, None, None


def _logits(states, weight, vocab_size, first, temperature) -> torch.Tensor:
    """[rows, H] → scaled fp32 logits [rows, V/tp], padding columns at −∞."""
    return scale_and_mask((states @ weight.t()).float(), vocab_size, first, temperature)
