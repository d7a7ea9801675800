"""Log-probs and their gradient at a large vocabulary: the fused head against materialised logits, memory and time.

    python -m tools.bench.head [--tokens 2048] [--width 256] [--vocab 151936] [--rounds 3]

Each side runs in processes of its own, alternating; peak memory is the process's largest resident set minus what it was
when weights and hidden states were there. Memory is exact from run to run; of times, quote the ratio.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def measure(side: str, tokens: int, width: int, vocab: int) -> dict[str, float]:
    """One forward and backward pass in this process: peak MiB above the inputs, seconds, and sums to compare."""
    import torch

    from megatron_rl.learner.logprobs import head_logprobs, token_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocab, width) / width**0.5).requires_grad_()
    positions, labels = torch.arange(tokens), torch.randint(0, vocab, (tokens,))
    before = peak_kib()
    start = time.perf_counter()
    if side == "fused":
        logprobs, _ = head_logprobs(hidden, weight, positions, labels, vocab_size=vocab)
    else:
        logprobs, _ = token_logprobs(hidden @ weight.t(), positions, labels, vocab_size=vocab)
    logprobs.mean().backward()
    seconds = time.perf_counter() - start
    peak = (peak_kib() - before) / 1024
    norms = {"hidden_grad": float(hidden.grad.norm()), "weight_grad": float(weight.grad.norm())}
    return {"peak_mib": peak, "seconds": seconds, "mean_logprob": logprobs.mean().item(), **norms}


def peak_kib() -> int:
    """The most memory that this program has held. `getrusage` would count what its parent held when it forked, too."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("fused", "whole"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.tokens, options.width, options.vocab)
    if options.side:
        print(json.dumps(measure(options.side, *sizes)))
        return
    by_side: dict[str, list[dict[str, float]]] = {"whole": [], "fused": []}
    for _ in range(options.rounds):
        for side, results in by_side.items():
            command = [sys.executable, "-m", "tools.bench.head", *sys.argv[1:], "--side", side]
            results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    middle = {
        side: {k: statistics.median(r[k] for r in results) for k in results[0]} for side, results in by_side.items()
    }
    logits = options.tokens * options.vocab * 4 / 2**20
    print(f"{options.tokens} tokens, width {options.width}, vocabulary {options.vocab}, fp32: logits {logits:.0f} MiB")
    for side, values in middle.items():
        print(f"{side:<6} " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    print(f"peak memory fused/whole {middle['fused']['peak_mib'] / middle['whole']['peak_mib']:.3f}")
    ratios = [f["seconds"] / w["seconds"] for f, w in zip(by_side["fused"], by_side["whole"], strict=True)]
    print(f"time fused/whole {statistics.median(ratios):.2f} (rounds: {', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()
