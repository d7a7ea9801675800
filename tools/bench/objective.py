"""Cost of the objective and its metrics per optimizer step, in units of one pass of exp.

    python -m tools.bench.objective [--tokens 1048576] [--threads 2] [--repeats 7]

For each policy term, padded and packed: time of compute_objective with all metric statistics and the gradient of the
loss, the number of elementary operations it is made of (tensor operations that read or write at least as many
elements as there are tokens, counted by the dispatcher, views left out), the time of as many passes of exp, and the
ratio, which is to stay at most 3. Times are minima over repeats that alternate between the two; with more threads than
idle cores they say little.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import POLICY_TERMS, ObjectiveInputs, compute_denominators, compute_objective

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


def shortest(functions: list, repeats: int) -> list[float]:
    """Shortest time of each function in s, called in turn so that other work on the machine hits all of them."""
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, seconds in zip(functions, times):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in times]


def passes_of_exp(values: torch.Tensor, num_passes: int) -> None:
    for _ in range(num_passes):
        torch.exp(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 20, help="tokens of the step (default 1048576)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row (default 4096)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs, of which the shortest counts (default 7)")
    parser.add_argument("--most", type=float, default=3.0, help="passes of exp that an operation may take (default 3)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    values = torch.randn(options.tokens)
    print(f"{options.tokens} tokens, float32, {options.threads} threads")
    print(f"{'term':<12}{'form':<9}{'ms':>8}{'operations':>12}{'as many exp, ms':>17}{'ratio':>8}")
    worst = 0.0
    for name in POLICY_TERMS:
        correction = CORRECTION[1:] if name in ("minirl", "dppo", "vespo") else CORRECTION
        aggregation = "seq-mean-token-mean" if name in ("gspo", "gmpo") else "token-mean"
        config = ObjectiveConfig(policy_term=name, correction=correction, aggregation=aggregation)
        for packed in (False, True):
            inputs = make_inputs(options.tokens, options.length, packed)
            with CountOperations(inputs.current_logprobs.numel()) as counter:
                step(inputs, config)
            seconds, exp = shortest(
                [partial(step, inputs, config), partial(passes_of_exp, values, counter.count)], options.repeats
            )
            worst = max(worst, seconds / exp)
            row = f"{name:<12}{'packed' if packed else 'padded':<9}{seconds * 1e3:>8.1f}{counter.count:>12}"
            print(f"{row}{exp * 1e3:>17.1f}{seconds / exp:>8.2f}", flush=True)
    verdict = "within" if worst <= options.most else "ABOVE"
    print(f"largest time per operation: {worst:.2f} passes of exp, {verdict} the limit of {options.most:g}")
    return int(worst > options.most)


if __name__ == "__main__":
    raise SystemExit(main())
