"""How many parameters one rank holds, stage by stage.

Symbols: h hidden size, q query width (heads · head_dim), kv key/value width, f feed-forward width, E experts,
V vocabulary, tp/pp/ep/etp the sizes of `learner.parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.config.learner import LoraConfig, ParallelConfig


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one rank of one pipeline stage."""

    dense: int  # everything but experts: sharded over tp, its optimizer over dp
    expert: int  # sharded over ep · etp, its optimizer over the expert-data-parallel ranks
    largest: int  # of the largest single tensor
    layers: int
    moe_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stage_parameters(a: Architecture, parallel: ParallelConfig) -> list[StageParameters]:
    """One entry per pipeline stage, in order."""
    per_stage, stages = a.num_layers // parallel.pipeline, []
    for stage in range(parallel.pipeline):
        moe = sum(a.moe_layers[stage * per_stage : (stage + 1) * per_stage])
        first, last = stage == 0, stage == parallel.pipeline - 1
        tables = _num_tables(a, first, last)
        dense = per_stage * _attention(a, parallel.tensor) + moe * a.hidden_size * a.num_experts
        dense += (per_stage - moe) * mlp_width(a) // parallel.tensor
        dense += tables * vocabulary(a, parallel.tensor) + last * a.hidden_size
        experts = moe * 3 * a.hidden_size * a.moe_ffn_hidden_size * a.num_experts
        stages.append(
            StageParameters(
                dense=dense,
                expert=experts // (parallel.expert * parallel.expert_tensor),
                largest=max(largest_matrices(a, parallel) + [vocabulary(a, parallel.tensor)] * (tables > 0)),
                layers=per_stage,
                moe_layers=moe,
                has_embedding=first,
                has_head=last,
            )
        )
    return stages


def adapter_parameters(
    a: Architecture, lora: LoraConfig, parallel: ParallelConfig, stage: StageParameters
) -> tuple[int, int]:
    """(dense, expert): trained parameters of one rank of ``stage`` with `learner.lora`, A and B of each linear layer.
    Tensor parallelism cuts the factor on the side of the weight that it cuts."""
    h, tp, dense_layers = a.hidden_size, parallel.tensor, stage.layers - stage.moe_layers
    attention = 2 * h + (2 * query_width(a) + 2 * key_value_width(a)) // tp
    dense = stage.layers * attention + dense_layers * (2 * h + 3 * a.ffn_hidden_size // tp)
    # fc1 [2f, h] and fc2 [h, f] of every expert of this rank
    expert = stage.moe_layers * (a.num_experts // parallel.expert) * (2 * h + 3 * a.moe_ffn_hidden_size)
    return lora.rank * dense, lora.rank * expert


def total_parameters(a: Architecture) -> int:
    """Of the whole model; a tied table counts once."""
    return stage_parameters(a, ParallelConfig())[0].total


def active_parameters(a: Architecture) -> int:
    """That one token is multiplied with: k of E experts, the head, not the embedding table."""
    idle = sum(a.moe_layers) * 3 * a.hidden_size * a.moe_ffn_hidden_size * (a.num_experts - a.experts_per_token)
    return total_parameters(a) - idle - (0 if a.tie_embeddings else a.vocab_size * a.hidden_size)


def query_width(a: Architecture) -> int:
    return a.num_heads * a.head_dim


def key_value_width(a: Architecture) -> int:
    return a.num_kv_heads * a.head_dim


def vocabulary(a: Architecture, tp: int) -> int:
    """Elements of one rank's share of the embedding table or the head."""
    return -(-a.vocab_size // tp) * a.hidden_size


def mlp_width(a: Architecture) -> int:
    """Parameters of a dense feed-forward block: gate, up, down."""
    return 3 * a.hidden_size * a.ffn_hidden_size


def largest_matrices(a: Architecture, parallel: ParallelConfig) -> list[int]:
    """Elements of the fc1 and qkv matrices of one rank: no other matrix of a block is larger."""
    found = [a.hidden_size * (query_width(a) + 2 * key_value_width(a)) // parallel.tensor]
    if not all(a.moe_layers):
        found.append(2 * a.hidden_size * a.ffn_hidden_size // parallel.tensor)
    if a.is_moe:
        found.append(2 * a.hidden_size * a.moe_ffn_hidden_size // parallel.expert_tensor)
    return found


def _attention(a: Architecture, tp: int) -> int:
    """One block's attention with its two norms: matrices over tp, norms on every rank."""
    q, kv, h = query_width(a), key_value_width(a), a.hidden_size
    matrices = h * (q + 2 * kv) + q * h + a.qkv_bias * (q + 2 * kv)
    return matrices // tp + 2 * h + a.qk_layernorm * 2 * a.head_dim


def _num_tables(a: Architecture, first: bool, last: bool) -> int:
    """[V, h] tables on a stage; a tied one is on the first and, as a copy, on the last."""
    return int(first or last) if a.tie_embeddings else first + last
