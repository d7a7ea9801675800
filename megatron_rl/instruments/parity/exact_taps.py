"""What the generation of exact mode computes for given tokens: one token at a time, by `exact.step` and its cache.

A step is a chain of functions of `exact.step`. They are watched there, in the order in which a layer calls them. Rows
of padding are left out. Where ranks share the layers (tensor, pipeline), a step's parts are not put together: this
witness runs on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.exact import step as exact_step
from megatron_rl.exact.decode import Decoder
from megatron_rl.exact.generator import GivenTokens
from megatron_rl.exact.layers import CachedStep
from megatron_rl.instruments.parity import learner_taps
from megatron_rl.instruments.parity.record import ExpertRows, Record, replaced
from megatron_rl.learner.logprobs import token_logprobs

Tensor = torch.Tensor
WITNESS = "exact generation"


@torch.no_grad()
def run(module: GPTModel, sequences: Sequence[Sequence[int]], *, vocabulary: int, temperature: float = 1.0) -> Record:
    """Generate ``sequences`` from their first tokens on; every further token is given."""
    device = next(module.parameters()).device
    whole = learner_taps._empty(module, sequences, WITNESS, 0.0, temperature)
    decoder = Decoder(
        module,
        vocabulary,
        device,
        token_logprobs,
        max_tokens=len(whole.tokens),
        max_sequences=len(sequences),
        kv_cache=True,
        cache_gib=None,
    )
    prompts = [list(tokens[:1]) for tokens in sequences]
    # One further token makes the last one's row; which token it is does not matter.
    responses = [np.array([*tokens[1:], tokens[0]]) for tokens in sequences]
    taps = _Taps(decoder, whole)
    with taps.on():
        decoder.run(prompts, [len(response) for response in responses], GivenTokens(responses, device))
    taps.finish()
    rows = whole.predicting
    logits = whole.taps["logits"][rows].to(device)
    whole.taps["logprob"] = decoder.logprobs(logits, whole.tokens[rows + 1].to(device), temperature).cpu()
    return whole


class _Taps:
    """Rows of every pass, put where they belong in ``record``."""

    def __init__(self, decoder: Decoder, record: Record):
        self._decoder, self._record = decoder, record
        self._pass = Record("", [], torch.empty(0), record.dtype)  # of the pass at hand
        self._rows: dict[str, Tensor] = {}
        self._layer = 0
        self._calls: list[str] = []
        self._is_shared = False  # whether the expert that every token passes is at work

    @contextmanager
    def on(self) -> Iterator[None]:
        module = self._decoder.passes.module
        forward = self._decoder.passes.step_forward
        assert forward is not None, "exact mode has no steps under this layout"
        with ExitStack() as stack:
            for name in ("_norm", "linear", "rotate", "route", "experts", "add_experts", "gated"):
                stack.enter_context(
                    replaced(exact_step, name, lambda function, name=name: self._watched(name, function))
                )
            stack.enter_context(replaced(CachedStep, "attend", self._attend))
            stack.enter_context(replaced(forward, "_attention", self._attention))
            stack.enter_context(replaced(forward, "_feed_forward", self._feed_forward))
            stack.enter_context(replaced(forward, "_shared_expert", self._shared_expert))
            stack.enter_context(replaced(self._decoder.passes, "one_step", self._one_step))
            stack.enter_context(replaced(self._decoder.passes, "whole_rows", self._whole_rows(module)))
            yield

    def keep(self, name: str, value: Tensor) -> None:
        self._pass.keep(f"{self._layer}.{name}", value)

    # -- passes

    def _one_step(self, step: Any) -> Any:
        def watched(tokens: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            forward, seen = self._decoder.passes.step_forward, {}
            before, forward.watch = forward.watch, lambda name, x: seen.__setitem__(name, x)
            try:
                logits = step(tokens, positions, *args, **kwargs)
            finally:
                forward.watch = before
            self._pass.keep("embedding", seen["embedding"])
            self._pass.keep("final_norm", seen["final norm"])
            for layer in range(self._layer + 1):
                self._pass.keep(f"{layer}.output", seen[f"layer {layer}"])
            self._pass.keep("logits", logits)
            self._store()
            return logits

        return watched

    def _whole_rows(self, module: GPTModel) -> Any:
        def make(whole_rows: Any) -> Any:
            def watched(*args: Any, **kwargs: Any) -> Tensor:
                with learner_taps.tapped(module, self._pass):
                    logits = whole_rows(*args, **kwargs)
                self._store()
                return logits

            return watched

        return make

    def _store(self) -> None:
        """Rows of the pass into the record, by sequence and position."""
        starts, lengths = self._record.starts, self._record.lengths
        rows, places = [], []
        for row, (sequence, position) in enumerate(self._decoder.row_owners):
            if position < lengths[sequence]:
                rows.append(row)
                places.append(starts[sequence] + position)
        for name, value in self._pass.taps.items():
            if name not in self._rows:
                self._rows[name] = value.new_zeros(len(self._record.tokens), *value.shape[1:])
            self._rows[name][places] = value[rows]
        numbers = torch.full((max(map(len, self._pass.taps.values())),), -1)
        numbers[rows] = torch.tensor(places)
        for layer, groups in self._pass.experts.items():
            for group in groups:
                if (group.rows < 0).all():  # of a pass of the module, which does not number them
                    self._record.experts.setdefault(layer, []).append(group)
                    continue
                group.rows = numbers[group.rows]
                known = group.rows >= 0
                kept = ExpertRows(
                    group.expert, group.inputs[known], group.scales[known], group.outputs[known], group.rows[known]
                )
                self._record.experts.setdefault(layer, []).append(kept)
        self._pass.taps, self._pass.experts = {}, {}

    def finish(self) -> None:
        self._record.taps = self._rows | self._record.taps

    # -- functions of a step

    def _attention(self, function: Any) -> Any:
        def watched(number: int, layer: Any, x: Tensor, *args: Any) -> Tensor:
            self._layer = number
            self._calls = ["input_norm", "qkv", "q_norm", "q_rope", "k_norm", "k_rope", "o_proj"]
            self._attention_part = layer.self_attention
            out = function(number, layer, x, *args)
            self.keep("residual", x + out)
            self._calls = ["second_norm"]
            return out

        return watched

    def _feed_forward(self, function: Any) -> Any:
        def watched(layer: Any, x: Tensor) -> Tensor:
            self._calls = ["router_logits"] if hasattr(layer.mlp, "experts") else ["gate_up", "", "down"]
            self._moe = layer.mlp
            out = function(layer, x)
            self.keep("mlp", out)
            self._calls = []
            return out

        return watched

    def _shared_expert(self, function: Any) -> Any:
        def watched(part: Any, x: Tensor) -> Tensor:
            self._is_shared = True
            out = function(part, x)
            self._is_shared = False
            self.keep("shared", out)
            return out

        return watched

    def _watched(self, name: str, function: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if name == "experts":
                self._experts(args, out)
            elif name == "route":
                self._pass.keep_route(self._layer, out[1], out[0])
            elif name == "gated" and not self._is_shared:
                self.keep("activation", out)
            elif name != "add_experts" and self._calls:
                self._next(self._calls.pop(0), args, out)
            return out

        return watched

    def _next(self, tap: str, args: tuple, out: Tensor) -> None:
        part = getattr(self, "_attention_part", None)
        if tap == "qkv":
            groups, width = part.num_query_groups_per_partition, part.hidden_size_per_attention_head
            mixed = out.view(len(out), groups, -1, width)
            self.keep("q", mixed[..., :-2, :].flatten(1))
            self.keep("k", mixed[..., -2, :].flatten(1))
            self.keep("v", mixed[..., -1, :].flatten(1))
        elif tap == "gate_up":
            gate, up = out.chunk(2, dim=-1)
            self.keep("gate", gate)
            self.keep("up", up)
            self._calls = []
        elif tap in ("q_norm", "k_norm"):
            norm = part.q_layernorm if tap == "q_norm" else part.k_layernorm
            if learner_taps._is_norm(norm):
                self.keep(tap, out.flatten(1))
        elif tap:
            self.keep(tap, out.flatten(1))

    def _attend(self, function: Any) -> Any:
        def watched(step: Any, *args: Any, **kwargs: Any) -> Tensor:
            out = function(step, *args, **kwargs)
            self.keep("attention", out.flatten(1))
            return out

        return watched

    def _experts(self, args: tuple, out: tuple[Tensor, Tensor]) -> None:
        x, probs, chosen = args[:3]
        results, places = out
        for column in range(chosen.size(1)):
            of_rows = results[places[:, column]]
            for number in chosen[:, column].unique().tolist():
                rows = (chosen[:, column] == number).nonzero().flatten()
                parts = (x[rows], probs[rows, column], of_rows[rows])
                group = ExpertRows(number, *(part.to("cpu", copy=True) for part in parts), rows.cpu())
                self._pass.experts.setdefault(self._layer, []).append(group)
