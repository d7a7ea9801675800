"""What one witness computed for the same tokens: a tensor for each tap, in one layout for all witnesses.

Rows are the tokens of the sequences back to back, [N, …]. Tensors have the type in which the witness keeps them and lie
on the host. Heads, experts and halves of a projection are in the checkpoint's order. A tap of layer 3 is `3.q`; taps
outside of layers have a plain name. The experts of a token are in the order of their numbers.

The last functions watch a model while it runs: hooks and replaced methods that are gone when their block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor

BEFORE_LAYERS, AFTER_LAYERS = ("embedding",), ("final_norm", "logits", "logprob")
LATENT = ("q_latent", "q_latent_norm", "kv_latent", "kv_latent_norm")
DELTA_NET = ("qkv", "z", "b", "a", "conv", "decay", "strength", "delta", "delta_norm")
ATTENTION = (
    "input_norm",
    *LATENT,
    *("q", "k", "v", "q_gate"),
    *("q_norm", "k_norm"),
    *("q_rope", "k_rope"),
    *("attention", "gated", *DELTA_NET, "o_proj", "residual"),
)
EXPERTS = ("router_logits", "chosen", "weights", "expert", "shared", "mlp")
DENSE = ("gate", "up", "activation", "mlp")
IN_LAYER = (*ATTENTION, "second_norm", *EXPERTS[:-1], *DENSE, "output")
"""Operators of a layer in the order of the pass. `residual`: the sum after attention; `output`: after the MLP;
`shared`: of the expert that every token passes, with its gate. In latent attention `kv_latent` has the part of the key
that is turned behind it, `k` is the other part, and `q_rope` and `k_rope` are the turned parts alone. `gated`: after
attention's gate `q_gate`. `qkv` … `a`: projections of a delta net; `delta`: what its states give the queries;
`delta_norm`: after its norm and gate."""


def place(tap: str) -> tuple[int, int]:
    """Return a key that sorts taps as the pass runs."""
    layer, _, name = tap.rpartition(".")
    if layer:
        return int(layer), IN_LAYER.index(name)
    return (-1, 0) if name in BEFORE_LAYERS else (10**9, AFTER_LAYERS.index(name))


def in_words(tap: str) -> str:
    layer, _, name = tap.rpartition(".")
    return f"layer {layer}, {name}" if layer else name


@dataclass
class ExpertRows:
    """Rows that went through one expert. ``inputs``, ``outputs`` [M, width]; ``scales`` [M]: what the witness
    multiplied by inside the expert (1 where it does so afterwards); ``rows`` [M]: tokens, -1 where it does not say."""

    expert: int
    inputs: Tensor
    scales: Tensor
    outputs: Tensor
    rows: Tensor


@dataclass
class Record:
    """Outputs of one witness. ``witness``: its name in the report. ``dtype``: of its weights. ``weight_dtypes``: of
    `router`, `head` and `decay` (A_log) where they differ.

    ``parts``: tensor-parallel ranks, whose partial sums are rounded one by one.
    ``product``: see `arithmetic.Rounding`. ``temperature``: of the log-probs. ``rescaled``: sums of the residual stream
    were kept at another scale, which costs a rounding on the way there and one on the way back. ``generation``: of
    exact mode's pass, how many of its taps were held against its generation, and those that differ in a bit."""

    witness: str
    lengths: list[int]
    tokens: Tensor  # [N] int64
    dtype: torch.dtype
    taps: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[int, list[ExpertRows]] = field(default_factory=dict)  # by layer
    weight_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    parts: int = 1
    product: float = 0.0
    temperature: float = 1.0
    rescaled: bool = False
    generation: tuple[int, list[str]] | None = None

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for length in self.lengths[:-1]:
            starts.append(starts[-1] + length)
        return starts

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def predicting(self) -> Tensor:
        """Rows [M] that predict another token of their sequence: all but the last of each."""
        return torch.cat([torch.arange(n - 1) + start for start, n in zip(self.starts, self.lengths, strict=True)])

    def sequence_of(self, row: int) -> tuple[int, int]:
        """(number of the sequence, position in it) of a row."""
        number = max(i for i, start in enumerate(self.starts) if start <= row)
        return number, row - self.starts[number]

    def keep(self, tap: str, value: Tensor) -> None:
        """A tap's rows. They follow those that are there: an engine may compute the tokens one by one."""
        value = value.detach().to("cpu", copy=True)
        self.taps[tap] = torch.cat([self.taps[tap], value]) if tap in self.taps else value

    def keep_route(self, layer: int, chosen: Tensor, weights: Tensor) -> Tensor:
        """Experts and weights [n, K] of some rows. Returns the order [n, K] that sorts them."""
        chosen, order = chosen.detach().cpu().long().sort(-1)
        self.keep(f"{layer}.chosen", chosen)
        self.keep(f"{layer}.weights", weights.detach().cpu().gather(-1, order))
        return order

    def keep_each_choice(
        self, layer: int, inputs: Tensor, chosen: Tensor, rows: Tensor, alone: Callable[[Tensor], Tensor]
    ) -> None:
        """Rows of single experts. ``alone``: what one choice [n, 1] of each token returns with weight 1."""
        for choice in chosen.split(1, dim=1):
            outputs = alone(choice.contiguous()).detach().to("cpu", copy=True)
            for number in choice.unique().tolist():
                own = (choice[:, 0] == number).cpu()
                group = ExpertRows(number, inputs[own], torch.ones(int(own.sum())), outputs[own], rows[own])
                self.experts.setdefault(layer, []).append(group)

    def reordered(self, rows: Tensor) -> None:
        """Put row ``rows[i]`` of every tap at place i, and number the rows of experts anew."""
        back = torch.empty_like(rows)
        back[rows] = torch.arange(len(rows))
        self.taps = {name: value[rows] if len(value) == len(rows) else value for name, value in self.taps.items()}
        for group in (group for groups in self.experts.values() for group in groups):
            known = group.rows >= 0
            group.rows = torch.where(known, back[group.rows.clamp(min=0)], group.rows)


def joined(records: Sequence[Record], witness: str) -> Record:
    """Sequences of several records one after the other."""
    first = records[0]
    whole = Record(
        witness,
        [length for record in records for length in record.lengths],
        torch.cat([record.tokens for record in records]),
        first.dtype,
        weight_dtypes=first.weight_dtypes,
        parts=first.parts,
        product=first.product,
        temperature=first.temperature,
        rescaled=first.rescaled,
    )
    for record in records:
        before = 0 if "embedding" not in whole.taps else len(whole.taps["embedding"])
        for layer, groups in record.experts.items():
            for group in groups:
                group.rows = torch.where(group.rows >= 0, group.rows + before, group.rows)
            whole.experts.setdefault(layer, []).extend(groups)
        for name, value in record.taps.items():
            whole.keep(name, value)
    return whole


def flat_tokens(sequences: Iterable[Sequence[int]]) -> Tensor:
    return torch.tensor([token for sequence in sequences for token in sequence])


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Within the block, ``owner.name`` is ``make`` of what it was. ``owner``: a module of Python, class or object."""
    had = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def on_call(stack: ExitStack, owner: Any, name: str, see: Callable[..., None]) -> None:
    """Give ``see`` what each call of ``owner.name`` returns, then its arguments, until ``stack`` closes."""

    def make(call: Callable) -> Callable:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            see(result, *args, **kwargs)
            return result

        return watched

    stack.enter_context(replaced(owner, name, make))


def on_output(stack: ExitStack, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
    """Give ``see`` what comes out of ``module``, until ``stack`` closes."""
    stack.callback(module.register_forward_hook(lambda _module, _inputs, output: see(output)).remove)


def on_input(stack: ExitStack, module: torch.nn.Module, see: Callable[[tuple], None]) -> None:
    """Give ``see`` the positional inputs of ``module``, until ``stack`` closes."""
    stack.callback(module.register_forward_pre_hook(lambda _module, inputs: see(inputs)).remove)


def tensor_of(output: Any) -> torch.Tensor:
    """The tensor of an output that may come with a bias or a context."""
    return output[0] if isinstance(output, tuple) else output
