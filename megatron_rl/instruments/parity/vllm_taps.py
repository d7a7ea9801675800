"""What vLLM computes for given tokens: all at once (prefill), and one token at a time with its cache (decode).

The engine runs in this process (`rollout.vllm_engine`). Its model's modules have the same names in all families. A
sampler that returns the given token takes the place of vLLM's choice, so that decoding goes through the tokens of the
other witnesses, with vLLM's own log-prob of each. Experts are fused in one kernel: it is called again for each choice
alone, with weight 1, which gives every expert's output by the same kernel and weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megatron_rl.instruments.parity.arithmetic import halves_of_pairs
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
from megatron_rl.rollout import delta_net, process_state
from megatron_rl.rollout.vllm_engine import VllmGenerator

Tensor = torch.Tensor


def prefill(engine: VllmGenerator, sequences: Sequence[Sequence[int]], product: float = 0.0) -> Record:
    """Every sequence is a prompt; all are in one batch. Log-probs are those of prompts, which have no temperature."""
    record = _empty(engine, "vLLM prefill", sequences, product)
    with _tapped(engine, record) as seen:
        outputs = _generate(engine, sequences, max_tokens=1, prompt_logprobs=0)
    rows = _rows_of(seen, sequences)
    _logits_in_order(record, seen, rows)
    record.reordered(rows)
    logprobs = []
    for tokens, output in zip(sequences, outputs, strict=True):
        of_prompt = output.prompt_logprobs
        logprobs += [of_prompt[i][token].logprob for i, token in enumerate(tokens) if i]
    record.taps["logprob"] = torch.tensor(logprobs)
    return record


def decode(engine: VllmGenerator, sequences: Sequence[Sequence[int]], product: float, temperature: float) -> Record:
    """Sequences one after the other, token by token from their first one on."""
    records = []
    for tokens in sequences:
        record = _empty(engine, "vLLM decode", [tokens], product)
        record.temperature = temperature
        with _tapped(engine, record) as seen, _forced(engine, list(tokens[1:])):
            (output,) = _generate(engine, [tokens[:1]], max_tokens=len(tokens), temperature=temperature, logprobs=0)
        record.taps["logits"] = torch.cat([logits for _, logits in seen.logits])
        completion = output.outputs[0]
        logprobs = [completion.logprobs[i][token].logprob for i, token in enumerate(tokens[1:])]
        record.taps["logprob"] = torch.tensor(logprobs)
        records.append(record)
    return joined(records, "vLLM decode")


class _Seen:
    """What the taps need to know of a pass: tokens and positions of its rows, and the calls of the head."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.logits: list[tuple[Tensor, Tensor]] = []  # inputs [n, width] and logits [n, V]

    def rows(self, _: Any, input_ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> None:
        self.tokens += input_ids.tolist()
        self.positions += positions.tolist()

    def head(self, logits: Tensor, _: torch.nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> None:
        self.logits.append((hidden.detach().cpu().clone(), logits.detach().cpu().clone()))


def _empty(engine: VllmGenerator, witness: str, sequences: Sequence[Sequence[int]], product: float) -> Record:
    model = model_of(engine)
    dtype = part_of(model.model, "embed_tokens").weight.dtype
    record = Record(witness, [len(s) for s in sequences], flat_tokens(sequences), dtype, product=product)
    processor = model.logits_processor
    head = torch.float32 if processor.head_dtype == torch.float32 else dtype
    record.weight_dtypes = {"head": _dtype_of(model.lm_head, head)}
    if logs := [layer.linear_attn.A_log for layer in model.model.layers if hasattr(layer, "linear_attn")]:
        record.weight_dtypes["decay"] = logs[0].dtype
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    if routers:
        record.weight_dtypes["router"] = _dtype_of(routers[0], dtype)
    return record


def _dtype_of(module: torch.nn.Module, other: torch.dtype) -> torch.dtype:
    weight = getattr(module, "weight", None)
    return other if weight is None or not weight.numel() else weight.dtype


def model_of(engine: VllmGenerator) -> torch.nn.Module:
    return engine._llm.apply_model(_itself)[0]


def _itself(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _runner(worker: Any) -> Any:
    return worker.model_runner


def _generate(engine: VllmGenerator, prompts: Sequence[Sequence[int]], **params: Any) -> list[Any]:
    from vllm import SamplingParams

    llm = engine._llm
    values = {"temperature": 1.0, "ignore_eos": True, "detokenize": False} | params
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    with process_state.global_rng_untouched(), process_state.compilation(False), torch.no_grad():
        llm.reset_prefix_cache()
        outputs = llm.generate(requests, SamplingParams(**values), use_tqdm=False)
    return sorted(outputs, key=lambda output: int(output.request_id))


@contextmanager
def _forced(engine: VllmGenerator, tokens: list[int]) -> Iterator[None]:
    """Within the block, the sampler of a lone request returns ``tokens`` one by one, then what it likes."""
    runner = engine._llm.collective_rpc(_runner)[0]
    coming = list(tokens)

    def make(sample: Any) -> Any:
        def given(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            sampled, processed = sample(*args, **kwargs)
            if coming:
                sampled = torch.full_like(sampled, coming.pop(0))
            return sampled, processed

        return given

    with replaced(runner.sampler, "sample", make):
        yield


@contextmanager
def _tapped(engine: VllmGenerator, record: Record) -> Iterator[_Seen]:
    """Within the block, ``record`` gets what every operator returns, in the order of vLLM's rows."""
    model, seen = model_of(engine), _Seen()
    decoder = model.model
    with ExitStack() as stack:
        on_call(stack, decoder, "forward", seen.rows)
        on_output(stack, part_of(decoder, "embed_tokens"), partial(record.keep, "embedding"))
        current: list[int] = []  # the layer that runs: layers share their rotary embedding
        for number, layer in enumerate(decoder.layers):
            _tap_layer(stack, record, number, layer, current)
        _tap_rotary(stack, record, decoder.layers, current)
        _tap_rules(stack, record, decoder.layers, current)
        last = len(decoder.layers) - 1
        scale = _scale_of_residual(decoder.layers[last], record)
        on_output(stack, decoder.norm, partial(_keep_norm, record, "final_norm", f"{last}.output", scale))
        on_call(stack, model.logits_processor, "forward", seen.head)
        yield seen


def _keep_norm(record: Record, tap: str, before: str, scale: float, output: Any) -> None:
    """vLLM adds the residual in the norm that follows: the sum is the norm's second output."""
    if isinstance(output, tuple):
        record.keep(tap, output[0])
        record.keep(before, output[1] * scale if scale != 1.0 else output[1])
    else:
        record.keep(tap, output)


def _tap_layer(stack: ExitStack, record: Record, number: int, layer: torch.nn.Module, current: list[int]) -> None:
    def keep(name: str) -> Any:
        return lambda output: record.keep(f"{number}.{name}", tensor_of(output))

    attention, mlp = mixer_of(layer), layer.mlp
    stack.callback(attention.register_forward_pre_hook(lambda *_: current.__setitem__(slice(None), [number])).remove)
    scale = _scale_of_residual(layer, record)
    record.rescaled = scale != 1.0
    of_input = partial(_keep_norm, record, f"{number}.input_norm", f"{number - 1}.output", scale)
    on_output(stack, layer.input_layernorm, of_input)

    if hasattr(layer, "linear_attn"):
        tap_delta_net(stack, lambda name, rows: keep(name)(rows), attention)
        on_output(stack, attention.out_proj, keep("o_proj"))
    else:
        _tap_attention(stack, keep, attention)
    on_output(
        stack,
        layer.post_attention_layernorm,
        partial(_keep_norm, record, f"{number}.second_norm", f"{number}.residual", scale),
    )
    back = scale if hasattr(mlp, "experts") else 1.0  # of a layer without experts it is divided behind the module
    on_output(stack, mlp, lambda out: keep("mlp")(out * back if back != 1.0 else out))
    if hasattr(mlp, "experts"):
        on_output(stack, mlp.gate, keep("router_logits"))
        of_sum = mlp.experts.routed_scaling_factor  # which stands for that of the weights
        tap = partial(_with_each_expert, record, number, of_sum)
        stack.enter_context(replaced(mlp.experts.routed_experts, "forward_modular", tap))
        for name in ("shared_expert", "shared_experts"):
            if getattr(mlp, name, None) is not None:
                on_output(stack, getattr(mlp, name), keep("shared"))
        return

    def halves(output: Any) -> None:
        for name, part in zip(("gate", "up"), tensor_of(output).chunk(2, dim=-1), strict=True):
            keep(name)(part)

    on_output(stack, mlp.gate_up_proj, halves)
    on_input(stack, mlp.down_proj, lambda inputs: keep("activation")(inputs[0]))


_LINGS = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "q_size": "q_size_per_rank",
    "kv_size": "kv_size_per_rank",
}
"""Names of parts in vLLM's models, and in its model of Ling."""


def part_of(module: torch.nn.Module, name: str) -> Any:
    """The part of ``module`` that most of vLLM's models call ``name``."""
    return getattr(module, name if hasattr(module, name) else _LINGS[name])


def mixer_of(layer: torch.nn.Module) -> Any:
    """The attention or the delta net of a layer."""
    return layer.linear_attn if hasattr(layer, "linear_attn") else part_of(layer, "self_attn")


def _scale_of_residual(layer: torch.nn.Module, record: Record) -> float:
    """By what the residual stream of ``layer`` has to be multiplied: in fp16 vLLM divides DeepSeek's by the scale of
    the routed experts, so that it does not overflow. The norms take that out again."""
    is_divided = record.dtype == torch.float16 and hasattr(mixer_of(layer), "kv_b_proj")
    return layer.routed_scaling_factor if is_divided else 1.0


def _tap_attention(stack: ExitStack, keep: Any, attention: torch.nn.Module) -> None:
    if hasattr(attention, "kv_b_proj"):
        _tap_latent(stack, keep, attention)
    else:
        _tap_projection(stack, keep, attention)
    for which in "qk":
        name = f"{which}_norm"
        if hasattr(attention, name) or hasattr(attention, _LINGS[name]):
            on_output(stack, part_of(attention, name), lambda out, name=name: keep(name)(out.flatten(1)))
    on_output(stack, attention_of(attention), keep("attention"))
    if has_gate(attention):
        on_input(stack, attention.o_proj, lambda inputs: keep("gated")(inputs[0]))
    on_output(stack, part_of(attention, "o_proj"), keep("o_proj"))


def has_gate(attention: torch.nn.Module) -> bool:
    return getattr(attention, "attn_output_gate", False)


def _tap_rules(stack: ExitStack, record: Record, layers: Any, current: list[int]) -> None:
    """Rules of delta nets, where they are transformers': on a CPU, but not in bf16."""
    keep = lambda name, rows: record.keep(f"{current[0]}.{name}", rows)  # noqa: E731
    see = partial(keep_rule, keep, lambda: layers[current[0]].linear_attn.num_k_heads)
    for rule in ("_of_prompt", "_of_token"):
        on_call(stack, delta_net, rule, see)


def _tap_projection(stack: ExitStack, keep: Any, attention: torch.nn.Module) -> None:
    def split(output: Any) -> None:
        keys, queries = part_of(attention, "kv_size"), part_of(attention, "q_size")
        query, *rest = tensor_of(output).split([queries * (1 + has_gate(attention)), keys, keys], dim=-1)
        if has_gate(attention):
            of_heads = query.unflatten(-1, (attention.num_heads, 2, -1))
            query = of_heads[..., 0, :].flatten(1)
            keep("q_gate")(of_heads[..., 1, :].flatten(1))
        for name, part in zip("qkv", (query, *rest), strict=True):
            keep(name)(part)

    on_output(stack, part_of(attention, "qkv_proj"), split)


def _tap_latent(stack: ExitStack, keep: Any, attention: torch.nn.Module) -> None:
    """Latent attention. A step of decoding makes no keys and values, so they have no taps."""
    if attention.q_lora_rank is None:
        on_output(stack, attention.q_proj, keep("q"))
        on_output(stack, attention.kv_a_proj_with_mqa, keep("kv_latent"))
    else:

        def split(output: Any) -> None:
            keep("q_latent")(tensor_of(output)[..., : attention.q_lora_rank])
            keep("kv_latent")(tensor_of(output)[..., attention.q_lora_rank :])

        on_output(stack, attention.fused_qkv_a_proj, split)
        on_output(stack, attention.q_a_layernorm, keep("q_latent_norm"))
        on_output(stack, attention.q_b_proj, keep("q"))
    on_output(stack, attention.kv_a_layernorm, keep("kv_latent_norm"))


def attention_of(attention: torch.nn.Module) -> torch.nn.Module:
    """The module of a layer that attends, between projections."""
    return attention.mla_attn.mla_attn if hasattr(attention, "mla_attn") else attention.attn


def _tap_rotary(stack: ExitStack, record: Record, layers: Any, current: list[int]) -> None:
    def keep(of_pairs: bool, output: tuple[Tensor, Tensor]) -> None:
        for which, value in zip("qk", output, strict=True):
            record.keep(f"{current[0]}.{which}_rope", (halves_of_pairs(value) if of_pairs else value).flatten(1))

    attentions = (mixer_of(layer).rotary_emb for layer in layers if not hasattr(layer, "linear_attn"))
    for rotary in {id(r): r for r in attentions}.values():
        on_output(stack, rotary, partial(keep, not rotary.is_neox_style))


def _with_each_expert(record: Record, layer: int, scale: float, forward: Any) -> Any:
    def watched(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = len(record.taps.get(f"{layer}.chosen", ()))
        inputs = x.detach().cpu().clone()
        record.keep_route(layer, topk_ids, topk_weights * scale)
        ones, rows = torch.ones_like(topk_weights[:, :1]), torch.arange(len(x)) + before
        record.keep_each_choice(
            layer, inputs, topk_ids, rows, lambda one: forward(x.clone(), ones, one, *args, **kwargs)
        )
        return forward(x, topk_weights, topk_ids, *args, **kwargs)

    return watched


def _rows_of(seen: _Seen, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[N]: the row of vLLM's batch in which each token of ``sequences`` lies. Raises `RuntimeError` if one is not."""
    starts = [row for row, position in enumerate(seen.positions) if position == 0]
    pieces = [seen.tokens[a:b] for a, b in zip(starts, [*starts[1:], len(seen.tokens)], strict=True)]
    left, rows = list(range(len(pieces))), []
    for tokens in sequences:
        piece = next((i for i in left if pieces[i] == list(tokens)), None)
        if piece is None:
            raise RuntimeError("parity: vLLM did not run a sequence as it was given, in one pass")
        left.remove(piece)
        rows += range(starts[piece], starts[piece] + len(tokens))
    return torch.tensor(rows)


def _logits_in_order(record: Record, seen: _Seen, rows: Tensor) -> None:
    """Logits in the order of vLLM's rows. The head is called for last tokens and for prompts; its inputs tell which
    rows it got."""
    final = record.taps["final_norm"]
    logits = torch.full((len(rows), seen.logits[0][1].size(1)), torch.nan)
    logits = logits.to(seen.logits[0][1].dtype)
    numbers: dict[bytes, list[int]] = {}
    for row, value in enumerate(final):
        numbers.setdefault(_bits(value), []).append(row)
    for hidden, results in seen.logits:
        for value, result in zip(hidden, results, strict=True):
            for row in numbers[_bits(value)]:
                logits[row] = result
    record.taps["logits"] = logits


def _bits(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()
