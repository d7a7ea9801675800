"""What transformers computes for given tokens, each sequence by itself: a witness that is neither engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.instruments.parity.delta_net import keep_rule, tap_delta_net
from megatron_rl.instruments.parity.record import (
    Record,
    flat_tokens,
    joined,
    on_call,
    on_input,
    on_output,
    replaced,
    tensor_of,
)
from megatron_rl.model.architecture import read_architecture
from megatron_rl.model.families import FAMILIES as SUPPORTED

Tensor = torch.Tensor
WITNESS = "transformers"


def load(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model of ``path`` in ``dtype``, on the CPU."""
    from transformers import AutoModelForCausalLM

    SUPPORTED[read_architecture(path).model_type].register()
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def taps_of(model: torch.nn.Module, sequences: Sequence[Sequence[int]], temperature: float) -> Record:
    records = []
    for tokens in sequences:
        record = Record(WITNESS, [len(tokens)], flat_tokens([tokens]), model.dtype, temperature=temperature)
        with tapped(model, record):
            logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        record.keep("logits", logits)
        rows = record.predicting
        logprobs = (logits[rows].float() / temperature).log_softmax(-1)
        record.keep("logprob", logprobs.gather(1, record.tokens[rows + 1, None])[:, 0])
        records.append(record)
    return joined(records, WITNESS)


@contextmanager
def tapped(model: torch.nn.Module, record: Record) -> Iterator[None]:
    decoder = model.model
    with ExitStack() as stack:
        on_output(stack, decoder.embed_tokens, lambda out: record.keep("embedding", out[0]))
        current: list[int] = []
        for number, layer in enumerate(decoder.layers):
            _tap_layer(stack, record, number, layer, current)
        on_output(stack, decoder.norm, lambda out: record.keep("final_norm", out[0]))

        def rotated(output: tuple[Tensor, Tensor], *_: Any, **__: Any) -> None:
            for which, value in zip("qk", output, strict=True):
                record.keep(f"{current[0]}.{which}_rope", value[0].transpose(0, 1).flatten(1))

        has_pairs = getattr(model.config, "kv_lora_rank", None) and model.config.rope_interleave
        rotate = "apply_rotary_pos_emb_interleave" if has_pairs else "apply_rotary_pos_emb"
        source = sys.modules[type(decoder).__module__]
        on_call(stack, source, rotate, rotated)
        if hasattr(model.config, "linear_num_key_heads"):
            keep = lambda name, rows: record.keep(f"{current[0]}.{name}", rows)  # noqa: E731
            see = partial(keep_rule, keep, lambda: model.config.linear_num_key_heads)
            on_call(stack, source, "torch_chunk_gated_delta_rule", see)
        yield


def _tap_layer(stack: ExitStack, record: Record, number: int, layer: torch.nn.Module, current: list[int]) -> None:
    def keep(name: str) -> Any:
        return lambda output: record.keep(f"{number}.{name}", tensor_of(output)[0].flatten(1))

    attention, mlp = getattr(layer, "linear_attn", None) or layer.self_attn, layer.mlp
    stack.callback(attention.register_forward_pre_hook(lambda *_: current.__setitem__(slice(None), [number])).remove)
    on_output(stack, layer.input_layernorm, keep("input_norm"))
    if hasattr(layer, "linear_attn"):
        tap_delta_net(stack, lambda name, rows: record.keep(f"{number}.{name}", rows), attention)
        on_output(stack, attention.out_proj, keep("o_proj"))
    else:
        _tap_attention(stack, keep, attention)
    on_input(stack, layer.post_attention_layernorm, lambda inputs: keep("residual")(inputs[0]))
    on_output(stack, layer.post_attention_layernorm, keep("second_norm"))
    on_output(stack, mlp, keep("mlp"))
    on_output(stack, layer, keep("output"))
    if not hasattr(mlp, "experts"):
        on_output(stack, mlp.gate_proj, keep("gate"))
        on_output(stack, mlp.up_proj, keep("up"))
        on_input(stack, mlp.down_proj, lambda inputs: keep("activation")(inputs[0]))
        return

    if hasattr(mlp, "shared_experts"):  # with a gate it is multiplied later, where no module is
        on_output(stack, mlp.shared_experts, keep("shared"))

    def route(output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, weights, chosen = output
        record.keep(f"{number}.router_logits", logits)
        record.keep_route(number, chosen, weights)

    on_output(stack, mlp.gate, route)
    stack.enter_context(replaced(mlp.experts, "forward", partial(_with_each_expert, record, number)))


def _tap_attention(stack: ExitStack, keep: Any, attention: torch.nn.Module) -> None:
    has_gate = not hasattr(attention, "kv_b_proj") and attention.q_proj.out_features > attention.o_proj.in_features

    def split(output: Tensor) -> None:
        of_heads = output.unflatten(-1, (-1, 2, attention.head_dim))
        for which, name in enumerate(("q", "q_gate")):
            keep(name)(of_heads[..., which, :].flatten(2))

    if hasattr(attention, "kv_b_proj"):
        _tap_latent(stack, keep, attention)
    else:
        for which in "qkv":
            see = split if has_gate and which == "q" else keep(which)
            on_output(stack, getattr(attention, f"{which}_proj"), see)
    for which in "qk":
        if hasattr(attention, f"{which}_norm"):
            on_output(stack, getattr(attention, f"{which}_norm"), keep(f"{which}_norm"))
    on_input(stack, attention.o_proj, lambda inputs: keep("gated" if has_gate else "attention")(inputs[0]))
    on_output(stack, attention.o_proj, keep("o_proj"))


def _tap_latent(stack: ExitStack, keep: Any, attention: torch.nn.Module) -> None:
    """Latent attention, up to the queries, keys and values of heads."""
    if attention.q_proj is None:
        on_output(stack, attention.q_a_proj, keep("q_latent"))
        on_output(stack, attention.q_a_layernorm, keep("q_latent_norm"))
    on_output(stack, attention.q_proj or attention.q_b_proj, keep("q"))
    on_output(stack, attention.kv_a_proj_with_mqa, keep("kv_latent"))
    on_output(stack, attention.kv_a_layernorm, keep("kv_latent_norm"))
    widths = [attention.qk_nope_head_dim, attention.v_head_dim]

    def split(output: Tensor) -> None:
        of_heads = output.view(1, output.size(-2), -1, sum(widths))  # one head of latent vectors is in front
        for name, part in zip("kv", of_heads.split(widths, -1), strict=True):
            keep(name)(part)

    on_output(stack, attention.kv_b_proj, split)


def _with_each_expert(record: Record, layer: int, forward: Any) -> Any:
    """Experts are called again, one choice at a time, for the output of each."""

    def watched(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ones = torch.ones_like(weights[:, :1])
        record.keep_each_choice(layer, x, chosen, torch.arange(len(x)), lambda one: forward(x, one, ones))
        return forward(x, chosen, weights)

    return watched
