"""Cost of the objective and its metrics per optimizer step, in units of one pass of exp.

    python tools/bench_objective.py [--tokens 1048576] [--threads 2] [--repeats 7]

For each policy term, padded and packed: time of compute_objective with all metric statistics and the gradient of the
loss, the number of elementary operations it is made of (tensor operations that read or write at least as many
elements as there are tokens, counted by the dispatcher, views left out), and time / (operations · time of exp), which
is to stay at most 3. Times are minima over the repeats: other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import POLICY_TERMS, ObjectiveInputs, compute_denominators, compute_objective

MOST_PER_OPERATION = 3.0
CORRECTION = [
    {"mode": "tis", "level": "token", "cap": 2.0},
    {"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.001},
    {"mode": "veto"},
]


class CountOperations(TorchDispatchMode):
    """Counts dispatched operations on at least `size` elements that move data."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if not function.is_view and any(tensor.numel() >= self.size for tensor in tensors):
            self.count += 1
        return result


def make_inputs(num_tokens: int, length: int, packed: bool) -> ObjectiveInputs:
    """Rows of `length`, three quarters of each trained; the same tokens packed without the rest."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens // length, length)
    old = -torch.rand(shape, generator=generator) * 3 - 1e-3
    current = old + 0.1 * torch.randn(shape, generator=generator)
    inference = old + 0.02 * torch.randn(shape, generator=generator)
    mask = (torch.arange(length) < length * 3 // 4).expand(shape)
    advantages = torch.randn(shape[0], generator=generator)
    if not packed:
        return ObjectiveInputs(current.requires_grad_(), old, inference, advantages, mask.contiguous())
    offsets = torch.arange(shape[0] + 1) * length
    flat = [tensor.flatten() for tensor in (current, old, inference)]
    return ObjectiveInputs(
        flat[0].requires_grad_(), *flat[1:], advantages, mask.flatten().contiguous(), cu_seqlens=offsets
    )


def step(inputs: ObjectiveInputs, config: ObjectiveConfig) -> None:
    result = compute_objective(inputs, config, compute_denominators(inputs, config))
    torch.autograd.grad(result.loss, inputs.current_logprobs)
    _ = result.metrics


def shortest(function, repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 20, help="tokens of the step (default 1048576)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row (default 4096)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs, of which the shortest counts (default 7)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    values = torch.randn(options.tokens)
    exp = shortest(lambda: torch.exp(values), 5 * options.repeats)
    print(f"{options.tokens} tokens, float32, {options.threads} threads; one pass of exp: {exp * 1e3:.3f} ms")
    print(f"{'term':<12}{'form':<9}{'ms':>8}{'operations':>12}{'passes of exp':>15}{'per operation':>15}")
    worst = 0.0
    for name in POLICY_TERMS:
        correction = CORRECTION[1:] if name in ("minirl", "dppo") else CORRECTION
        aggregation = "seq-mean-token-mean" if name in ("gspo", "gmpo") else "token-mean"
        config = ObjectiveConfig(policy_term=name, correction=correction, aggregation=aggregation)
        for packed in (False, True):
            inputs = make_inputs(options.tokens, options.length, packed)
            with CountOperations(inputs.current_logprobs.numel()) as counter:
                step(inputs, config)
            seconds = shortest(lambda i=inputs, c=config: step(i, c), options.repeats)
            per_operation = seconds / exp / counter.count
            worst = max(worst, per_operation)
            row = f"{name:<12}{'packed' if packed else 'padded':<9}{seconds * 1e3:>8.1f}{counter.count:>12}"
            print(f"{row}{seconds / exp:>15.1f}{per_operation:>15.2f}")
    verdict = "within" if worst <= MOST_PER_OPERATION else "ABOVE"
    print(f"largest time per operation: {worst:.2f} passes of exp, {verdict} the limit of {MOST_PER_OPERATION:g}")
    return int(worst > MOST_PER_OPERATION)


if __name__ == "__main__":
    raise SystemExit(main())
