"""How a softmax in bf16 changes token probabilities, as in App. C.1 of "objective-level hacking".

    python -m tools.dev.softmax_study [--seeds 3]

Logits are drawn from N(0, 1.5²) over a vocabulary of 2048, and one token is sampled from each of 50,000 bf16
softmaxes. The ratio is the token's fp32 probability over its bf16 one, computed from bf16 logits to bf16
probabilities (with an fp32 sum, as in all common kernels). The paper reports mean 1.0000, std 0.0048, max 1.019,
min 0.981.

The paper prints a "KL divergence" of 0.014 to 0.047 and does not define it. Two definitions are printed:
kl is the mean over rows of Σ_v p log(p / p_bf16) in nats, the divergence of the two next-token distributions; the
bf16 probabilities of a row need not add up to one, so it can be slightly negative.
histogram_kl compares the two histograms of the paper's Fig 13, of the sampled tokens' probabilities in 500 bins:
Σ_b P_b log(P_b / Q_b), P of fp32 and Q of bf16, an empty bin counted as 1e-10. It comes from rare bins that one of
the two leaves empty, depends on their number and on that floor, and has the order and spread that the paper prints.

Other readings of "bf16 softmax" do not give the paper's numbers: rounding only the output has a std of 0.0016, and
bf16 arithmetic in every step, exponentials included, one of 0.0075.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

NUM_TOKENS, VOCABULARY, LOGIT_STD = 50_000, 2048, 1.5
HISTOGRAM_BINS, EMPTY_BIN = 500, 1e-10
PAPER = {"mean": 1.0, "std": 0.0048, "max": 1.0189, "min": 0.9815, "histogram_kl": 0.024220}
"""Averages of the paper's Table 2. Its KL is listed under the definition that gives values of this size."""
_ROWS_AT_A_TIME = 2_000  # 16 MB of fp32 logits, which fit a processor's cache better than 400 MB


@dataclass(frozen=True)
class Draw:
    """Probabilities of the sampled tokens, [num_tokens] float64, and the mean KL of the distributions."""

    exact: torch.Tensor  # fp32 softmax
    rounded: torch.Tensor  # bf16 softmax
    kl: float

    @property
    def ratios(self) -> torch.Tensor:
        return self.exact / self.rounded


def sample(seed: int, num_tokens: int = NUM_TOKENS) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    exact_of, rounded_of, divergence = [], [], 0.0
    for first in range(0, num_tokens, _ROWS_AT_A_TIME):
        rows = min(_ROWS_AT_A_TIME, num_tokens - first)
        logits = torch.randn(rows, VOCABULARY, generator=generator) * LOGIT_STD
        exact = logits.softmax(dim=-1)
        rounded = logits.bfloat16().softmax(dim=-1).float()
        tokens = torch.multinomial(rounded, 1, generator=generator)
        exact_of.append(exact.gather(1, tokens).squeeze(1).double())
        rounded_of.append(rounded.gather(1, tokens).squeeze(1).double())
        divergence += float((exact * (exact / rounded).log()).sum(dtype=torch.float64))
    return Draw(torch.cat(exact_of), torch.cat(rounded_of), divergence / num_tokens)


def histogram_kl(exact: torch.Tensor, rounded: torch.Tensor, bins: int = HISTOGRAM_BINS) -> float:
    """Return Σ_b P_b log(P_b / Q_b) in nats of the histograms of two samples, over their common range."""
    both = torch.cat([exact, rounded])
    low, high = float(both.min()), float(both.max())
    p, q = (torch.histc(values, bins, low, high) / len(values) + EMPTY_BIN for values in (exact, rounded))
    return float((p * (p / q).log()).sum())


def study(seed: int, num_tokens: int = NUM_TOKENS) -> dict[str, float]:
    """Return ``seed`` and mean, std, max, min, kl and histogram_kl of one draw."""
    draw = sample(seed, num_tokens)
    values = draw.ratios
    return {
        "seed": seed,
        "mean": values.mean().item(),
        "std": values.std().item(),
        "max": values.max().item(),
        "min": values.min().item(),
        "kl": draw.kl,
        "histogram_kl": histogram_kl(draw.exact, draw.rounded),
    }


def table(rows: list[dict[str, float]]) -> list[str]:
    """Return the lines of a table: the paper's averages, then a row per draw."""
    row = "{seed:>5}  {mean:.4f}  {std:.4f}  {max:.4f}  {min:.4f}  {kl:8.2e}  {histogram_kl:12.3f}"
    paper = "paper  {mean:.4f}  {std:.4f}  {max:.4f}  {min:.4f}            {histogram_kl:12.3f}"
    head = " seed    mean     std     max     min        kl  histogram_kl"
    return [head, paper.format(**PAPER), *(row.format(**figures) for figures in rows)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="draws, with seeds 0, 1, …")
    print("\n".join(table([study(seed) for seed in range(parser.parse_args().seeds)])))
