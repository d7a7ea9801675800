"""Routes of a packed row of tokens, the slice of one rank, and the proof that the slice is that of its tokens.

Shapes: N packed tokens of a microbatch, n = N / tp of them on this rank, L MoE layers of the model, l of them on this
pipeline stage, K experts per token. Layers are counted among the MoE layers of the whole model, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_rl.config.routing import RoutingConfig
from megatron_rl.routing.checksum import route_seals, sequence_key, token_keys
from megatron_rl.routing.errors import RouteError
from megatron_rl.routing.payload import RouteShape, checked_routes, missing_id
from megatron_rl.types import Sequence

PADDING_ID = "padding"  # sequence id of the tokens that fill the row up


@dataclass
class RouteSlice:
    """Routes of one microbatch as one rank needs them."""

    experts: np.ndarray  # [n, l, K], `RouteShape.dtype`; rows of `missing_id` are left to the router
    seals: np.ndarray  # [n, l] uint64, made when the row was packed
    is_real: np.ndarray  # [n] bool: not padding
    num_due: int  # (token, layer) rows of this slice that should have a route
    parts: list[tuple[str, int]]  # sequence ids and lengths of the whole packed row, for messages
    first_row: int  # where this slice begins in it
    indices: list[torch.Tensor] = field(default_factory=list)  # per layer [n, K] int64, -1 throughout: no record
    counted: torch.Tensor | None = None  # [n, l] bool on the device: real tokens with a route

    def verify(self, keys: np.ndarray, layers: Seq[int], shape: RouteShape) -> None:
        """Hold the slice against the tokens and layers that are really on this rank.

        ``keys`` [n] uint64: `token_keys` of the tokens as Megatron deals them to this rank. ``layers`` [l]: what the
        routers say of themselves. Raises `RouteError` that names sequence, layer and token.
        """
        if self.experts.shape[:2] != (len(keys), len(layers)):
            raise RouteError(
                f"routes of {self.experts.shape[:2]} (tokens, layers) for a rank that holds {(len(keys), len(layers))}"
            )
        wrong = route_seals(keys, self.experts, layers) != self.seals
        if wrong.any():
            row, layer = (int(x) for x in np.argwhere(wrong)[0])
            sequence, token = self._owner(row)
            raise RouteError(
                f"sequence {sequence}, layer {shape.layers[layers[layer]]}, token {token}: the route sliced for this "
                f"rank belongs to another token or layer ({wrong.sum()} of {wrong.size} rows differ)"
            )

    def _owner(self, row: int) -> tuple[str, int]:
        """Sequence id and position of a row of the slice."""
        row += self.first_row
        for sequence_id, length in self.parts:
            if row < length:
                return sequence_id, row
            row -= length
        raise AssertionError("row beyond the packed row")

    def to_device(self, device: torch.device) -> None:
        """Make what the routers read: ids with -1 for "no record" stay on the host, where they are inspected."""
        missing = self._missing()
        ids = np.swapaxes(self.experts, 0, 1).astype(np.int64, order="C")  # [l, n, K]
        ids[missing.T] = -1
        self.indices = list(torch.from_numpy(ids))
        self.counted = torch.from_numpy(~missing & self.is_real[:, None]).to(device)

    @property
    def num_missing(self) -> int:
        """(token, layer) rows that should have a route and have none."""
        return self.num_due - int((~self._missing() & self.is_real[:, None]).sum())

    def _missing(self) -> np.ndarray:
        """[n, l] bool: no record. Rows are whole: where one id is missing, all are."""
        return self.experts[..., 0] == missing_id(self.experts.dtype)


@dataclass
class PackedRoutes:
    """Routes of all tokens of a packed row, in every MoE layer."""

    experts: np.ndarray  # [N, L, K]
    seals: np.ndarray  # [N, L] uint64
    ids: list[str]  # of the sequences in the row, then padding
    lengths: list[int]

    def take(self, rows: slice, layers: Seq[int]) -> RouteSlice:
        """The slice of a rank that holds ``rows`` and ``layers``."""
        # The last token of a sequence was sampled and never fed to the engine: no route is due.
        due = np.concatenate([np.arange(n) < n - 1 if i != PADDING_ID else np.zeros(n, bool) for i, n in self._parts()])
        real = np.concatenate([np.full(n, i != PADDING_ID) for i, n in self._parts()])
        return RouteSlice(
            experts=_columns(self.experts[rows], layers),
            seals=_columns(self.seals[rows], layers),
            is_real=real[rows],
            num_due=int(due[rows].sum()) * len(layers),
            parts=self._parts(),
            first_row=rows.start,
        )

    def _parts(self) -> list[tuple[str, int]]:
        return list(zip(self.ids, self.lengths, strict=True))


def _columns(x: np.ndarray, layers: Seq[int]) -> np.ndarray:
    """``x`` [n, L, …] at ``layers``, contiguous. A whole row of layers is not copied."""
    return x if list(layers) == list(range(x.shape[1])) else np.ascontiguousarray(x[:, list(layers)])


def pack_routes(sequences: list[Sequence], num_padding: int, shape: RouteShape, config: RoutingConfig) -> PackedRoutes:
    """Routes of ``sequences``, one after another, then ``num_padding`` tokens of padding: as `build_microbatch` does.

    The last token of each sequence has no record. Padding is spread over the experts in turn: left to the router, all
    of it would crowd into the same ones. Raises `RouteError` (see `checked_routes`).
    """
    num_layers, ids, lengths = len(shape.layers), [s.id for s in sequences], [len(s.tokens) for s in sequences]
    experts, seals = [], []
    nothing = np.full((1, num_layers, shape.topk), missing_id(shape.dtype), dtype=shape.dtype)
    for s in sequences:
        routes, sealed = checked_routes(s, shape, config.malformed)
        last = len(s.tokens) - 1
        key = token_keys(s.tokens[last:], np.array([last]), sequence_key(s.id))
        experts += [routes, nothing]
        seals += [sealed, route_seals(key, nothing, range(num_layers))]
    if num_padding:
        padding = padding_routes(num_padding, shape)
        keys = token_keys(np.zeros(num_padding), np.arange(num_padding), sequence_key(PADDING_ID))
        experts.append(padding)
        seals.append(route_seals(keys, padding, range(num_layers)))
        ids, lengths = [*ids, PADDING_ID], [*lengths, num_padding]
    return PackedRoutes(np.concatenate(experts), np.concatenate(seals), ids, lengths)


def padding_routes(num_padding: int, shape: RouteShape) -> np.ndarray:
    """[num_padding, L, K]: experts in turn, no two layers beginning at the same one until all have had their turn."""
    start = np.arange(num_padding)[:, None] * shape.topk + np.arange(len(shape.layers))
    return ((start[..., None] + np.arange(shape.topk)) % shape.num_experts).astype(shape.dtype)


def packed_keys(tokens: np.ndarray, positions: np.ndarray, ids: list[str], lengths: list[int]) -> np.ndarray:
    """`token_keys` of a packed row from the tensors that the model gets: [N] uint64."""
    sequence_keys = np.repeat(np.array([sequence_key(i) for i in ids], dtype=np.uint64), lengths)
    return token_keys(tokens, positions, sequence_keys)
