"""What a microbatch leaves in memory between its forward and its backward pass, tensor by tensor.

The tables list what autograd keeps for Megatron's modules. For Megatron's local layers they were read off with
`torch.autograd.graph.saved_tensors_hooks` and are held against measured peaks (`tools/measure_memory.py`); for
TransformerEngine's layers they differ only in what a norm keeps, which is by reading its source.

Symbols: N tokens of a microbatch, b bytes of an element, and those of `plan.parameters`. Under sequence parallelism a
rank holds N/tp tokens outside attention and feed-forward blocks, and all N tokens of 1/tp of the heads inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.model import Architecture
from megatron_rl.plan.parameters import key_value_width, query_width, vocabulary

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
CHUNK_ROWS = 256  # of learner.logprobs, which turns this many rows of logits into fp32 at a time


@dataclass(frozen=True)
class Activations:
    """Shapes that decide about activations; methods return bytes on one rank."""

    architecture: Architecture
    parallel: ParallelConfig
    dtype: str
    tokens: int  # N
    fp32_head: bool = False
    fused_norms: bool = True  # TransformerEngine's layers; False: Megatron's own, as on a CPU
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

    def _norm(self, width: float) -> float:
        """Kept by one RMSNorm over ``width`` features of one token, without its output.

        torch's keeps the fp32 input and the fp32 normed input; TransformerEngine's the input as it came.
        """
        return (self._b if self.fused_norms else 8) * width + 4

    def layer(self, moe: bool) -> float:
        """Kept for one whole layer."""
        return self.attention() + (self.experts() if moe else self.dense_mlp())

    def attention(self) -> float:
        """Norm, qkv, rotary embedding, core attention, projection."""
        core = self.core_attention()
        a, b, tp = self.architecture, self._b, self.parallel.tensor
        norm_and_input = self._norm(a.hidden_size) + b * a.hidden_size
        head_norms = 0.0
        if a.qk_layernorm:
            # In fp32 without fusion k's norm keeps a view of the qkv tensor, which the core keeps anyway.
            shared = 4 * key_value_width(a) if self._b == 4 and not self.fused_norms else 0
            both = query_width(a) + key_value_width(a)
            head_norms = (self._norm(both) + 4 * (a.num_heads + a.num_kv_heads) - shared) / tp
        angles = 4 * a.head_dim * b  # cosine and sine, for q and for k
        return self._local_tokens * norm_and_input + self.tokens * (head_norms + angles) + core

    def core_attention(self) -> float:
        """q, k, the qkv tensor that v is a view of, the output, and the log-sum-exp of each head.

        Recomputing it drops the last alone: q, k, v are its inputs, the output is the projection's.
        """
        a, b = self.architecture, self._b
        q, kv = query_width(a), key_value_width(a)
        return self.tokens * (b * (q + kv + (q + 2 * kv) + q) + 4 * a.num_heads) / self.parallel.tensor

    def dense_mlp(self) -> float:
        """Norm; fc1's input and output (2f), silu(gate), up, their product, which fc2 reads."""
        a, b = self.architecture, self._b
        outside = self._norm(a.hidden_size) + b * a.hidden_size
        return self._local_tokens * outside + self.tokens * 5 * b * a.ffn_hidden_size / self.parallel.tensor

    def experts(self) -> float:
        """Norm and its output; the experts themselves."""
        a, b = self.architecture, self._b
        return self._local_tokens * (self._norm(a.hidden_size) + b * a.hidden_size) + self.expert_block()

    def expert_block(self) -> float:
        """Router, permuted input, and per routed row what a dense block keeps plus the product with its weight: all
        that selective recomputation drops. (Of core attention it drops next to nothing, see `core_attention`.)"""
        a, b = self.architecture, self._b
        router = a.num_experts * (1 + b) + a.experts_per_token * 20
        row = b * a.hidden_size + 6 * b * a.moe_ffn_hidden_size / self.parallel.expert_tensor + b
        return self._local_tokens * router + self._routed * row

    def layer_input(self) -> float:
        """What full recomputation keeps of a layer."""
        return self._local_tokens * self._b * self.architecture.hidden_size

    def outside_layers(self, has_embedding: bool, has_head: bool) -> float:
        """Token ids; the last norm and the head's input."""
        a, kept = self.architecture, 0.0
        if has_embedding:
            kept += 8 * self.tokens
        if has_head:
            kept += self._local_tokens * (self._norm(a.hidden_size) + self._head_bytes * a.hidden_size)
        return kept

    @property
    def _head_bytes(self) -> int:
        return 4 if self.fp32_head else self._b

    def logits(self) -> float:
        """[N, V/tp] once."""
        return (
            self.tokens
            * vocabulary(self.architecture, self.parallel.tensor)
            / self.architecture.hidden_size
            * (self._head_bytes)
        )

    def head_peak(self) -> float:
        """Logits and what is made of them, at the worst of three moments: softmax of a chunk of fp32 rows (five of
        them at once); the logits' gradient beside the logits; that gradient with the head's weight gradient."""
        a, b, table = self.architecture, self._head_bytes, vocabulary(self.architecture, self.parallel.tensor)
        chunk = min(CHUNK_ROWS, self.tokens) * table / a.hidden_size
        forward = self.logits() + 17 * chunk
        backward = 2 * self.logits() + chunk * (4 if b == 4 else 6)
        weights = table * (b + (4 if b > self._b else 0))
        matmul = self.logits() + weights + self.tokens * a.hidden_size * b
        return max(forward, backward, matmul)

    def layer_backward(self, moe: bool) -> float:
        """Gradients in flight while a layer is differentiated, beyond what it kept: of its input and output, of fc1's
        output, of one weight; and of rows on their way to the experts and back."""
        a, b, p = self.architecture, self._b, self.parallel
        stream = 2 * self._local_tokens * a.hidden_size * b
        if moe:
            exchange = (3 if p.expert > 1 else 1) * self._routed * a.hidden_size * b
            weight = 2 * a.hidden_size * a.moe_ffn_hidden_size // p.expert_tensor * b
            return stream + exchange + weight
        weight = 2 * a.hidden_size * a.ffn_hidden_size // p.tensor * b
        return stream + 2 * b * self.tokens * a.ffn_hidden_size / p.tensor + weight

    def gather_buffer(self) -> float:
        """The whole [N, h] row that sequence parallelism gathers for a matrix; kept from then on."""
        return self.tokens * self.architecture.hidden_size * self._b if self.parallel.tensor > 1 else 0.0
