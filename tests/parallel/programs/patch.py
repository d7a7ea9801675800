"""Rank programs for the tests of patches/megatron-core-0.16: one tiny Qwen3-like MoE in every layout.

Weights and gradients are addressed by the names and offsets of Megatron's own sharded state dict, so that every layout
starts from the same global weights and its gradients can be assembled into global tensors and compared.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import jit, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.parallel.programs.patch_layouts import Layout
from tests.support.in_double import Widened

VOCAB, SEQUENCE, MICRO_BATCH, NUM_MICROBATCHES = 96, 16, 2, 4
LAYERS, HIDDEN, EXPERTS, TOPK = 4, 32, 4, 2


def transformer_config(layout: Layout) -> TransformerConfig:
    """Qwen3-MoE in small, fp32, without anything random or fused."""
    if hasattr(jit, "disable_jit_fuser"):  # from 0.16 on
        jit.disable_jit_fuser()  # torch.compile costs 20 s for each process
    return TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 8,
            "ffn_hidden_size": 48,
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOPK,
            "moe_ffn_hidden_size": 24,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "tensor_model_parallel_size": layout.tp,
            "sequence_parallel": layout.tp > 1,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "pipeline_dtype": torch.float32,
            "batch_p2p_comm": layout.vpp is None,
            "overlap_p2p_comm": layout.vpp is not None,
            **layout.options,
        }
    )


def widened(config: TransformerConfig) -> AbstractContextManager:
    """What Megatron has in float32 whatever its weights are in (rotary angles, routers) in float64 where these are."""
    return Widened() if config.params_dtype is torch.float64 else nullcontext()


class Job:
    """The model of one layout, wrapped in DDP, with the same global weights as in every other layout."""

    def __init__(self, layout: Layout):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        self.config = transformer_config(layout)
        self.config.finalize_model_grads_func = finalize_model_grads
        ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **layout.ddp})
        self.chunks = [
            DistributedDataParallel(self.config, ddp_config, self._chunk(layout, vp_stage))
            for vp_stage in range(layout.vpp or 1)
        ]
        for key, offset, global_shape, data in self.shards():
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            # Wide enough that a wrong expert or a missing term is far from rounding.
            weight = torch.randn(global_shape, generator=generator) * 0.2 + ("norm" in key)
            data.copy_(weight[tuple(slice(o, o + n) for o, n in zip(offset, data.shape))])

    def _chunk(self, layout: Layout, vp_stage: int) -> GPTModel:
        stage = {} if layout.vpp is None else {"vp_stage": vp_stage}
        ignore = {"ignore_virtual": False, **stage}
        with widened(self.config):
            model = GPTModel(
                config=self.config,
                transformer_layer_spec=get_gpt_layer_local_spec(
                    num_experts=EXPERTS, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
                ),
                vocab_size=VOCAB,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**ignore),
                post_process=parallel_state.is_pipeline_last_stage(**ignore),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                **stage,
            )
        return model.double() if self.config.params_dtype is torch.float64 else model  # norms are in float32

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """(name, offset, global shape, data) of this rank's parameters, without leading axes of size one chunk."""
        for chunk in self.chunks:
            for entry in nested_values(chunk.module.sharded_state_dict()):
                parts = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
                for part in parts:
                    if isinstance(part, ShardedTensor):
                        data = part.data.detach().view(*[1] * part.prepend_axis_num, *part.data.shape)
                        yield part.key, part.global_offset, part.global_shape, data

    def run(self, before_forward: Callable[[int], None] = lambda index: None, forward_only: bool = False) -> list[Any]:
        """Forward and backward of this rank's microbatches; loss dictionaries of the last pipeline stage.

        `before_forward(index)` is called with the global number of the microbatch, on every stage.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = list(range(rank, NUM_MICROBATCHES, size))

        def forward_step(microbatches, model):
            index = next(microbatches)
            before_forward(index)
            tokens = microbatch(index)
            position_ids = torch.arange(SEQUENCE).expand(MICRO_BATCH, -1)
            output = model(tokens, position_ids, None)

            def loss_of(logits):
                # [B, T, V/tp]: a smooth function of all logits that needs no collective.
                weight = torch.linspace(-1, 1, logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size())
                start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
                part = (logits.sin() * weight[start : start + logits.shape[-1]]).mean(dim=(0, 1)).sum()
                return part, {"index": index, "logits": logits.detach().clone()}

            return output, loss_of

        with widened(self.config):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(mine) for _ in self.chunks] if len(self.chunks) > 1 else iter(mine),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(mine),
                seq_length=SEQUENCE,
                micro_batch_size=MICRO_BATCH,
                forward_only=forward_only,
            )

    def gradients(self) -> dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], torch.Tensor]]:
        """This rank's gradients: (name, offset) -> (global shape, values). Overwrites the weights."""
        for chunk in self.chunks:
            for parameter in chunk.module.parameters():
                parameter.data.copy_(parameter.main_grad)
        return {(key, offset): (shape, data.clone()) for key, offset, shape, data in self.shards()}


def microbatch(index: int) -> torch.Tensor:
    """Token ids [MICRO_BATCH, SEQUENCE] of a microbatch."""
    return torch.randint(VOCAB, (MICRO_BATCH, SEQUENCE), generator=torch.Generator().manual_seed(100 + index))


def layout_gradients(layouts: dict[str, Layout]) -> dict[str, Any]:
    """Gradients of each layout on this rank, or the text of the exception that it ended with."""
    results: dict[str, Any] = {}
    for name, layout in layouts.items():
        try:
            job = Job(layout)
            job.run()
            results[name] = job.gradients()
        except (AssertionError, ValueError, RuntimeError, NameError, TypeError) as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def collectives() -> dict[str, Any]:
    """What the tensor-parallel functions return on two ranks for inputs that upstream or Gloo mishandle."""
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
    from megatron.core.tensor_parallel import mappings, vocab_parallel_cross_entropy

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    summed = mappings._reduce((torch.arange(6.0).view(2, 3) + rank).t(), group)
    part = torch.full((rank + 1, 3), float(rank))
    gathered = mappings._gather_along_first_dim(part, group, output_split_sizes=[1, 2])
    logits = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(rank))
    before = logits.clone()
    loss = vocab_parallel_cross_entropy(logits, torch.arange(10).view(5, 2))
    positions = get_pos_emb_on_this_cp_rank(torch.arange(8.0), 0, group)
    return {
        "summed": summed,
        "gathered": gathered,
        "logits": before,
        "logits_after_loss": logits,
        "loss": loss,
        "positions": positions,
    }


def random_states() -> dict[str, Any]:
    """Draws from the tracked random states, and the warnings that drawing them gave."""
    import logging

    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    shared = torch.rand(3)
    with get_cuda_rng_tracker().fork():
        own = torch.rand(3)
    after = torch.rand(3)
    torch.manual_seed(7)
    return {"shared": shared, "own": own, "after": after, "plain": torch.rand(6), "warnings": messages}


def routes_of(index: int, layer: int) -> torch.Tensor:
    """Experts to replay for a microbatch and a global layer: int32 [SEQUENCE * MICRO_BATCH, TOPK], all different."""
    generator = torch.Generator().manual_seed(1000 * index + layer)
    choice = torch.rand(SEQUENCE * MICRO_BATCH, EXPERTS, generator=generator).argsort(dim=1)
    return choice[:, :TOPK].int()


def replayed_gradients(layouts: dict[str, Layout]) -> dict[str, Any]:
    """Gradients with replayed routes, REPLAY_FORWARD left on throughout; as `layout_gradients`.

    Two forward passes come first, one under no_grad and one of another model: both must leave nothing behind.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    results: dict[str, Any] = {}
    for name, layout in layouts.items():
        other, job = Job(layout), Job(layout)
        routers = RouterReplay.of_model([chunk.module for chunk in job.chunks])
        assert len(routers) == LAYERS // layout.pp
        first = get_transformer_layer_offset(job.config, 0)
        assert [router.layer_number for router in routers] == [first + i + 1 for i in range(len(routers))]
        tp_rank = parallel_state.get_tensor_model_parallel_rank()

        def set_routes(index, routers=routers, first=first, tp=layout.tp, tp_rank=tp_rank):
            # Tokens are in sequence-major order, so that a rank's part under sequence parallelism is contiguous.
            parts = [routes_of(index, first + i).chunk(tp)[tp_rank] for i in range(len(routers))]
            RouterReplay.set_replay_data(parts, routers)

        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD, routers)
        job.run(set_routes, forward_only=True)
        other.run()
        job.run(set_routes)
        results[name] = job.gradients()
        RouterReplay.clear_global_indices(routers)
    return results


def recorded_routes(layout: Layout) -> dict[str, Any]:
    """Routes that the model of one rank recorded, and its logits then and when they are replayed."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    job = Job(layout)
    routers = RouterReplay.of_model(job.chunks[0].module)
    plain = job.run(forward_only=True)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD, routers)
    recording = job.run(forward_only=True)
    recorded = RouterReplay.get_recorded_data(routers)  # of the last microbatch
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD, routers)
    RouterReplay.set_replay_data(recorded, routers)
    replaying = job.run(forward_only=True)
    # -1 leaves a token to the router: every other token of the first layer, all of the others.
    partly = [torch.full_like(routes, -1) for routes in recorded]
    partly[0][::2] = recorded[0][::2]
    RouterReplay.set_replay_data(partly, routers)
    native = job.run(forward_only=True)
    RouterReplay.set_replay_data([torch.full_like(routes, -1) for routes in recorded], routers)
    job.run()
    own = job.gradients()
    logits = {
        name: out[-1]["logits"]
        for name, out in {"plain": plain, "record": recording, "replay": replaying, "partly": native}.items()
    }
    return {"recorded": recorded, "logits": logits, "own_gradients": own}


def refused_configurations() -> dict[str, str]:
    """Messages with which a model refuses options that ignore replay."""
    bad = {
        "fused": {"moe_router_fusion": True},
        "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    }
    messages = {}
    for name, options in bad.items():
        try:
            Job(Layout(options={"moe_enable_routing_replay": True, **options}))
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    return messages
