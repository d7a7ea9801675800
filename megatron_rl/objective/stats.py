"""Metrics as sufficient statistics that microbatches and ranks add up before any division.

A microbatch gives three flat float64 tensors with static names: sums, largest and smallest values. They add up exactly
over any split, so that a mean is over the whole mini-batch and never a mean of means. Only `finalize_metrics` waits for
the device, once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MetricStats:
    """Named sums, maxima and minima of metrics.

    Reduce `sums` by addition, `maxs` by maximum and `mins` by minimum over the data-parallel ranks (not over ranks with
    the same tokens), then call `finalize_metrics`.
    """

    sum_names: tuple[str, ...]
    max_names: tuple[str, ...]
    min_names: tuple[str, ...]
    sums: Tensor  # [len(sum_names)] float64
    maxs: Tensor  # [len(max_names)] float64
    mins: Tensor  # [len(min_names)] float64

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        return self.sum_names, self.max_names, self.min_names

    def cpu(self) -> MetricStats:
        """Return a copy in host memory; waits for the device."""
        return MetricStats(*self.names, self.sums.cpu(), self.maxs.cpu(), self.mins.cpu())

    @classmethod
    def merge(cls, parts: Sequence[MetricStats]) -> MetricStats:
        """Return the statistics of all parts, as if computed in one call. They must have the same configuration."""
        first = parts[0]
        assert all(part.names == first.names for part in parts), "statistics of different configurations"
        return cls(
            *first.names,
            sums=torch.stack([part.sums for part in parts]).sum(dim=0),
            maxs=torch.stack([part.maxs for part in parts]).amax(dim=0),
            mins=torch.stack([part.mins for part in parts]).amin(dim=0),
        )


class Collector:
    """Builds one MetricStats."""

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._maxs: dict[str, Tensor] = {}
        self._mins: dict[str, Tensor] = {}
        self._scratch: dict[tuple[int, torch.Size], Tensor] = {}

    def add(self, name: str, values: Tensor, scale: float = 1.0) -> None:
        """Add scale · Σ of values in float64. The caller must set masked values to zero (false)."""
        if values.dtype == torch.bool:
            self._sums[name] = torch.count_nonzero(values).double()
        else:
            self._sums[name] = self._float64(values).sum() * scale

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add Σ of left · right, computed in float64."""
        first = self._float64(left).flatten()
        self._sums[name] = torch.dot(first, first if right is left else self._float64(right, slot=1).flatten())

    def add_moments(self, name: str, values: Tensor) -> None:
        """Add Σ of values, and Σ of their squares as `name²`."""
        self.add(name, values)
        self.add_product(f"{name}²", values, values)

    def add_vector(self, name: str, values: Tensor) -> None:
        """Add each of ``values`` [n] as a separate sum, `name[0]` … `name[n-1]`."""
        self._sums |= {f"{name}[{i}]": value for i, value in enumerate(values.double().unbind())}

    def _float64(self, values: Tensor, slot: int = 0) -> Tensor:
        """Return the values in float64, in a buffer that later calls reuse: new pages cost more than the copy."""
        values = values.detach()
        if values.dtype == torch.float64:
            return values
        key = (slot, values.shape)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(values.shape, dtype=torch.float64, device=values.device)
        return self._scratch[key].copy_(values)

    def range_of(self, name: str, values: Tensor, mask: Tensor, smallest: bool = False) -> None:
        """Add the largest (and smallest) value under the mask; ∓inf if the mask is empty."""
        if values.numel() == 0:
            values, mask = values.new_zeros(1), mask.new_zeros(1)
        self._maxs[name] = values.masked_fill(~mask, -torch.inf).amax().double()
        if smallest:
            self._mins[name] = values.masked_fill(~mask, torch.inf).amin().double()

    def stats(self) -> MetricStats:
        sums = torch.stack(list(self._sums.values()))
        maxs, mins = (
            torch.stack(list(tensors.values())) if tensors else sums.new_zeros(0)
            for tensors in (self._maxs, self._mins)
        )
        return MetricStats(tuple(self._sums), tuple(self._maxs), tuple(self._mins), sums, maxs, mins)
