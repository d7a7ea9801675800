"""Metrics as sufficient statistics: what microbatches and ranks add up before anything is divided.

A microbatch yields three flat float64 tensors, sums, largest and smallest values, with static names. They add up
exactly over any split, so that a mean is a mean over the mini-batch and never a mean of means, and nothing waits for
the device until `finalize_metrics` reads the result once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MetricStats:
    """Reduce `sums` by addition, `maxs` by maximum and `mins` by minimum over the data-parallel ranks (not over ranks
    that hold the same tokens), then call `finalize_metrics`."""

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
        """A copy in host memory: waits for the device."""
        return MetricStats(*self.names, self.sums.cpu(), self.maxs.cpu(), self.mins.cpu())

    @classmethod
    def merge(cls, parts: Sequence[MetricStats]) -> MetricStats:
        """All parts as if computed in one call. They must come from one configuration."""
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
        """scale · Σ of values, accumulated in float64; zero (false) where masked is the caller's duty."""
        if values.dtype == torch.bool:
            self._sums[name] = torch.count_nonzero(values).double()
        else:
            self._sums[name] = self._float64(values).sum() * scale

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Σ of left · right, multiplied and accumulated in float64."""
        first = self._float64(left).flatten()
        self._sums[name] = torch.dot(first, first if right is left else self._float64(right, slot=1).flatten())

    def add_moments(self, name: str, values: Tensor) -> None:
        """Σ of values, and Σ of their squares as `name²`."""
        self.add(name, values)
        self.add_product(f"{name}²", values, values)

    def add_vector(self, name: str, values: Tensor) -> None:
        """Each of ``values`` [n] as a sum of its own, `name[0]` … `name[n-1]`."""
        self._sums |= {f"{name}[{i}]": value for i, value in enumerate(values.double().unbind())}

    def _float64(self, values: Tensor, slot: int = 0) -> Tensor:
        """The values in float64, in memory that the next conversion reuses: fresh pages cost more than the copy."""
        values = values.detach()
        if values.dtype == torch.float64:
            return values
        key = (slot, values.shape)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(values.shape, dtype=torch.float64, device=values.device)
        return self._scratch[key].copy_(values)

    def range_of(self, name: str, values: Tensor, mask: Tensor, smallest: bool = False) -> None:
        """Largest (and smallest) of the values under the mask; ∓inf where there is none."""
        if values.numel() == 0:
            values, mask = values.new_zeros(1), mask.new_zeros(1)
        self._maxs[name] = values.masked_fill(~mask, -torch.inf).amax().double()
        if smallest:
            self._mins[name] = values.masked_fill(~mask, torch.inf).amin().double()

    def stats(self) -> MetricStats:
        sums = torch.stack(list(self._sums.values()))
        maxs, mins = (
            torch.stack(list(found.values())) if found else sums.new_zeros(0) for found in (self._maxs, self._mins)
        )
        return MetricStats(tuple(self._sums), tuple(self._maxs), tuple(self._mins), sums, maxs, mins)
