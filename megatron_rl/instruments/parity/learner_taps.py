"""What the learner's model (Megatron-Core) computes for given tokens, packed into one row, under its layout.

Parts of tensor-parallel ranks are put together at each tap, so that no more than one tensor is there twice. Each rank
of a pipeline has the taps of its layers, each rank of an expert group the rows of its experts, and each
context-parallel rank its rows of every tap; `run` joins them on every rank. Queries and keys are split, normalised and
rotated in one function: it is called again without a rotation for what the norms return.

Shapes: N rows of the pass, a multiple of the tensor-parallel size; b = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_rl.exact.invariant import batch_invariant
from megatron_rl.exact.step import forward
from megatron_rl.instruments.parity.record import (
    ExpertRows,
    Record,
    flat_tokens,
    on_call,
    on_input,
    on_output,
    replaced,
    tensor_of,
)
from megatron_rl.layers.attention import PackedSequences
from megatron_rl.layers.context import ContextShare
from megatron_rl.learner.logprobs import token_logprobs
from megatron_rl.learner.model import use_transformer_engine
from megatron_rl.process.ranks import gather_objects

Tensor = torch.Tensor
WITNESS = "learner"


@torch.no_grad()
def run(
    module: GPTModel,
    sequences: Sequence[Sequence[int]],
    *,
    vocabulary: int,
    witness: str = WITNESS,
    exact: bool = False,
    product: float = 0.0,
    temperature: float = 1.0,
) -> Record:
    """One pass of ``module`` over ``sequences``. Collective; the record is whole on every rank."""
    device = next(module.parameters()).device
    group = parallel_state.get_tensor_model_parallel_group()
    record = _empty(module, sequences, witness, product, temperature)
    share = ContextShare.of_this_rank()
    padded = [share.padded(length) for length in record.lengths]
    tail = -sum(padded) % share.row_multiple(group.size())
    padded = [*padded, tail] if tail else padded
    places = _places(record, padded)[torch.cat([torch.arange(a, b) for a, b in share.ranges(padded)])]
    tokens = torch.where(places >= 0, record.tokens[places], 0).to(device)
    positions = torch.cat([torch.as_tensor(share.positions(n)) for n in padded]).to(device)
    packed = PackedSequences.from_lengths(padded, device, use_transformer_engine(device, exact), share)
    was_training = module.training
    module.eval()
    try:
        with tapped(module, record), batch_invariant(device) if exact else nullcontext():
            logits = forward(module, tokens[None], positions, packed).flatten(0, 1)
            if module.post_process:
                predicting = torch.isin(places, record.predicting).nonzero().flatten()
                labels = record.tokens[places[predicting] + 1].to(device)
                predicted, _ = token_logprobs(
                    logits,
                    predicting.to(device),
                    labels,
                    vocab_size=vocabulary,
                    temperature=temperature,
                    group=group,
                    exact=exact,
                )
                logprobs = torch.zeros(len(places), dtype=predicted.dtype)
                logprobs[predicting] = predicted.cpu()
                record.keep("logprob", logprobs)
    finally:
        module.train(was_training)
    return _joined(record, places)


def _places(record: Record, padded: Sequence[int]) -> Tensor:
    """[N]: which token of the record each row is, with the padding of its sequences; -1 of padding."""
    real = zip(record.starts, record.lengths, padded, strict=False)  # behind them may be a row of padding alone
    rows = [torch.cat([torch.arange(a, a + n), torch.full((p - n,), -1)]) for a, n, p in real]
    rows += [torch.full((n,), -1) for n in padded[len(rows) :]]
    return torch.cat(rows)


def _empty(
    module: GPTModel, sequences: Sequence[Sequence[int]], witness: str, product: float, temperature: float
) -> Record:
    layers = module.decoder.layers
    dtype = _projection_back(layers[0].self_attention).weight.dtype
    record = Record(witness, [len(s) for s in sequences], flat_tokens(sequences), dtype, product=product)
    record.temperature, record.parts = temperature, parallel_state.get_tensor_model_parallel_world_size()
    kinds: dict[str, torch.dtype] = {}
    if module.post_process:
        tied = module.share_embeddings_and_output_weights
        kinds["head"] = (module.shared_embedding_or_output_weight() if tied else module.output_layer.weight).dtype
    routers = [layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")]
    if routers:
        kinds["router"] = routers[0].weight.dtype
    if nets := [layer.self_attention for layer in layers if _is_delta_net(layer.self_attention)]:
        kinds["decay"] = nets[0].A_log.dtype
    record.weight_dtypes = {
        name: dtype_there for of_rank in gather_objects(kinds) for name, dtype_there in of_rank.items()
    }
    return record


def _joined(record: Record, places: Tensor) -> Record:
    """Taps of all pipeline stages and context-parallel ranks, and rows of all experts. ``places``: see `_places`."""
    real = places >= 0
    taps = {name: value[real] for name, value in record.taps.items()}
    parts = gather_objects((places[real], taps, record.experts))
    record.taps, record.experts = {}, {}
    for rows, taps, _ in reversed(parts):
        for name, value in taps.items():
            if name not in record.taps:
                record.taps[name] = value.new_zeros(len(record.tokens), *value.shape[1:])
            record.taps[name][rows] = value
    if "logprob" in record.taps:
        record.taps["logprob"] = record.taps["logprob"][record.predicting]
    for _, _, experts in parts:
        for layer, groups in experts.items():
            record.experts.setdefault(layer, []).extend(groups)
    return record


# -- parts of tensor-parallel ranks


def _gathered(x: Tensor, dim: int) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def rows(x: Tensor) -> Tensor:
    """[N/tp, b, H] → [N, H]: rows that sequence parallelism shares out."""
    return _gathered(x.detach(), 0).flatten(0, 1)


def columns(x: Tensor) -> Tensor:
    """[N, b, H/tp], or [N, H/tp] as TransformerEngine's attention of packed rows, → [N, H]: heads, inner width or
    vocabulary."""
    return _gathered(x.detach(), -1).flatten(0, -2)


# -- taps


@contextmanager
def tapped(module: GPTModel, record: Record) -> Iterator[None]:
    """Within the block, ``record`` gets what the operators of ``module`` return. Collective over tensor ranks."""
    with ExitStack() as stack:
        if module.pre_process:
            on_output(stack, module.embedding, lambda out: record.keep("embedding", rows(tensor_of(out))))
        for layer in module.decoder.layers:
            _tap_layer(stack, record, layer.layer_number - 1, layer)
        if module.post_process:
            on_output(
                stack, module.decoder.final_layernorm, lambda out: record.keep("final_norm", rows(tensor_of(out)))
            )
            on_output(stack, module.output_layer, lambda out: record.keep("logits", columns(tensor_of(out))))
        yield


def _is_norm(module: Any) -> bool:
    return getattr(module, "weight", None) is not None


def _is_delta_net(mixer: torch.nn.Module) -> bool:
    return hasattr(mixer, "A_log")


def _projection_back(mixer: torch.nn.Module) -> Any:
    return mixer.out_proj if _is_delta_net(mixer) else mixer.linear_proj


def _tap_layer(stack: ExitStack, record: Record, number: int, layer: torch.nn.Module) -> None:
    def keep(name: str, whole: Any) -> Any:
        return lambda output: record.keep(f"{number}.{name}", whole(tensor_of(output)))

    attention, mlp = layer.self_attention, layer.mlp
    if _is_norm(layer.input_layernorm):  # else the projection has the norm inside
        on_output(stack, layer.input_layernorm, keep("input_norm", rows))
    if _is_delta_net(attention):
        _tap_delta_net(stack, record, number, attention)
    elif hasattr(attention, "linear_kv_up_proj"):
        _tap_latent(stack, record, number, keep, attention)
    else:
        _tap_projection(stack, record, number, attention)
        _tap_heads(stack, record, number, attention)
    before_back = "delta_norm" if _is_delta_net(attention) else "attention"
    if getattr(attention.config, "attention_output_gate", False) and before_back == "attention":
        before_back = "gated"
        on_output(stack, attention.core_attention, keep("attention", columns))
    on_input(stack, _projection_back(attention), lambda inputs: keep(before_back, columns)(inputs[0]))
    on_output(stack, _projection_back(attention), keep("o_proj", rows))
    on_input(stack, layer.pre_mlp_layernorm, lambda inputs: keep("residual", rows)(inputs[0]))
    if _is_norm(layer.pre_mlp_layernorm):
        on_output(stack, layer.pre_mlp_layernorm, keep("second_norm", rows))
    on_output(stack, mlp, keep("mlp", rows))
    on_output(stack, layer, keep("output", rows))
    if hasattr(mlp, "experts"):
        if mlp.shared_experts is not None:
            on_output(stack, mlp.shared_experts, keep("shared", rows))
        _tap_experts(stack, record, number, mlp)
        return

    def halves(output: Any) -> None:
        mixed = columns(tensor_of(output)).unflatten(-1, (-1, 2, tensor_of(output).size(-1) // 2))  # ranks, gate and up
        for name, part in zip(("gate", "up"), mixed.unbind(-2), strict=True):
            record.keep(f"{number}.{name}", part.flatten(1))

    on_output(stack, mlp.linear_fc1, halves)
    on_input(stack, mlp.linear_fc2, lambda inputs: keep("activation", columns)(inputs[0]))


def _tap_projection(stack: ExitStack, record: Record, number: int, attention: torch.nn.Module) -> None:
    """Queries, keys and values, which Megatron-Core computes at once."""
    groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head

    def split(output: Any) -> None:
        mixed = columns(tensor_of(output)).unflatten(-1, (-1, *tensor_of(output).shape[-1:]))  # ranks, their columns
        mixed = mixed.unflatten(-1, (groups, -1, width)).flatten(1, 2)  # [N, groups, heads + 2, D]
        queries = mixed[..., :-2, :].chunk(1 + attention.config.attention_output_gate, -2)
        parts = (*queries, mixed[..., -2, :], mixed[..., -1, :])
        for name, part in zip(("q", "q_gate", "k", "v") if len(parts) == 4 else "qkv", parts, strict=True):
            record.keep(f"{number}.{name}", part.flatten(1))

    on_output(stack, attention.linear_qkv, split)


def _tap_delta_net(stack: ExitStack, record: Record, number: int, mixer: torch.nn.Module) -> None:
    """A context-parallel rank has all tokens of its heads inside, where it has no taps."""

    def keep(names: Sequence[str], values: Sequence[Tensor]) -> None:
        for name, value in zip(names, values, strict=True):
            record.keep(f"{number}.{name}", value)

    def sections(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """``x`` has the sections of each rank behind each other."""
        of_ranks = columns(x).unflatten(-1, (-1, sum(sizes))).split(list(sizes), -1)
        parts = [part.flatten(1) for part in of_ranks]
        return [torch.cat(parts[:3], -1), *parts[3:]]

    sizes = mixer.in_proj_split_sections
    on_output(stack, mixer.in_proj, lambda out: keep(("qkv", "z", "b", "a"), sections(tensor_of(out), sizes)))
    if mixer.cp_size > 1:
        return

    def prepared(_: Any, qkv: Tensor, *args: Any) -> None:
        keep(("conv",), sections(qkv, sizes[:3]))

    def ruled(result: Any, *args: Any, g: Tensor, beta: Tensor, **options: Any) -> None:
        keep(("decay", "strength", "delta"), [columns(x) for x in (g, beta, result[0].flatten(2))])

    on_call(stack, mixer, "_prepare_input_for_gated_delta_rule", prepared)
    on_call(stack, mixer, "gated_delta_rule", ruled)


def _tap_latent(stack: ExitStack, record: Record, number: int, keep: Any, attention: torch.nn.Module) -> None:
    """Latent attention, up to the queries, keys and values of heads. Latent vectors lie on ranks as rows do."""
    config = attention.config
    if config.q_lora_rank is None:
        on_output(stack, attention.linear_q_proj, keep("q", columns))
    else:
        on_output(stack, attention.linear_q_down_proj, keep("q_latent", rows))
        if _is_norm(attention.q_layernorm):
            on_output(stack, attention.q_layernorm, keep("q_latent_norm", rows))
        on_output(stack, attention.linear_q_up_proj, keep("q", columns))
    on_output(stack, attention.linear_kv_down_proj, keep("kv_latent", rows))
    if _is_norm(attention.kv_layernorm):
        on_output(stack, attention.kv_layernorm, keep("kv_latent_norm", rows))
    widths = [config.qk_head_dim, config.v_head_dim]

    def split(output: Any) -> None:
        parts = columns(tensor_of(output)).unflatten(-1, (-1, sum(widths))).split(widths, -1)
        for name, part in zip("kv", parts, strict=True):
            record.keep(f"{number}.{name}", part.flatten(1))

    on_output(stack, attention.linear_kv_up_proj, split)

    def heads_of(tensors: Any, *args: Any, **kwargs: Any) -> None:
        query, key = (x[..., config.qk_head_dim :] for x in tensors[:2])  # [N, b, heads, D] or, packed, [N, heads, D]
        record.keep(f"{number}.q_rope", columns(query.flatten(-2)))
        record.keep(f"{number}.k_rope", key[..., 0, :].flatten(0, -2))  # all heads have the same

    on_call(stack, attention, "get_query_key_value_tensors", heads_of)


def _tap_heads(stack: ExitStack, record: Record, number: int, attention: torch.nn.Module) -> None:
    """Queries and keys after their norms and after the rotation."""

    def keep(name: str, heads: Tensor) -> None:
        record.keep(f"{number}.{name}", columns(heads.detach().flatten(-2)))  # [N, b, heads, D] or [N, heads, D]

    def keep_norms(of_heads: Any) -> None:
        if _is_norm(attention.q_layernorm):
            keep("q_norm", of_heads[0])
            keep("k_norm", of_heads[1])

    def heads_of(get: Any) -> Any:
        def watched(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            tensors = get(hidden_states, *args, **kwargs)
            cos_sin = getattr(attention, "_cos_sin", None)
            if cos_sin is None:  # Megatron-Core rotates what this returns
                keep_norms(tensors)
                return tensors
            keep("q_rope", tensors[0])  # rotated inside: see the layers of `layers`
            keep("k_rope", tensors[1])
            if _is_norm(attention.q_layernorm):
                half = cos_sin.size(-1) // 2
                cos, sin = torch.ones_like(cos_sin[..., :half]), torch.zeros_like(cos_sin[..., half:])
                attention._cos_sin = torch.cat([cos, sin], dim=-1)
                with _without_taps(attention):
                    keep_norms(get(hidden_states, *args, **kwargs))
                attention._cos_sin = cos_sin
            return tensors

        return watched

    def rotated(inputs: tuple) -> None:
        if getattr(attention, "_cos_sin", None) is None:
            keep("q_rope", inputs[0])
            keep("k_rope", inputs[1])

    stack.enter_context(replaced(attention, "get_query_key_value_tensors", heads_of))
    on_input(stack, attention.core_attention, rotated)


@contextmanager
def _without_taps(attention: torch.nn.Module) -> Iterator[None]:
    """Hooks of the projection are put aside within the block."""
    hooks = dict(attention.linear_qkv._forward_hooks)
    attention.linear_qkv._forward_hooks.clear()
    try:
        yield
    finally:
        attention.linear_qkv._forward_hooks.update(hooks)


def _tap_experts(stack: ExitStack, record: Record, number: int, moe: torch.nn.Module) -> None:
    router = moe.router

    def gated(logits: Tensor, x: Tensor) -> None:
        record.keep(f"{number}.router_logits", rows(logits.view(*x.shape[:-1], -1)))

    on_call(stack, router, "gating", gated)

    def routed(output: tuple[Tensor, Tensor]) -> None:
        probs, chosen = (_gathered(part.detach().contiguous(), 0) for part in output)
        places = chosen.nonzero()[:, 1].view(len(chosen), -1)
        record.keep_route(number, places, probs.gather(1, places))

    on_output(stack, router, routed)
    if parallel_state.get_expert_tensor_parallel_world_size() > 1:
        return  # an expert's output is a sum over ranks then, which is taken after all experts

    def through(_module: torch.nn.Module, inputs: tuple, output: Any) -> None:
        x, counts, probs = inputs[0].detach(), inputs[1].tolist(), inputs[2].detach()
        parts = zip(
            x.split(counts), probs.flatten().split(counts), tensor_of(output).detach().split(counts), strict=True
        )
        for local, (row, scale, out) in enumerate(parts):
            group = ExpertRows(
                moe.local_expert_indices[local],
                *(part.to("cpu", copy=True) for part in (row, scale, out)),
                torch.full((len(row),), -1),
            )
            record.experts.setdefault(number, []).append(group)

    stack.callback(moe.experts.register_forward_hook(through).remove)
