"""What a microbatch leaves in memory between its forward and its backward pass, tensor by tensor.

The tables list what autograd keeps for the modules that the learner builds. Those of `learner.layers.cpu_layers`,
which run where TransformerEngine cannot, are held against measured peaks (`tools.dev.measure_memory`).
TransformerEngine's layers differ where ``fused`` says so; those entries come from reading its source and Megatron's.

Symbols: N tokens of a microbatch, b bytes of an element, and those of `plan.parameters`. Under sequence parallelism a
rank holds N/tp tokens outside attention and feed-forward blocks, and all N tokens of 1/tp of the heads inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.config.learner import LOGIT_CHUNK_ROWS, ParallelConfig
from megatron_rl.plan.parameters import key_value_width, query_width, vocabulary

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Activations:
    """Shapes that decide about activations; methods return bytes on one rank."""

    architecture: Architecture
    parallel: ParallelConfig
    dtype: str
    tokens: int  # N: under context parallelism those of this rank
    fp32_head: bool = False
    fused_head: bool = False
    fused: bool = True  # TransformerEngine's layers; False: those of `learner.layers.cpu_layers`, as on a CPU
    imbalance: float = 1.0  # tokens of the busiest expert-parallel rank over the mean

    @property
    def _b(self) -> int:
        return BYTES[self.dtype]

    @property
    def _local_tokens(self) -> float:
        return self.tokens / self.parallel.tensor

    @property
    def _routed(self) -> float:
        """Rows that this rank's experts compute: tokens times k; expert-tensor ranks all see each other's."""
        a, p = self.architecture, self.parallel
        return self._local_tokens * a.experts_per_token * p.expert_tensor * self.imbalance

    def _norm(self) -> float:
        """Kept by an RMSNorm and by whoever reads its output: input, scale, output."""
        return self._local_tokens * (2 * self._b * self.architecture.hidden_size + 4)

    def layer(self, moe: bool) -> float:
        """Kept for one whole layer."""
        return self.attention() + self._norm() + (self.expert_block() if moe else self.dense_block())

    def attention(self) -> float:
        """Norm, qkv, rotary embedding, core attention, projection.

        All keep the qkv tensor, rotated q and k, and the output with the log-sum-exp of each head. TransformerEngine's
        path also keeps q before its norm and four tables of angles, the other a copy of v and two tables in 16 bits.
        Recomputing core attention drops the log-sum-exp alone, which is why selective recomputation is not modelled.
        """
        a, b, tp = self.architecture, self._b, self.parallel.tensor
        q, kv = query_width(a), key_value_width(a)
        core = b * ((q + 2 * kv) + q + kv + q) + 4 * a.num_heads
        scales = 4 * (a.num_heads + a.num_kv_heads) * a.qk_layernorm
        if self.fused:
            core, angles = core + b * q * a.qk_layernorm, 4 * a.head_dim * b
        else:
            # Under context parallelism keys and values of all ranks, instead of this rank's.
            core, angles = core + b * kv * (2 * self.parallel.context - 1), a.head_dim * b * (b == 2)
        return self._norm() + self.tokens * ((core + scales) / tp + angles)

    def dense_block(self) -> float:
        """fc1's output (2f), silu(gate), up, and their product, which fc2 reads."""
        return self.tokens * 5 * self._b * self.architecture.ffn_hidden_size / self.parallel.tensor

    def expert_block(self) -> float:
        """Router, and for each routed row its input, its weight and fc1's output (2f); TransformerEngine's path also
        keeps silu(gate), up, their product, and that times the weight. All that selective recomputation drops."""
        a, b = self.architecture, self._b
        router = a.num_experts * (1 + b) + a.experts_per_token * 28
        inner = (6 if self.fused else 2) * a.moe_ffn_hidden_size / self.parallel.expert_tensor
        return self._local_tokens * router + self._routed * b * (a.hidden_size + inner + 1)

    def layer_input(self) -> float:
        """What full recomputation keeps of a layer."""
        return self._local_tokens * self._b * self.architecture.hidden_size

    def outside_layers(self, has_embedding: bool, has_head: bool) -> float:
        """Token ids; the last norm and the head's input."""
        a, kept = self.architecture, 8.0 * self.tokens * has_embedding
        if has_head:
            kept += self._norm() + self._local_tokens * (self._head_bytes - self._b) * a.hidden_size
            if self.fused_head and self.parallel.tensor > 1:
                kept += self.tokens * self._head_bytes * a.hidden_size  # gathered, and kept instead of logits
        return kept

    @property
    def _head_bytes(self) -> int:
        return 4 if self.fp32_head else self._b

    def head_peak(self) -> float:
        """Logits and what is made of them, at the worst of three moments: softmax of a chunk of fp32 rows (four of
        them at once); the logits' gradient beside the logits; that gradient with the head's weight gradient. A fused
        head has chunks only, and an fp32 sum of its weight gradient."""
        a, b, table = self.architecture, self._head_bytes, vocabulary(self.architecture, self.parallel.tensor)
        rows = min(LOGIT_CHUNK_ROWS, self.tokens)
        chunk, states = rows * table / a.hidden_size, self.tokens * a.hidden_size * b
        copy = table * 4 * (b > self._b)  # of the head's weights, in fp32
        if self.fused_head:
            return copy + max(16 * chunk, table * (4 + b) + states + chunk * (4 + b))
        logits = self.tokens * table / a.hidden_size * b
        forward, backward = logits + 16 * chunk, 2 * logits + chunk * (4 if b == 4 else 6)
        return max(forward, backward, logits + table * b + copy + states)

    def layer_backward(self, moe: bool) -> float:
        """Gradients in flight while a layer is differentiated, beyond what it kept: those of its stream; of rows on
        their way to the experts and back and inside them; of the weights. Without fused kernels a norm works on five
        fp32 copies of its input, one after the other's gradients are gone."""
        a, b, p = self.architecture, self._b, self.parallel
        stream = 2 * self._local_tokens * a.hidden_size * b
        if moe:
            f = a.moe_ffn_hidden_size / p.expert_tensor
            exchange = (3 if p.expert > 1 else 1) * self._routed * a.hidden_size * b
            weights = 3 * a.hidden_size * f * a.num_experts / p.expert * b
            block = exchange + self._routed * 5 * f * b + weights
        else:
            weight = 2 * a.hidden_size * a.ffn_hidden_size // p.tensor * b
            block = 2 * b * self.tokens * a.ffn_hidden_size / p.tensor + weight
        norm = 0.0 if self.fused else 5 * 4 * max(self._local_tokens * a.hidden_size, self._query_elements())
        return stream + max(block, norm)

    def _query_elements(self) -> float:
        return self.tokens * query_width(self.architecture) / self.parallel.tensor

    def gather_buffer(self) -> float:
        """The whole [N, h] row that sequence parallelism gathers for a matrix; kept from then on."""
        return self.tokens * self.architecture.hidden_size * self._b if self.parallel.tensor > 1 else 0.0

    def context_buffer(self) -> float:
        """Keys, values and their gradients of other context-parallel ranks, while one layer's attention needs them:
        TransformerEngine's ring holds the rank's turn and the next one's, the other path all ranks' at once."""
        context = self.parallel.context
        if context == 1:
            return 0.0
        ranks = 2 if self.fused else context
        row = 2 * key_value_width(self.architecture) * self._b / self.parallel.tensor  # keys and values
        return 2 * ranks * self.tokens * row
