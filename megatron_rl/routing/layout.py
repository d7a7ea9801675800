"""Routes of a packed row of tokens: the slice of one rank, the check that it belongs to its tokens, and measurements.

Shapes: N packed tokens of a microbatch, n = N / (tp · cp) of them on this rank, L MoE layers of the model, l of them on
this pipeline stage, E experts, K of them per token. Layers are numbered among the MoE layers of the whole model, from
0.

A *row* is one token in one MoE layer. It agrees if the router's own top-k and the recorded ids are the same set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from megatron_rl.routing.payload import (
    RouteError,
    RouteShape,
    checked_routes,
    missing_id,
    route_seals,
    sequence_key,
    token_keys,
)
from megatron_rl.types import Rollout

PADDING_ID = "padding"  # sequence id of the padding at the end of a row


@dataclass
class RouteSlice:
    """The routes of one microbatch for one rank."""

    experts: np.ndarray  # [n, l, K], `RouteShape.dtype`; the router decides rows of `missing_id`
    seals: np.ndarray | None  # [n, l] uint64, from the whole sequences' tokens; None after `settle`
    is_real: np.ndarray  # [n] bool: not padding
    num_due: int  # (token, layer) rows of this slice that should have a route
    parts: list[tuple[str, int]]  # sequence ids and lengths of the whole packed row, for messages
    ranges: list[tuple[int, int]]  # (start, stop) of the slice's rows in the packed row, in order
    num_missing: int = 0  # (token, layer) rows whose route is missing
    gaps: tuple[bool, ...] = ()  # [l]: whether any row of the layer has no record

    def verify(self, keys: np.ndarray, layers: Seq[int], shape: RouteShape) -> None:
        """Check the slice against the actual tokens and layers of this rank.

        ``keys`` [n] uint64: `token_keys` of the tokens that Megatron assigns to this rank. ``layers`` [l]: the layer
        numbers of the routers. Raises `RouteError` that names sequence, layer and token.
        """
        if self.experts.shape[:2] != (len(keys), len(layers)):
            raise RouteError(
                f"routes of {self.experts.shape[:2]} (tokens, layers) for a rank that holds {(len(keys), len(layers))}"
            )
        wrong = route_seals(keys, self.experts, layers) != self.seals
        if wrong.any():
            row, layer = (int(x) for x in np.argwhere(wrong)[0])
            sequence, token = self.owner(row)
            raise RouteError(
                f"sequence {sequence}, layer {shape.layers[layers[layer]]}, token {token}: the route sliced for this "
                f"rank belongs to another token or layer ({wrong.sum()} of {wrong.size} rows differ)"
            )

    def owner(self, row: int) -> tuple[str, int]:
        """Return sequence id and position of a row of the slice."""
        for start, stop in self.ranges:
            if row < stop - start:
                row += start
                break
            row -= stop - start
        for sequence_id, length in self.parts:
            if row < length:
                return sequence_id, row
            row -= length
        raise AssertionError("row beyond the packed row")

    def settle(self) -> None:
        """Free the seals after all checks; they are as large as the routes."""
        missing = self._missing()
        self.seals, self.gaps = None, tuple(missing.any(axis=0).tolist())
        self.num_missing = self.num_due - int((~missing & self.is_real[:, None]).sum())

    def on(self, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the routers' input on ``device``: ids per layer [n, K] int64, and counted [n, l] bool.

        Rows without a record are -1. ``counted`` marks real tokens with a route. The ids are copied as bytes and become
        integers on the device.
        """
        small = self.experts if self.experts.dtype == np.uint8 else self.experts.astype(np.int32)
        layers = torch.from_numpy(small).to(device).unbind(1)
        # One block per layer: the allocator can reuse blocks of this size, but would need new pages for a single large
        # one.
        ids = [layer.to(torch.int64, memory_format=torch.contiguous_format) for layer in layers]
        real = torch.from_numpy(self.is_real).to(device)[:, None]
        if not any(self.gaps):
            return ids, real.expand(-1, len(ids))
        missing = [layer[:, :1] == missing_id(self.experts.dtype) for layer in layers]
        for layer, gap in zip(ids, missing, strict=True):
            layer.masked_fill_(gap, -1)
        return ids, ~torch.cat(missing, dim=1) & real

    def _missing(self) -> np.ndarray:
        """Return the rows without a record, [n, l] bool. In such a row all ids are missing."""
        return self.experts[..., 0] == missing_id(self.experts.dtype)


@dataclass
class _Part:
    """Routes of one sequence, or of padding, in every MoE layer."""

    id: str
    length: int  # S tokens
    keys: np.ndarray  # [S] uint64
    experts: np.ndarray  # [m, L, K]: m = S - 1 for a sequence, S for the padding
    seals: np.ndarray | None  # [m, L] uint64; None: computed when taken

    def take(self, first: int, last: int, layers: Seq[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield experts and seals of tokens ``first`` to ``last`` - 1. A sequence's last token has no record."""
        end = min(last, len(self.experts))
        if first < end:
            experts = _columns(self.experts[first:end], layers)
            if self.seals is None:
                yield experts, route_seals(self.keys[first:end], experts, layers)
            else:
                yield experts, _columns(self.seals[first:end], layers)
        if last > len(self.experts):
            nothing = np.full((1, len(layers), self.experts.shape[2]), missing_id(self.experts.dtype))
            nothing = nothing.astype(self.experts.dtype)
            yield nothing, route_seals(self.keys[-1:], nothing, layers)


@dataclass
class PackedRoutes:
    """Routes of all tokens of a packed row. They are copied only when a rank takes its slice."""

    parts: list[_Part]

    def take(self, ranges: Seq[tuple[int, int]], layers: Seq[int]) -> RouteSlice:
        """Return the slice of a rank with the rows of ``ranges`` (start, stop), in order, and ``layers``."""
        taken, real, num_due = [], [], 0
        starts = np.cumsum([0, *(part.length for part in self.parts)]).tolist()
        for begin, end in ranges:
            for number in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
                part, start = self.parts[number], starts[number]
                first, last = max(begin - start, 0), min(end - start, part.length)
                taken += part.take(first, last, layers)
                is_real = part.id != PADDING_ID
                real.append(np.full(last - first, is_real))
                num_due += (min(last, part.length - 1) - first if is_real else 0) * len(layers)
        return RouteSlice(
            experts=np.concatenate([experts for experts, _ in taken]),
            seals=np.concatenate([seals for _, seals in taken]),
            is_real=np.concatenate(real),
            num_due=num_due,
            parts=[(part.id, part.length) for part in self.parts],
            ranges=list(ranges),
        )


def _columns(x: np.ndarray, layers: Seq[int]) -> np.ndarray:
    """Return ``x`` [n, L, …] at ``layers``, contiguous; without a copy if these are all layers."""
    return x if list(layers) == list(range(x.shape[1])) else np.ascontiguousarray(x[:, list(layers)])


def pack_routes(
    sequences: list[Rollout],
    num_padding: int,
    shape: RouteShape,
    known: CheckedRoutes | None = None,
    after: Seq[int] = (),
) -> PackedRoutes:
    """Return the routes of ``sequences`` in order, then of ``num_padding`` tokens of padding, as in `build_microbatch`.

    ``after``: padding tokens after each sequence, whose positions continue those of the sequence. The last token of
    each sequence has no record. Padding is spread evenly over the experts; the router would send it all to the same
    ones. ``known``: its sequences are not checked again; the others are added to it. Raises `RouteError` (see
    `checked_routes`).
    """
    known, parts, padded = CheckedRoutes() if known is None else known, [], 0

    def pad(number: int, first_position: int) -> None:
        nonlocal padded
        keys = token_keys(np.zeros(number), np.arange(number) + first_position, sequence_key(PADDING_ID))
        parts.append(_Part(PADDING_ID, number, keys, padding_routes(number, shape, padded), None))
        padded += number

    for s, follows in zip_longest(sequences, after, fillvalue=0):
        routes, seals = known.get(s), None
        if routes is None:
            routes, seals = checked_routes(s, shape)
            known.add(s, routes)
        keys = token_keys(s.whole, np.arange(s.whole_length), sequence_key(s.id))
        parts.append(_Part(s.id, s.whole_length, keys, routes, seals))
        if follows:
            pad(follows, s.whole_length)
    if num_padding:
        pad(num_padding, 0)
    return PackedRoutes(parts)


class CheckedRoutes:
    """Routes that passed their checks, so that the next pass of a step does not repeat them.

    A sequence is identified by the checked arrays themselves: other tokens, routes or checksums are checked again.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple, np.ndarray]] = {}

    def get(self, sequence: Rollout) -> np.ndarray | None:
        arrays, routes = self._found.get(sequence.id, ((), None))
        same = len(arrays) == 3 and all(a is b for a, b in zip(arrays, self._arrays(sequence), strict=True))
        return routes if same else None

    def add(self, sequence: Rollout, routes: np.ndarray) -> None:
        self._found[sequence.id] = (self._arrays(sequence), routes)

    @staticmethod
    def _arrays(sequence: Rollout) -> tuple:
        return sequence.tokens, sequence.routed_experts, sequence.route_checksums


def padding_routes(num_padding: int, shape: RouteShape, before: int = 0) -> np.ndarray:
    """Return routes for padding, [num_padding, L, K]: experts in turn, starting at different experts per layer.

    ``before``: number of padding tokens that already have routes.
    """
    start = (before + np.arange(num_padding))[:, None] * shape.topk + np.arange(len(shape.layers))
    return ((start[..., None] + np.arange(shape.topk)) % shape.num_experts).astype(shape.dtype)


def parts_in(parts: Seq[tuple[str, int]], ranges: Seq[tuple[int, int]]) -> list[tuple[str, int]]:
    """Return ids and lengths of the pieces of ``parts`` (of the whole row) in the rows of ``ranges``."""
    starts, parts_of_range = np.cumsum([0, *(length for _, length in parts)]).tolist(), []
    for begin, end in ranges:
        for number in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
            parts_of_range.append((parts[number][0], min(end, starts[number + 1]) - max(begin, starts[number])))
    return parts_of_range


def packed_keys(tokens: np.ndarray, positions: np.ndarray, ids: list[str], lengths: list[int]) -> np.ndarray:
    """Return the `token_keys` [N] uint64 of a packed row from the model's input tensors."""
    sequence_keys = np.repeat(np.array([sequence_key(i) for i in ids], dtype=np.uint64), lengths)
    return token_keys(tokens, positions, sequence_keys)


# Margins are counted in bins of equal width in log10, from below the resolution of fp32 up to 1.
MARGIN_BINS, MARGIN_FLOOR = 80, -8.0
MARGIN_QUANTILES = (1, 10, 50)
_OUTSIDE = 9.0  # log10 margin for rows that are not counted; outside the histogram's range


class LayerTelemetry:
    """Counts of one router, on its device. No method waits for the device."""

    def __init__(self, device: torch.device):
        self.agreed = torch.zeros((), dtype=torch.float64, device=device)
        self.counted = torch.zeros((), dtype=torch.float64, device=device)
        self.margins = torch.zeros(MARGIN_BINS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def observe(
        self, probs: torch.Tensor, own: torch.Tensor, recorded: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor:
        """Add one forward pass: ``probs`` [n, E] fp32, ``own`` and ``recorded`` [n, K] ids, ``counted`` [n] bool.

        Returns [n] bool: counted rows whose two choices differ.
        """
        agrees = (own.sort(dim=1).values == recorded.sort(dim=1).values).all(dim=1)
        self.agreed += (agrees & counted).sum()
        self.counted += counted.sum()
        topk = own.size(1)
        if topk < probs.size(1):
            top = probs.topk(topk + 1, dim=1).values
            margin = (top[:, -2] - top[:, -1]).clamp(min=10.0**MARGIN_FLOOR).log10()
            margin = margin.clamp(max=-1e-6).masked_fill(~counted, _OUTSIDE)
            self.margins += torch.histc(margin, bins=MARGIN_BINS, min=MARGIN_FLOOR, max=0.0)
        return ~agrees & counted

    def packed(self) -> torch.Tensor:
        """Return the counts to add up over ranks, [2 + MARGIN_BINS] float64."""
        return torch.cat([torch.stack([self.agreed, self.counted]), self.margins])


def margin_quantiles(histogram: np.ndarray) -> dict[str, float]:
    """Return quantiles of p_k − p_(k+1), to within a bin (a factor of 10^0.1); empty without counts."""
    total = histogram.sum()
    if total == 0:
        return {}
    below = np.concatenate([[0.0], np.cumsum(histogram)]) / total
    edges = np.linspace(MARGIN_FLOOR, 0.0, MARGIN_BINS + 1)
    return {f"router/margin_q{q:02d}": float(10 ** np.interp(q / 100, below, edges)) for q in MARGIN_QUANTILES}


def router_metrics(
    layers: Seq[int], counts: np.ndarray, *, flipped: float, tokens: float, due: float, missing: float,
    bytes_per_token: float, is_replayed: bool,
) -> dict[str, float]:  # fmt: skip
    """Return `router/*` from the counts of a whole step.

    ``layers`` [L]: numbers of the MoE layers in the model. ``counts`` [L, 2 + MARGIN_BINS]: sums of
    `LayerTelemetry.packed`. ``flipped`` of ``tokens`` tokens with a route differ in at least one layer. ``due`` rows
    should have a route (all but those of each sequence's last token); ``missing`` of them have none. A share with
    denominator 0 is left out.
    """
    agreed, counted = counts[:, 0], counts[:, 1]
    metrics = {
        **_share("router/agree_frac", agreed.sum(), counted.sum()),
        **_share("router/any_flip_frac", flipped, tokens),
        "router/payload_bytes": float(bytes_per_token),
        **margin_quantiles(counts[:, 2:].sum(axis=0)),
    }
    if is_replayed:
        metrics |= _share("router/replay_coverage", due - missing, due) | _share("router/fallback_frac", missing, due)
    for layer, good, number in zip(layers, agreed, counted, strict=True):
        metrics |= _share(f"router/agree_frac/layer_{layer}", good, number)
    return metrics


def _share(name: str, part: float, whole: float) -> dict[str, float]:
    return {name: float(part / whole)} if whole else {}
