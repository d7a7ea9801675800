"""Packing and dealing on a long-tailed length distribution: padding and idle ranks, against padded batches.

    python -m tools.bench.packing [--sequences 512] [--ranks 8] [--max-tokens 32768] [--median 2000] [--sigma 1.0]

Response lengths are log-normal, cut off at --longest, as in reasoning RL: most are short, a few run into the limit.
`packed` is what the learner does (`learner.packing.deal`). `padded` deals sequences in the order they come, --padded to
a microbatch, each padded to the longest of its microbatch. Counts of tokens, no times: the same on every machine.
Targets: padding ≤ 5%, imbalance of ranks ≤ 5%.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from megatron_rl.learner.packing import deal

Plan = list[list[list[int]]]  # indices of sequences by rank and microbatch


def draw_lengths(options: argparse.Namespace, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    prompts = random.integers(64, 512, options.sequences)
    responses = random.lognormal(np.log(options.median), options.sigma, options.sequences)
    return [int(p + min(max(r, 1), options.longest)) for p, r in zip(prompts, responses)]


def padded_plan(num_sequences: int, num_ranks: int, size: int) -> Plan:
    """Sequences as they come, ``size`` in every microbatch."""
    chunks = [list(range(i, min(i + size, num_sequences))) for i in range(0, num_sequences, size)]
    chunks += [[]] * (-len(chunks) % num_ranks)
    return [chunks[rank::num_ranks] for rank in range(num_ranks)]


def figures(plan: Plan, lengths: list[int], multiple_of: int, is_padded: bool) -> dict[str, float]:
    """Shares of padding, and of time that ranks wait for the fullest if time goes by tokens computed."""

    def computed(indices: list[int]) -> int:
        sizes = [lengths[i] for i in indices]
        return len(sizes) * max(sizes, default=0) if is_padded else -(-sum(sizes) // multiple_of) * multiple_of

    tokens = np.array([[computed(microbatch) for microbatch in rank] for rank in plan], dtype=float)
    per_rank = tokens.sum(axis=1)
    return {
        "padding_frac": 1 - sum(lengths) / tokens.sum(),
        # expert parallelism makes ranks meet in every microbatch; without it they meet at its end
        "imbalance of ranks": per_rank.max() / per_rank.mean() - 1,
        "imbalance, met in every microbatch": tokens.max(axis=0).sum() / per_rank.mean() - 1,
        "microbatches": float(tokens.shape[1]),
        "tokens computed": tokens.sum(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--max-tokens", type=int, default=32768, help="learner.max_tokens_per_microbatch")
    parser.add_argument("--median", type=float, default=2000, help="of response lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--longest", type=int, default=16384, help="rollout.max_response_length")
    parser.add_argument("--tensor", type=int, default=4, help="rows are padded to a multiple of this")
    parser.add_argument("--padded", type=int, default=8, help="sequences in a padded microbatch")
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    by_side: dict[str, list[dict[str, float]]] = {"packed": [], "padded": []}
    seconds = []
    for seed in range(options.batches):
        lengths = draw_lengths(options, seed)
        start = time.perf_counter()
        plan = deal(lengths, options.ranks, options.max_tokens)
        seconds.append(time.perf_counter() - start)
        assert sorted(i for rank in plan for microbatch in rank for i in microbatch) == list(range(len(lengths)))
        by_side["packed"].append(figures(plan, lengths, options.tensor, is_padded=False))
        padded = padded_plan(len(lengths), options.ranks, options.padded)
        by_side["padded"].append(figures(padded, lengths, 1, is_padded=True))
    mean, longest = statistics.fmean(lengths), max(lengths)
    print(f"{options.batches} batches of {options.sequences} sequences (mean {mean:.0f}, longest {longest} tokens) on "
          f"{options.ranks} ranks, {options.max_tokens} tokens a microbatch")  # fmt: skip
    print(f"{'median (worst) of the batches':<36}{'packed':>20}{'padded':>20}")
    for name in by_side["packed"][0]:
        cells = []
        for side in ("packed", "padded"):
            values = [batch[name] for batch in by_side[side]]
            shown = ".4f" if name.startswith(("padding", "imbalance")) else ".0f"
            cells.append(f"{statistics.median(values):{shown}} ({max(values):{shown}})")
        print(f"{name:<36}{cells[0]:>20}{cells[1]:>20}")
    ratio = statistics.median(
        p["tokens computed"] / q["tokens computed"] for p, q in zip(by_side["padded"], by_side["packed"])
    )
    print(
        f"padded batches compute {ratio:.2f} times the tokens; dealing takes {1e3 * statistics.median(seconds):.1f} ms"
    )


if __name__ == "__main__":
    main()
