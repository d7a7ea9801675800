"""Every operator of a witness against its definition: own error, its bound, and what was inherited.

`own`: what the operator returned, less what its definition returns for the same inputs. `inherited`: that, less what
the whole model in float64 has there. An operator whose own error passes its bound computes something else than the
checkpoint says, whatever came before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.instruments.parity.arithmetic import FP32
from megatron_rl.instruments.parity.definition import Checkpoint, Evaluation
from megatron_rl.instruments.parity.delta_net import evaluation_of
from megatron_rl.instruments.parity.record import Record, in_words, place

Tensor = torch.Tensor
SHOWN = 8  # positions and failures that a report lists


@dataclass(frozen=True)
class OperatorError:
    """Errors of one operator of one witness. ``ratio``: the largest own error over its bound, of the element at
    ``worst`` (sequence, position), whose error and bound are ``own`` and ``bound``. ``largest``, ``largest_bound``,
    ``inherited``: over all elements. ``rows_beyond``: tokens with an element beyond its bound."""

    witness: str
    tap: str
    own: float
    bound: float
    ratio: float
    largest: float
    largest_bound: float
    inherited: float
    worst: tuple[int, int] | None
    rows_beyond: int
    num_rows: int
    positions: tuple[int, ...] = ()  # of the first rows beyond
    experts: tuple[int, ...] = ()  # those with rows beyond

    @property
    def passes(self) -> bool:
        return self.ratio <= 1.0

    def sentence(self) -> str:
        where = f" at sequence {self.worst[0]}, position {self.worst[1]}" if self.worst else ""
        experts = f"; experts {', '.join(map(str, self.experts))}" if self.experts else ""
        some = ""
        if self.positions and self.rows_beyond < self.num_rows:
            more = " …" if self.rows_beyond > len(self.positions) else ""
            some = f" (positions {', '.join(map(str, self.positions))}{more})"
        return (
            f"{in_words(self.tap)} of {self.witness}: own error {self.own:.3g}, bound {self.bound:.3g} "
            f"({self.ratio:.3g} times){where}; {self.rows_beyond} of {self.num_rows} rows beyond{some}{experts}"
        )


@dataclass
class Comparison:
    errors: list[OperatorError] = field(default_factory=list)
    logprob_differences: dict[str, float] = field(default_factory=dict)  # witness → largest |difference to float64|
    generation: tuple[int, list[str]] | None = None  # of exact mode, see `record.Record`
    seen: tuple[int, int] = (0, 0)  # positions and different tokens that were looked at

    @property
    def passes(self) -> bool:
        return not self.failures and not (self.generation and self.generation[1])

    @property
    def failures(self) -> list[OperatorError]:
        """Sorted as the pass runs."""
        return sorted((e for e in self.errors if not e.passes), key=lambda e: place(e.tap))

    @property
    def first(self) -> list[OperatorError]:
        """The first operator that fails, in every witness where it does."""
        failures = self.failures
        return [e for e in failures if e.tap == failures[0].tap]

    @property
    def witnesses(self) -> list[str]:
        return list(dict.fromkeys(e.witness for e in self.errors))

    def verdict(self) -> str:
        if not self.failures and not self.passes:
            tap = in_words(self.generation[1][0])
            return f"fail: exact mode's generation is not bit for bit its pass, first at {tap}"
        if not self.failures:
            positions, tokens = self.seen
            return (
                "pass: every operator of every witness is within its bound, at the first "
                f"{positions} positions and for {tokens} different tokens"
            )
        tap, names = self.first[0].tap, [e.witness for e in self.first]
        others = [e.witness for e in self.errors if e.tap == tap and e.witness not in names]
        if not others:
            stands = "; every witness that has this operator departs from the checkpoint"
        elif len(names) == 1:
            stands = f"; {names[0]} stands alone: {', '.join(others)} are within their bounds there"
        else:
            stands = f"; {', '.join(names)} depart, {', '.join(others)} do not"
        return f"fail: the first operator beyond its bound is {in_words(tap)}{stands}"


def compare(checkpoint: Checkpoint, records: Sequence[Record]) -> Comparison:
    """Hold every operator of ``records`` to its definition."""
    result = Comparison()
    truths: dict[tuple, Evaluation] = {}
    for record in records:
        key = (record.dtype, tuple(sorted(record.weight_dtypes.items(), key=str)), record.temperature)
        if key not in truths:
            plain = Record("float64", record.lengths, record.tokens, record.dtype, temperature=record.temperature)
            plain.weight_dtypes = record.weight_dtypes
            truths[key] = evaluation_of(checkpoint, plain)
        _compare_one(record, evaluation_of(checkpoint, record), truths[key], result)
        result.generation = record.generation or result.generation
        result.seen = max(record.lengths), len(set(record.tokens.tolist()))
    return result


def _compare_one(record: Record, own: Evaluation, truth: Evaluation, result: Comparison) -> None:
    layer = -1
    for tap in own.taps():
        number, _, name = tap.rpartition(".")
        if number and int(number) != layer:
            if layer > 0:
                own.forget(layer - 1)
            layer = int(number)
        if name == "expert":
            result.errors += _expert_errors(record, own, layer)
        elif tap not in record.taps:
            continue
        elif name == "chosen":
            result.errors.append(_choice_error(record, own, layer))
        else:
            result.errors.append(_operator_error(record, own, truth, tap))
    if "logprob" in record.taps:
        gap = (record.taps["logprob"].double() - truth.own("logprob").value).abs()
        result.logprob_differences[record.witness] = float(gap.max())


def _ratio(error: Tensor, bound: Tensor) -> Tensor:
    """error / bound; 0 where there is no error, infinite where it is not a number or has no bound."""
    ratio = torch.where(error == 0, 0.0, error / bound)
    return torch.nan_to_num(ratio, nan=torch.inf, posinf=torch.inf)


def _operator_error(record: Record, own: Evaluation, truth: Evaluation, tap: str) -> OperatorError:
    wanted, values, free = own.define(tap), record.taps[tap].double(), truth.own(tap)
    width = wanted.value.size(-1) if wanted.value.dim() > 1 else None
    values = values[:, :width] if width else values  # without padding of the vocabulary
    rows = record.predicting if tap == "logprob" else torch.arange(len(values))
    error = (values - wanted.value).abs()
    chosen = record.taps.get(tap.replace(".mlp", ".chosen")) if tap.endswith(".mlp") else None
    comparable = free.value.shape == wanted.value.shape
    inherited = float((wanted.value - free.value).abs().max()) if comparable else float("nan")
    return _worst(record, tap, error, wanted.error, rows, inherited, chosen)


def _worst(
    record: Record,
    tap: str,
    error: Tensor,
    bound: Tensor,
    rows: Tensor,
    inherited: float,
    chosen: Tensor | None = None,
) -> OperatorError:
    """Find the largest ``error`` over ``bound``, [M, …]. Rows are the tokens ``rows`` [M]; -1: an unknown token."""
    ratio = _ratio(error, bound).flatten(1) if error.dim() > 1 else _ratio(error, bound)[:, None]
    of_row, columns = ratio.max(1)
    worst = int(of_row.argmax())
    at = (worst, int(columns[worst]))
    beyond = (of_row > 1).nonzero().flatten()
    token = int(rows[worst])
    return OperatorError(
        record.witness,
        tap,
        own=float(error.reshape(len(error), -1)[at]),
        bound=float(bound.reshape(len(bound), -1)[at]),
        ratio=float(of_row[worst]),
        largest=float(error.nan_to_num(torch.inf).max()),
        largest_bound=float(bound.max()),
        inherited=inherited,
        worst=record.sequence_of(token) if token >= 0 else None,
        rows_beyond=len(beyond),
        num_rows=len(of_row),
        positions=tuple(record.sequence_of(int(rows[i]))[1] for i in beyond[:SHOWN] if int(rows[i]) >= 0),
        experts=_always_beyond(of_row > 1, chosen) if chosen is not None else (),
    )


def _always_beyond(beyond: Tensor, chosen: Tensor) -> tuple[int, ...]:
    """Experts all of whose tokens are beyond, where some tokens are not."""
    if not beyond.any() or beyond.all():
        return ()
    return tuple(int(e) for e in chosen.unique() if beyond[(chosen == e).any(-1)].all())


def _expert_errors(record: Record, own: Evaluation, layer: int) -> list[OperatorError]:
    """One entry for all experts of a layer; it names those that are beyond."""
    errors, bounds, rows, numbers = [], [], [], []
    for group in record.experts.get(layer, ()):
        if len(group.inputs):
            wanted = own.expert_rows(layer, group)
            errors.append((group.outputs.double() - wanted.value).abs())
            bounds.append(wanted.error)
            rows.append(group.rows)
            numbers.append(torch.full((len(group.inputs),), group.expert))
    if not errors:
        return []
    error, bound, number = torch.cat(errors), torch.cat(bounds), torch.cat(numbers)
    worst = _worst(record, f"{layer}.expert", error, bound, torch.cat(rows), float("nan"))
    beyond = number[(_ratio(error, bound) > 1).any(-1)].unique().tolist()
    return [OperatorError(**{**vars(worst), "experts": tuple(beyond)})]


def _choice_error(record: Record, own: Evaluation, layer: int) -> OperatorError:
    """How far the worst chosen score is below the best one left out. A softmax before the choice may round two
    probabilities to one number: some units of the scores. Where weights are a softmax over all experts, the choice may
    be among probabilities in the type of the logits: p (1 − u) ≤ q (1 + u) for logits that are 2u / (1 − u) apart."""
    scores, chosen = own.choice_scores(layer), record.taps[f"{layer}.chosen"].long()
    groups = own.checkpoint.groups
    bound = 8 * FP32 * (1 + scores.value.abs().amax(-1)) + 2 * scores.error.amax(-1)
    if not (own.checkpoint.renormalised or own.checkpoint.has_sigmoid_router):
        unit = own.rounding(f"{layer}.router_logits").unit
        bound = bound + 2 * unit / (1 - unit)
    error = _left_out(scores.value, chosen, groups, bound).clamp(min=0)
    twice = chosen.sort(-1).values.diff(dim=-1).eq(0).any(-1)
    error = error.masked_fill(twice, torch.inf)
    return _worst(record, f"{layer}.chosen", error, bound, torch.arange(len(error)), float("nan"))


def _left_out(scores: Tensor, chosen: Tensor, groups: tuple[int, int], bound: Tensor) -> Tensor:
    """[N]: the largest of ``scores`` [N, E] that was left out, less the smallest that was chosen. −∞ where all are.

    ``groups``: how many there are, and how many of them a token may choose experts of: those with the largest sum of
    two. Then it is also how far the worst group that has a chosen expert is below the best ones, by half as it is a
    sum. An expert counts as left out in groups that were taken for certain, up to ``bound`` [N].
    """
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    lowest = scores.masked_fill(~inside, torch.inf).amin(-1)
    others = scores.masked_fill(inside, -torch.inf)
    number, taken = groups
    if taken == number:
        return others.amax(-1) - lowest
    of_group = scores.unflatten(-1, (number, -1)).topk(2).values.sum(-1)
    largest = of_group.topk(taken + 1).values
    certain = of_group > (largest[:, -1] + 2 * bound)[:, None]
    others = others.masked_fill(~certain.repeat_interleave(scores.size(1) // number, 1), -torch.inf)
    used = inside.unflatten(-1, (number, -1)).any(-1)
    behind = (largest[:, -2] - of_group.masked_fill(~used, torch.inf).amin(-1)) / 2
    return torch.maximum(others.amax(-1) - lowest, behind)
