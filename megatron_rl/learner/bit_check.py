"""The check of exact mode: the probability of every sampled token is bit for bit the one that the update computes [VX].

In every step, before the optimizer moves, it compares what generation recorded with what the learner's passes computed:
the pass for old log-probs if there is one, and the forward pass of the step's first update. A difference ends the run.
Both computations are then repeated layer by layer, so that the message names the first layer that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_rl.errors import RunEnded
from megatron_rl.exact.generator import GivenTokens
from megatron_rl.exact.invariant import batch_invariant
from megatron_rl.exact.step import forward, watched
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.passes import tokens_at
from megatron_rl.process.ranks import gather_objects
from megatron_rl.types import Batch


def check(learner: Learner, batch: Batch, logprobs: dict[int, np.ndarray], where: str, among: Sequence[int]) -> float:
    """Compare a pass's ``logprobs`` (sequence index → [R]) with what generation recorded.

    ``logprobs``: of this rank's replica. ``where``: the pass, for the message. ``among``: the sequences of the pass
    on all replicas, of which `exact.gate` says how many are compared. Collective, the same on all ranks.
    Returns `BIT_CHECK_METRIC` over all sequences, which is 0.0 where it returns at all.

    Raises:
        RunEnded: a token differs; names sequence, token, both values and the first layer that computes differently.
    """
    largest, wrong = 0.0, None
    compared = sample(among, learner.recipe.exact.gate, learner.recipe.seed, batch.step)
    for index in sorted(compared.intersection(logprobs)):
        sequence = batch.sequences[index]
        recorded = sequence.exact_logprobs
        assert recorded is not None, (
            f"sequence {sequence.id!r} has no exact_logprobs: rollout.engine exact records them"
        )
        differs = recorded != logprobs[index]  # NaN differs from itself
        if differs.any():
            wrong = index, _message(batch, index, int(np.argmax(differs)), logprobs[index], where)
            break
        largest = max(largest, float(np.abs(np.exp(recorded) - np.exp(logprobs[index])).max()))
    shares = gather_objects((largest, wrong))
    first = min((problem for _, problem in shares if problem is not None), default=None)
    if first is not None:
        index, message = first
        raise RunEnded(f"{message} {first_divergence(learner, batch, index)}")
    return max(gap for gap, _ in shares)


def sample(among: Sequence[int], gate: int | str, seed: int, step: int) -> set[int]:
    """The sequences that the gate compares: all of ``among``, or ``gate`` of them."""
    if gate == "all" or gate >= len(among):
        return set(among)
    return set(np.random.default_rng((seed, step)).choice(np.asarray(among), gate, replace=False).tolist())


def _message(batch: Batch, index: int, token: int, logprobs: np.ndarray, where: str) -> str:
    sequence = batch.sequences[index]
    log_mu, log_po = float(sequence.exact_logprobs[token]), float(logprobs[token])
    number = int((sequence.exact_logprobs != logprobs).sum())
    return (
        f"exact mode, step {batch.step}: sequence {sequence.id!r}, response token {token} (id "
        f"{sequence.tokens[token]}): log mu {log_mu:.9g} in generation, log po {log_po:.9g} "
        f"in the {where}, |exp - exp| = {abs(np.exp(log_mu) - np.exp(log_po)):.3g}; {number} of {len(logprobs)} tokens "
        "of the sequence differ."
    )


def first_divergence(learner: Learner, batch: Batch, index: int) -> str:
    """Say where generation and training, computed again, first differ for a sequence. Collective."""
    trained, generated = _trained_rows(learner, batch, index), _generated_rows(learner, batch, index)
    first_difference = None
    if trained and generated:
        for position in sorted(generated):
            for place, (name, value) in enumerate(generated[position].items()):
                if first_difference is None and not torch.equal(value, trained[position][name]):
                    first_difference = (position, parallel_state.get_pipeline_model_parallel_rank(), place, name)
    both = [item for item in gather_objects(first_difference) if item is not None]
    if both:
        position, _, _, name = min(both)
        return f"First difference when both are computed again: token {position} of the sequence, output of the {name}"
    return (
        "Computed again, both agree in every layer: the weights changed between generation and update, or a kernel is "
        "not deterministic"
    )


Rows = dict[int, dict[str, torch.Tensor]]
"""position in the sequence → layer → what came out for that token."""


def _trained_rows(learner: Learner, batch: Batch, index: int) -> Rows:
    rows: Rows = {}
    everything = next((part for part in batch.minibatches if index in part), [index])
    for microbatch in learner.passes.microbatches(batch, everything):
        start = None
        if index in microbatch.indices:
            before = microbatch.indices[: microbatch.indices.index(index)]
            start = sum(batch.sequences[i].whole_length for i in before)
        length = batch.sequences[index].whole_length

        def keep(name: str, hidden: torch.Tensor, start: int | None = start, length: int = length) -> None:
            for position in range(length if start is not None else 0):
                rows.setdefault(position, {})[name] = hidden[start + position].clone()

        with watched(learner.module, keep), torch.no_grad(), batch_invariant(learner.device):
            forward(learner.module, microbatch.tokens, microbatch.position_ids, microbatch.packed)
    return rows


def _generated_rows(learner: Learner, batch: Batch, index: int) -> Rows:
    """The step's sequences generated again, with their tokens given.

    They are batched as in generation, without the groups that `batch.filter_groups` has left out.
    """
    decoder, rows = learner.decoder(), {}
    tokens = tokens_at(batch, decoder.replica_of(len(batch.sequences)), learner.replicas)
    # Of what another replica generates the decoder knows the length alone.
    responses = [tokens.get(i, np.zeros(s.length, np.int32)) for i, s in enumerate(batch.sequences)]

    def keep(name: str, hidden: torch.Tensor) -> None:
        for row, (sequence, position) in enumerate(decoder.row_owners):
            if sequence == index and position < batch.sequences[index].whole_length:
                rows.setdefault(position, {})[name] = hidden[row].clone()

    with decoder.watched(keep):
        decoder.run(
            [list(s.prompt) for s in batch.sequences],
            [len(response) for response in responses],
            GivenTokens(responses, learner.device),
        )
    return rows
