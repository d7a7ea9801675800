"""From a Hugging Face architecture to a Megatron `GPTModel` on this rank, and low-rank adapters on its linear layers.

Adapters are on the linear layers of the blocks, experts among them, and merged into the weights in every pass.

An adapted layer computes with round(W + alpha/rank · B A), the tensor that the rollout engine is sent, so pi and mu
have the same weights bit for bit. An adapter that ran beside its layer would round in other places. The price is the
gradient of the whole weight in the backward pass of a layer, and the merged copy until then (one layer's, with
`recompute: full`). Gradient buffers, optimizer states and master weights are those of the adapters alone.

One adapter spans what Megatron fuses: query, key and value share A, and so do gate and up. Each expert has its own.

Under tensor parallelism a rank holds rows of W (query, key, value, gate, up) or columns (output, down), and with them
the same rows of B or columns of A. Every rank has the whole of the other factor, whose gradient is a sum over ranks.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.config.learner import LearnerConfig, LoraConfig, PrecisionConfig
from megatron_rl.config.model_rules import stage_layers
from megatron_rl.errors import InputError
from megatron_rl.exact.layers import ExactWideNorm, finish_exact_model, use_exact_layers
from megatron_rl.layers.attention import (
    CONTEXT_COMMUNICATION,
    SDPACoreAttention,
    WideNorm,
    refuse_unfused_attention,
    use_wide_norms,
)
from megatron_rl.layers.cpu_layers import LatentAttention, finish_few_pass_model, use_few_pass_layers
from megatron_rl.layers.delta_net import fields_with_delta_nets, use_delta_nets
from megatron_rl.layers.sinks import SinkAttention, fields_with_sinks, state_yarn
from megatron_rl.learner.router_biases import keep_router_biases
from megatron_rl.model.architecture import Architecture

_WHOLE = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}

TRANSFORMER_ENGINE_DEVICES = {"cuda"}  # types of device that its kernels run on


def use_transformer_engine(device: torch.device, exact: bool = False) -> bool:
    """TransformerEngine's layers where they can run, Megatron's own elsewhere, and where two passes must agree bit for
    bit (``exact``).

    Raises:
        InputError: TransformerEngine is installed, but Megatron-Core could not import it.
    """
    if exact or device.type not in TRANSFORMER_ENGINE_DEVICES:
        return False
    if not HAVE_TE and importlib.util.find_spec("transformer_engine") is not None:
        raise InputError(
            "TransformerEngine is installed, but Megatron-Core cannot import it; `python -c 'import "
            "transformer_engine.pytorch'` shows why. Mend the installation, or uninstall transformer-engine"
        )
    return HAVE_TE


def transformer_config(
    architecture: Architecture,
    learner: LearnerConfig,
    device: torch.device,
    precision: PrecisionConfig,
    exact: bool = False,
) -> TransformerConfig:
    """Megatron's configuration for this architecture, layout and precision."""
    a, parallel, dtype = architecture, learner.parallel, DTYPES[learner.dtype]
    te = use_transformer_engine(device, exact)
    config = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_heads,
        "num_query_groups": a.num_kv_heads,
        "kv_channels": a.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.rms_norm_eps,
        "qk_layernorm": a.qk_layernorm and not a.wide_qk_norm,  # those are put in by `build_model`
        "add_bias_linear": a.linear_bias,
        "add_qkv_bias": a.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # precision
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": learner.dtype == "bf16",
        "fp16": learner.dtype == "fp16",
        "attention_softmax_in_fp32": True,
        # layout
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        **_uneven_stages(a.num_layers, parallel.pipeline),
        "context_parallel_size": parallel.context,
        "cp_comm_type": CONTEXT_COMMUNICATION,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.tensor > 1,
        "variable_seq_lengths": parallel.pipeline > 1,
        "moe_token_dispatcher_type": learner.token_dispatcher,
        # Losses arrive divided by their global denominators; Megatron must only add them up.
        "calculate_per_token_loss": True,
        # Fusions need Apex or TransformerEngine kernels; on one side only they would add mismatch. The rotary one is
        # made in fp32 and rounded once; without it packed rows cost two waits for the device in each layer and pass.
        "apply_rope_fusion": te,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": te,
        # Weights come from a checkpoint. Initialization still has to run: it marks the sharded parameters, and a
        # gradient norm without the marks leaves out every shard but the first.
        "init_method": _keep,
        "output_layer_init_method": _keep,
        "embedding_init_method": _keep,
        **_recompute(learner.recompute, a.is_moe),
    }
    if a.is_moe:
        config |= {
            "num_moe_experts": a.num_experts,
            "moe_router_topk": a.experts_per_token,
            "moe_ffn_hidden_size": a.moe_ffn_hidden_size,
            "moe_layer_freq": [int(moe) for moe in a.moe_layers],
            # softmax over the selected logits = softmax over all, selected and renormalised
            "moe_router_pre_softmax": not a.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32" if precision.fp32_router else None,
            "moe_grouped_gemm": te,
            "moe_shared_expert_intermediate_size": a.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": a.shared_expert_gate,
        }
    if a.sigmoid_router:
        config |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # see `RouterBiases`
            "moe_router_topk_scaling_factor": a.routed_scale,
        }
    if a.sigmoid_router and a.router_groups[0] > 1:
        config |= {"moe_router_num_groups": a.router_groups[0], "moe_router_group_topk": a.router_groups[1]}
    config["mtp_num_layers"] = None  # layers for guesses of later tokens are not loaded
    config |= fields_with_sinks(a) | fields_with_delta_nets(a)
    if a.latent is not None:
        config |= {
            "q_lora_rank": a.latent.query_rank,
            "kv_lora_rank": a.latent.rank,
            "qk_head_dim": a.latent.plain_width,
            "qk_pos_emb_head_dim": a.latent.rotary_width,
            "v_head_dim": a.latent.value_width,
            "qk_layernorm": True,  # of the latent vectors
            "rope_type": "rope",
            "rotary_base": a.rope_theta,
            "apply_rope_fusion": False,  # Megatron-Core has a fused kernel for another kind of scaling alone
        }
    if (yarn := a.yarn) is not None and a.latent is not None:
        config |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": float(yarn.factor),
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    if learner.token_dispatcher == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise InputError("learner.token_dispatcher: flex needs DeepEP, and deep_ep is not installed; use alltoall")
    made = TransformerConfig if a.latent is None else MLATransformerConfig
    check_megatron_fields(learner.megatron, config, made)
    try:
        built = made(**config, **learner.megatron)
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        if not learner.megatron and learner.token_dispatcher == "alltoall":
            raise
        fields = f"learner.token_dispatcher {learner.token_dispatcher}, learner.megatron {learner.megatron}"
        raise InputError(f"{fields}: Megatron refuses the model's configuration: {error}") from error
    if yarn is not None and a.latent is None:
        state_yarn(built, yarn)
    return built


def _uneven_stages(layers: int, stages: int) -> dict[str, int]:
    """Return Megatron's fields for pipeline stages that do not have equally many layers; none where they do."""
    if layers % stages == 0:
        return {}
    first, *_, last = stage_layers(layers, stages)
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


def check_megatron_fields(given: Mapping[str, Any], ours: Collection[str], made: type[TransformerConfig]) -> None:
    """Raise InputError for fields of `learner.megatron` that Megatron does not have, or that are in ``ours``."""
    known = {item.name for item in dataclasses.fields(made) if item.init}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"learner.megatron.{name}: Megatron's {made.__name__} has no such field{hint}")
        if name in ours:
            raise InputError(
                f"learner.megatron.{name}: found {value!r}; the model, the layout or another key of the recipe decides "
                "this field; remove it"
            )


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _recompute(mode: str, is_moe: bool) -> dict[str, object]:
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if mode == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "moe"] if is_moe else ["core_attn"],
        }
    return {}


def layer_spec(config: TransformerConfig, device: torch.device, exact: bool = False) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage: TransformerEngine's, or Megatron's own with SDPA (or, where two passes must agree
    bit for bit, our own attention) as core attention."""
    te = use_transformer_engine(device, exact)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm")
    if te and config.multi_latent_attention:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = LatentAttention
    if not te:
        if exact:
            use_exact_layers(block)
            return block
        for layer in block.layer_specs:
            core = SinkAttention if config.softmax_type == "learnable" else SDPACoreAttention
            layer.submodules.self_attention.submodules.core_attention = core
        use_few_pass_layers(block)
    if config.linear_attention_freq is not None:
        use_delta_nets(block, config, te)
    return block


def build_model(
    architecture: Architecture,
    learner: LearnerConfig,
    device: torch.device,
    precision: PrecisionConfig | None = None,
    exact: bool = False,
) -> GPTModel:
    """An uninitialised model (weights come from `checkpoint.shards`), on this rank's stage, on ``device``.

    ``exact``: for `rollout.engine: exact`, whose passes must agree bit for bit.
    """
    if problems := architecture.problems():
        raise InputError("; ".join(problems))
    if use_transformer_engine(device, exact) and architecture.has_sinks:
        raise InputError(
            f"model.path: {architecture.model_type} has attention sinks, which the learner computes with torch's "
            "attention alone; uninstall transformer-engine"
        )
    if exact and device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise InputError(
            "rollout.engine: exact on cuda runs Triton kernels, and Triton is not installed. Install triton, "
            "which PyTorch's builds for CUDA bring, or use runtime.device: cpu"
        )
    precision = precision or PrecisionConfig()
    config = transformer_config(architecture, learner, device, precision, exact)
    if use_transformer_engine(device, exact) and device.type == "cuda":
        refuse_unfused_attention(config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, device, exact),
        vocab_size=architecture.padded_vocab_size(learner.parallel.tensor),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        position_embedding_type="yarn" if architecture.yarn and architecture.latent is None else "rope",
        rotary_percent=architecture.rotary_fraction,
        rotary_base=architecture.rope_theta,
        rope_scaling=architecture.llama3_factor is not None,
        rope_scaling_factor=architecture.llama3_factor or 1.0,
    )
    if architecture.wide_qk_norm:
        use_wide_norms(model, ExactWideNorm if exact else WideNorm)
    if not use_transformer_engine(device, exact):
        if exact:
            finish_exact_model(model)
        else:
            finish_few_pass_model(model)
    keep_router_biases(model)
    model = model.to(device=device, dtype=DTYPES[learner.dtype])
    if precision.fp32_head and model.post_process:
        compute_head_in_fp32(model.output_layer)
    mark_expert_parameters(model)
    mark_whole_parameters(model)
    return model


def mark_whole_parameters(model: torch.nn.Module) -> None:
    """Mark the projections to latent vectors as copies on all tensor-parallel ranks, which the norm counts once.

    TransformerEngine 2.20 marks every weight of its linear layers as a part, also of those that it does not cut.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(_WHOLE):
            parameter.tensor_model_parallel = False


def mark_expert_parameters(model: torch.nn.Module) -> None:
    """Set on every expert weight the marks by which Megatron chooses its optimizer and counts its gradient.

    Megatron marks as the layout is: experts without expert parallelism join the other weights' optimizer, and the
    checkpoint could not be loaded under another layout. It takes a bias for a copy of that on other tensor-parallel
    ranks, adds them up and leaves it out of the norm; but it is of another expert there.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce, parameter.sequence_parallel, parameter.tensor_model_parallel = False, False, True


_CUT = {"linear_qkv": 0, "linear_proj": 1, "linear_fc1": 0, "linear_fc2": 1}  # axis of W that ranks share
_LATENT_CUT = {  # of latent attention; None: every rank has all of W
    "linear_q_proj": 0,
    "linear_q_down_proj": None,
    "linear_q_up_proj": 0,
    "linear_kv_down_proj": None,
    "linear_kv_up_proj": 0,
    "in_proj": 0,  # of a gated delta net
    "out_proj": 1,
}
_SHARED = "mlp.shared_experts."
_EXPERTS = "mlp.experts"
_EXPERT_KEYS = 40  # bits below the expert's number in the key of its random numbers
_PART_KEYS = 36  # likewise of the parts that a layer may have beside attention's and the feed-forward block's four


def _ask_for_gradient(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class _Place:
    """Where a weight that gets an adapter is. ``reader``: the module in whose forward pass it is read."""

    reader: torch.nn.Module
    layer: torch.nn.Module
    suffix: str  # "" of `weight`, the number of a grouped layer's
    kind: str  # of `_CUT` or `_LATENT_CUT`
    expert: int | None  # number in the whole model
    is_shared: bool = False  # of the experts that every token passes

    @property
    def name(self) -> str:
        return f"weight{self.suffix}"


@dataclass(frozen=True)
class _Adapter:
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    cut: int | None  # axis of the weight that tensor-parallel ranks share; None: this rank has all of it


class Adapters:
    """Freezes ``model`` and gives every linear layer of its blocks an adapter. Call it after the weights are loaded and
    before the model is wrapped: what is frozen gets no gradient buffer.

    A is drawn from ``seed``, the layer's number in the whole model and the expert's; B is zero: the policy starts as it
    was, and the same under every layout.
    """

    def __init__(self, model: GPTModel, config: LoraConfig, seed: int):
        self.scale = config.alpha / config.rank
        self._are_off = False
        self._adapters: dict[torch.nn.Parameter, _Adapter] = {}  # by frozen weight
        model.requires_grad_(False)
        for block in model.decoder.layers:
            by_reader: dict[torch.nn.Module, list[_Place]] = {}
            for place in _places(block):
                self._adapt(place, config.rank, _key(place, seed, block.layer_number))
                by_reader.setdefault(place.reader, []).append(place)
            for reader, places in by_reader.items():
                self._shadow(reader, places)
        if model.pre_process:
            # Recomputed layers are differentiated only if what goes in asks for a gradient; frozen embeddings do not.
            model.embedding.register_forward_hook(_ask_for_gradient)
        if not self._adapters and len(model.decoder.layers):
            raise InputError("learner.lora: no layer to adapt was found in the model")

    def _adapt(self, place: _Place, rank: int, key: int) -> None:
        weight, cut = getattr(place.layer, place.name), (_CUT | _LATENT_CUT)[place.kind]
        is_expert = place.expert is not None
        size = 1 if is_expert else parallel_state.get_tensor_model_parallel_world_size()
        num_out, num_in = weight.shape
        whole_in = num_in * (size if cut == 1 else 1)
        noise = torch.randn(rank, whole_in, generator=torch.Generator().manual_seed(key)) / math.sqrt(whole_in)
        if cut == 1:
            noise = noise.chunk(size, dim=1)[0 if is_expert else parallel_state.get_tensor_model_parallel_rank()]
        a = torch.nn.Parameter(noise.contiguous().to(weight))
        b = torch.nn.Parameter(weight.new_zeros(num_out, rank))
        sharded = {0: b, 1: a, None: None}[cut]
        for parameter in (a, b):
            if is_expert:
                parameter.allreduce = False
            if is_expert or (size > 1 and parameter is sharded):  # no copy: see `mark_expert_parameters`
                set_tensor_model_parallel_attributes(parameter, True, cut, 1)
            if cut is None:  # each rank has the gradient of its own tokens, which Megatron sums
                parameter.sequence_parallel = getattr(weight, "sequence_parallel", False)
        if size > 1 and sharded is not None:
            sharded.adapter_cut = cut  # `checkpoint.shards` reads it
        place.layer.register_parameter(f"lora_A{place.suffix}", a)
        place.layer.register_parameter(f"lora_B{place.suffix}", b)
        self._adapters[weight] = _Adapter(a, b, cut if size > 1 else None)

    def _shadow(self, reader: torch.nn.Module, places: list[_Place]) -> None:
        """In the forward pass of ``reader`` the merged tensors shadow the parameters: Megatron's and
        TransformerEngine's layers both read attributes, and neither has a place for an argument."""
        frozen = [(place.layer, place.name, getattr(place.layer, place.name)) for place in places]

        def shadow(module: torch.nn.Module, args: Any) -> None:
            for layer, name, weight in frozen if not self._are_off else ():
                layer.__dict__[name] = self.merged(weight)

        def restore(module: torch.nn.Module, args: Any, output: Any) -> None:
            for layer, name, _ in frozen:
                layer.__dict__.pop(name, None)

        reader.register_forward_pre_hook(shadow)
        reader.register_forward_hook(restore)

    def merged(
        self, weight: torch.nn.Parameter, read: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    ) -> torch.Tensor:
        """This rank's part of ``weight`` with its adapter added, in its dtype: the sum is fp32 and rounded once. Others
        as they are.

        ``read``: a parameter → its values on the device, where they may be elsewhere (see `Offload`).
        """
        adapter = self._adapters.get(weight)
        if adapter is None:
            return read(weight)
        a, b = read(adapter.a).float(), read(adapter.b).float()
        if adapter.cut == 0:  # the identity, whose gradient is summed over the ranks
            a = copy_to_tensor_model_parallel_region(a)
        elif adapter.cut == 1:
            b = copy_to_tensor_model_parallel_region(b)
        return (read(weight).float() + self.scale * (b @ a)).to(weight.dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model computes with the frozen weights as they are."""
        self._are_off = True
        try:
            yield
        finally:
            self._are_off = False

    def named_parameters(self, weights: list[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
        """The trained parameters, under the names that ``weights`` gives to what they adapt."""
        named = []
        for name, weight in weights:
            if weight in self._adapters:
                adapter = self._adapters[weight]
                named += [(f"adapter A of {name}", adapter.a), (f"adapter B of {name}", adapter.b)]
        return named


def _key(place: _Place, seed: int, layer: int) -> int:
    """Of the random numbers of an adapter: another for each weight of the whole model."""
    part = list(_LATENT_CUT).index(place.kind) + 2 if place.kind in _LATENT_CUT else int(place.is_shared)
    kind = list(_CUT).index(place.kind) if place.kind in _CUT else 0
    key = seed * 1_000_003 + layer * len(_CUT) + kind
    return key + (part << _PART_KEYS) + ((0 if place.expert is None else place.expert + 1) << _EXPERT_KEYS)


def _places(block: torch.nn.Module) -> Iterator[_Place]:
    """Weights of ``block`` that get an adapter, in the order of its modules.

    Experts are one module each, or the weights of one grouped layer. Where they are modules, the layer of all of them
    may read the weights itself (`FewPassExperts`).
    """
    experts = dict(block.named_modules()).get(_EXPERTS)
    first = 0 if experts is None else parallel_state.get_expert_model_parallel_rank() * experts.num_local_experts
    for name, module in block.named_modules():
        kind = name.rpartition(".")[2]
        if kind not in _CUT and kind not in _LATENT_CUT:
            continue
        if not name.startswith(f"{_EXPERTS}."):
            yield _Place(module, module, "", kind, None, is_shared=name.startswith(_SHARED))
        elif hasattr(module, "weight0"):
            for number in range(experts.num_local_experts):
                yield _Place(module, module, str(number), kind, first + number)
        else:
            yield _Place(experts, module, "", kind, first + int(name.split(".")[-2]))


def compute_head_in_fp32(output_layer: torch.nn.Module) -> None:
    """Make a Megatron output layer return fp32 logits, from hidden states and weights turned into fp32.

    The weights keep the learner's dtype: vLLM's fp32 head reads the engine's weights in the same way, so that both
    multiply the same numbers. A subclass cannot do it, because `GPTModel` names the layer's class itself.
    """

    def to_fp32(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        weight = kwargs.get("weight")
        weight = module.weight if weight is None else weight  # tied embeddings arrive as an argument
        return (args[0].float(), *args[1:]), {**kwargs, "weight": weight.float()}

    output_layer.register_forward_pre_hook(to_fp32, with_kwargs=True)
