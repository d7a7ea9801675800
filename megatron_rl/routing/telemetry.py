"""Measurements of routes: agreement of the learner's own choice with the recorded routes, and gate margins.

A *row* is one token in one MoE layer. It agrees if the router's own top-k and the recorded ids are the same set.
Shapes: n tokens of a rank, l MoE layers of its pipeline stage, L of the model, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
    layers: Sequence[int], counts: np.ndarray, *, flipped: float, tokens: float, due: float, missing: float,
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
