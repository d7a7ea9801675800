"""Memory of one learner rank: its static part, and the peak that a training step adds.

static = weights + gradient buffer + Adam's moments + fp32 master weights;
peak   = static + max(head, layer, optimizer), see `LearnerMemory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.learner import LOGIT_CHUNK_ROWS, LearnerConfig, LoraConfig, OffloadConfig, ParallelConfig
from megatron_rl.config.model_rules import stage_layers
from megatron_rl.instruments.plan import delta_net
from megatron_rl.instruments.plan.hardware import DISK, HASH, HOST_LINK
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import Architecture

# Parameters of one rank, by stage.
#
# Symbols: h hidden size, q query width (heads · head_dim), kv key/value width, f feed-forward width, E experts,
# V vocabulary, tp/pp/ep/etp the sizes of `learner.parallel`.


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one rank of one pipeline stage."""

    dense: int  # all but experts: sharded over tp, its optimizer over dp
    expert: int  # sharded over ep · etp, its optimizer over the expert-data-parallel ranks
    largest: int  # parameters of the largest single tensor
    layers: int
    moe_layers: int
    linear_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stage_parameters(a: Architecture, parallel: ParallelConfig) -> list[StageParameters]:
    """Return the parameters of each pipeline stage, in order."""
    stages, begun = [], 0
    for stage, per_stage in enumerate(stage_layers(a.num_layers, parallel.pipeline)):
        moe = sum(a.moe_layers[begun : begun + per_stage])
        linear = sum(a.linear_layers[begun : begun + per_stage])
        begun += per_stage
        first, last = stage == 0, stage == parallel.pipeline - 1
        # Of [V, h]; a tied one is on the first stage and copied on the last.
        tables = int(first or last) if a.tie_embeddings else first + last
        dense = (per_stage - linear) * _attention(a, parallel.tensor)
        dense += linear * delta_net.parameters(a, parallel.tensor) + moe * a.hidden_size * a.num_experts
        dense += (per_stage - moe) * (3 * a.hidden_size * a.ffn_hidden_size) // parallel.tensor
        dense += moe * (3 * a.hidden_size * a.shared_ffn_hidden_size // parallel.tensor)
        dense += moe * (a.hidden_size * a.shared_expert_gate + a.num_experts * a.linear_bias)
        dense += tables * vocabulary(a, parallel.tensor) + last * a.hidden_size
        experts = moe * _expert(a) * a.num_experts
        stages.append(
            StageParameters(
                dense=dense,
                expert=experts // (parallel.expert * parallel.expert_tensor),
                largest=max(largest_matrices(a, parallel) + [vocabulary(a, parallel.tensor)] * (tables > 0)),
                layers=per_stage,
                moe_layers=moe,
                linear_layers=linear,
                has_embedding=first,
                has_head=last,
            )
        )
    return stages


def adapter_parameters(
    a: Architecture, lora: LoraConfig, parallel: ParallelConfig, stage: StageParameters
) -> tuple[int, int]:
    """Return (dense, expert) trained parameters of one rank of ``stage`` with `learner.lora`: A and B per linear layer.

    Tensor parallelism splits the factor on the same side as the weight.
    """
    h, tp, dense_layers = a.hidden_size, parallel.tensor, stage.layers - stage.moe_layers
    attention = 2 * h + ((2 + a.output_gate) * query_width(a) + 2 * key_value_width(a)) // tp
    if (m := a.latent) is not None:
        attention = 3 * h + 2 * m.rank + m.rotary_width  # both sides of the key's and value's vector, and the output
        attention += 0 if m.query_rank is None else 2 * m.query_rank
        attention += (query_width(a) + a.num_heads * (m.plain_width + 2 * m.value_width)) // tp
    dense = (stage.layers - stage.linear_layers) * attention + stage.linear_layers * delta_net.adapters(a, tp)
    dense += dense_layers * (2 * h + 3 * a.ffn_hidden_size // tp)
    if a.shared_ffn_hidden_size:
        dense += stage.moe_layers * (2 * h + 3 * a.shared_ffn_hidden_size // tp)
    # fc1 [2f, h] and fc2 [h, f] of every expert of this rank
    expert = stage.moe_layers * (a.num_experts // parallel.expert) * (2 * h + 3 * a.moe_ffn_hidden_size)
    return lora.rank * dense, lora.rank * expert


def total_parameters(a: Architecture) -> int:
    """Return the parameters of the whole model; a tied table counts once."""
    return stage_parameters(a, ParallelConfig())[0].total


def active_parameters(a: Architecture) -> int:
    """Return the parameters that a token is multiplied with: k of E experts and the head, not the embedding table."""
    idle = sum(a.moe_layers) * _expert(a) * (a.num_experts - a.experts_per_token)
    return total_parameters(a) - idle - (0 if a.tie_embeddings else a.vocab_size * a.hidden_size)


def query_width(a: Architecture) -> int:
    return a.num_heads * a.head_dim


def key_value_width(a: Architecture) -> int:
    return a.num_kv_heads * a.head_dim


def vocabulary(a: Architecture, tp: int) -> int:
    """Return the elements of one rank's share of the embedding table or the head."""
    return -(-a.vocab_size // tp) * a.hidden_size


def largest_matrices(a: Architecture, parallel: ParallelConfig) -> list[int]:
    """Return the elements of one rank's fc1 and qkv matrices, the largest of a block."""
    attention = (1 + a.output_gate) * query_width(a) + 2 * key_value_width(a)
    sizes = [a.hidden_size * max(attention, delta_net.columns(a)) // parallel.tensor]
    if not all(a.moe_layers):
        sizes.append(2 * a.hidden_size * a.ffn_hidden_size // parallel.tensor)
    if a.is_moe:
        sizes.append(2 * a.hidden_size * a.moe_ffn_hidden_size // parallel.expert_tensor)
        sizes.append(2 * a.hidden_size * a.shared_ffn_hidden_size // parallel.tensor)
    return sizes


def _expert(a: Architecture) -> int:
    """Return the parameters of an expert: gate, up, down, and their biases."""
    return 3 * a.hidden_size * a.moe_ffn_hidden_size + a.linear_bias * (2 * a.moe_ffn_hidden_size + a.hidden_size)


def _attention(a: Architecture, tp: int) -> int:
    """Return the parameters of a block's attention and two norms: matrices over tp, norms on every rank."""
    q, kv, h, m = query_width(a), key_value_width(a), a.hidden_size, a.latent
    if m is not None:
        queries = h * q if m.query_rank is None else m.query_rank * q
        of_heads = queries + a.num_heads * (m.rank * (m.plain_width + m.value_width) + h * m.value_width)
        whole = h * (m.rank + m.rotary_width) + m.rank + (0 if m.query_rank is None else (h + 1) * m.query_rank)
        return of_heads // tp + whole + 2 * h
    matrices = h * ((1 + a.output_gate) * q + 2 * kv) + q * h + a.qkv_bias * (q + 2 * kv) + a.has_sinks * a.num_heads
    norms = (q + kv) // tp if a.wide_qk_norm else 2 * a.head_dim
    return matrices // tp + 2 * h + a.qk_layernorm * norms + a.linear_bias * h


# Memory of a microbatch between its forward and its backward pass, tensor by tensor.
#
# The tables list the tensors that autograd keeps for the learner's modules. Those of `layers.cpu_layers`, which
# run without TransformerEngine, are compared with measured peaks (`tools.dev.measure_memory`). With ``fused``, entries
# are for TransformerEngine's layers; they come from reading its source and Megatron's.
#
# Symbols: N tokens of a microbatch, b bytes of an element, and those of `plan.learner`. Under sequence parallelism a
# rank holds N/tp tokens outside attention and feed-forward blocks, and all N tokens of 1/tp of the heads inside.


BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}


@dataclass(frozen=True)
class Activations:
    """Activations of a microbatch for given shapes; methods return bytes on one rank."""

    architecture: Architecture
    parallel: ParallelConfig
    dtype: str
    tokens: int  # N; with context parallelism, the tokens of this rank
    fp32_head: bool = False
    fused_head: bool = False
    fused: bool = True  # TransformerEngine's layers; False: those of `layers.cpu_layers`, as on a CPU
    imbalance: float = 1.0  # tokens of the busiest expert-parallel rank over the mean

    @property
    def _b(self) -> int:
        return BYTES[self.dtype]

    @property
    def _local_tokens(self) -> float:
        return self.tokens / self.parallel.tensor

    @property
    def _routed(self) -> float:
        """Return the rows that this rank's experts compute: tokens times k, with those of other expert-tensor ranks."""
        a, p = self.architecture, self.parallel
        return self._local_tokens * a.experts_per_token * p.expert_tensor * self.imbalance

    def _norm(self) -> float:
        """Return the bytes that an RMSNorm and its reader keep: input, scale, output."""
        return self._local_tokens * (2 * self._b * self.architecture.hidden_size + 4)

    def layer(self, moe: bool) -> float:
        """Return the bytes kept for one layer."""
        return (
            self.attention()
            + self._norm()
            + (self.expert_block() if moe else self._gated(self.architecture.ffn_hidden_size))
        )

    def attention(self) -> float:
        """Return the bytes kept by norm, qkv, rotary embedding, core attention and projection.

        Both paths keep the qkv tensor, rotated q and k, and the output with the log-sum-exp of each head.
        TransformerEngine's path also keeps q before its norm and four tables of angles, the other path a copy of v and
        two tables in 16 bits. Recomputing core attention would only free the log-sum-exp, so selective recomputation is
        not modelled.
        """
        a, b, tp = self.architecture, self._b, self.parallel.tensor
        q, kv = query_width(a), key_value_width(a)
        core = b * ((q + 2 * kv) + q + kv + q + 3 * q * a.output_gate) + 4 * a.num_heads  # gate, sigmoid, product
        scales = 8 * tp if a.wide_qk_norm else 4 * (a.num_heads + a.num_kv_heads) * a.qk_layernorm
        if self.fused:
            core, angles = core + b * (q + kv * a.wide_qk_norm) * a.qk_layernorm, 4 * a.head_dim * b
        else:
            # With context parallelism, keys and values of all ranks instead of this rank's.
            core, angles = core + b * kv * (2 * self.parallel.context - 1), a.head_dim * b * (b == 2)
            core += b * (q + 2 * kv) * a.wide_qk_norm  # before the norm and behind it
        return self._norm() + self.tokens * ((core + scales) / tp + angles)

    def delta_net(self) -> float:
        """Return what a delta net keeps beyond `attention`."""
        a = self.architecture
        own = self.tokens * delta_net.activations(a, self._b) / self.parallel.tensor
        return self._norm() + own - self.attention()

    def widest(self, moe: bool) -> float:
        """Return the bytes kept for one layer of those that keep most."""
        return self.layer(moe) + max(0.0, self.delta_net())

    def _gated(self, width: int) -> float:
        """Return the bytes kept by a dense block: fc1's output (2f), silu(gate), up, and their product for fc2."""
        return self.tokens * 5 * self._b * width / self.parallel.tensor

    def expert_block(self) -> float:
        """Return the bytes kept by the router and, per routed row, by input, weight and fc1's output (2f).

        TransformerEngine's path also keeps silu(gate), up, their product, and the product times the weight. Selective
        recomputation drops all of these.
        """
        a, b = self.architecture, self._b
        router = a.num_experts * (1 + b) + a.experts_per_token * 28
        inner = (6 if self.fused else 2) * a.moe_ffn_hidden_size / self.parallel.expert_tensor
        shared = self._gated(a.shared_ffn_hidden_size)
        if a.shared_expert_gate:  # the shared expert's output, and the sigmoid that weights it
            shared += self._local_tokens * b * (a.hidden_size + 1)
        return self._local_tokens * router + self._routed * b * (a.hidden_size + inner + 1) + shared

    def layer_input(self) -> float:
        """Return the bytes of a layer that full recomputation keeps."""
        return self._local_tokens * self._b * self.architecture.hidden_size

    def outside_layers(self, has_embedding: bool, has_head: bool) -> float:
        """Return the bytes kept outside layers: token ids, the last norm and the head's input."""
        a, total = self.architecture, 8.0 * self.tokens if has_embedding else 0.0
        if has_head:
            total += self._norm() + self._local_tokens * (self._head_bytes - self._b) * a.hidden_size
            if self.fused_head and self.parallel.tensor > 1:
                total += self.tokens * self._head_bytes * a.hidden_size  # gathered input, kept instead of logits
        return total

    @property
    def _head_bytes(self) -> int:
        return 4 if self.fp32_head else self._b

    def head_peak(self) -> float:
        """Return the peak bytes of logits and their derivatives.

        It is the largest of three moments: the softmax of a chunk of fp32 rows (four copies); the logits with their
        gradient; that gradient with the head's weight gradient. A fused head has only chunks and an fp32 sum of its
        weight gradient.
        """
        a, b, table = self.architecture, self._head_bytes, vocabulary(self.architecture, self.parallel.tensor)
        rows = min(LOGIT_CHUNK_ROWS, self.tokens)
        chunk, states = rows * table / a.hidden_size, self.tokens * a.hidden_size * b
        copy = table * 4 * (b > self._b)  # fp32 copy of the head's weights
        if self.fused_head:
            return copy + max(16 * chunk, table * (4 + b) + states + chunk * (4 + b))
        logits = self.tokens * table / a.hidden_size * b
        forward, backward = logits + 16 * chunk, 2 * logits + chunk * (4 if b == 4 else 6)
        return max(forward, backward, logits + table * b + copy + states)

    def layer_backward(self, moe: bool) -> float:
        """Return the bytes of gradients during a layer's backward pass, beyond its kept activations.

        They are the gradients of its stream; of rows on their way to the experts, inside them and back; and of the
        weights. Without fused kernels, a norm needs five fp32 copies of its input, but not at the same time as others.
        """
        a, b, p = self.architecture, self._b, self.parallel
        stream = 2 * self._local_tokens * a.hidden_size * b
        if moe:
            f = a.moe_ffn_hidden_size / p.expert_tensor
            exchange = (3 if p.expert > 1 else 1) * self._routed * a.hidden_size * b
            weights = 3 * a.hidden_size * f * a.num_experts / p.expert * b
            block = max(exchange + self._routed * 5 * f * b + weights, self._gated_backward(a.shared_ffn_hidden_size))
        else:
            block = self._gated_backward(a.ffn_hidden_size)
        block = max(block, self.tokens * delta_net.backward(a, b) / p.tensor)
        rows = max(self._local_tokens * a.hidden_size, self.tokens * query_width(a) / p.tensor)
        return stream + max(block, 0.0 if self.fused else 5 * 4 * rows)

    def _gated_backward(self, width: int) -> float:
        a, tp = self.architecture, self.parallel.tensor
        return 2 * self._b * self.tokens * width / tp + 2 * a.hidden_size * width // tp * self._b

    def buffers(self) -> float:
        """Return the bytes of the [N, h] buffer in which sequence parallelism gathers rows, which is then kept, and of
        other context-parallel ranks' keys, values and their gradients in a layer's attention.

        TransformerEngine's ring has those of two ranks at a time, the other path those of all ranks.
        """
        a, p = self.architecture, self.parallel
        gathered = self.tokens * a.hidden_size * self._b if p.tensor > 1 else 0.0
        ranks = 0 if p.context == 1 else 2 if self.fused else p.context
        row = 2 * key_value_width(a) * self._b / p.tensor  # keys and values
        return gathered + 2 * ranks * self.tokens * row


GRADIENT_BYTES = 4  # Megatron's buffer is fp32 for weights of any dtype
MOMENT_BYTES = 8  # Adam's two, fp32
MASTER_BYTES = 4  # for 16-bit weights; fp32 weights are their own master weights
UPDATE_CHUNK = 2**24  # elements that `learner.gradient_noise` reads at a time


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on one rank of one pipeline stage."""

    stage: int
    weights: float
    gradients: float
    moments: float
    masters: float
    activations: float  # activations kept for all microbatches in flight
    head: float  # logits and their gradients; 0 on a stage without head
    layer: float  # recomputed activations and gradients of the current layer
    optimizer: float  # temporaries of the update
    buffers: float  # sequence parallelism's gather buffer, and context parallelism's keys and values

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.moments + self.masters

    @property
    def states(self) -> float:
        """Bytes of Adam's states, which `learner.offload.optimizer` moves."""
        return self.moments + self.masters

    @property
    def passes(self) -> float:
        """Bytes that forward and backward passes add: activations plus the larger peak of head and layer."""
        return self.activations + max(self.head, self.layer) + self.buffers

    @property
    def dynamic(self) -> float:
        """Bytes that a step adds: the larger of passes and update."""
        return max(self.passes, self.optimizer)

    def at_rest(self, offload: OffloadConfig) -> float:
        """Return the bytes that stay on the GPU while the engine generates."""
        stays = ((self.gradients, offload.gradients), (self.states, offload.optimizer), (self.weights, offload.weights))
        return sum(size for size, leaves in stays if not leaves)


def learner_memory(
    a: Architecture,
    learner: LearnerConfig,
    world_size: int,
    tokens: int,
    num_microbatches: int = 1,
    *,
    fp32_head: bool = False,
    fused: bool = True,
    imbalance: float = 1.0,
    gradient_noise: bool = True,
) -> list[LearnerMemory]:
    """Return the memory of a rank of each pipeline stage.

    ``world_size``: learner ranks. ``tokens``: tokens of one microbatch over all context-parallel ranks.

    ``fused``: TransformerEngine's layers and fused Adam, as on a GPU; False: the learner's CPU layers and torch's Adam.
    ``imbalance``: see `Activations`.
    """
    b, p = BYTES[learner.dtype], learner.parallel
    tokens_per_rank = -(-tokens // p.context)
    kept = Activations(a, p, learner.dtype, tokens_per_rank, fp32_head, learner.fused_head, fused, imbalance)
    dp = max(1, world_size // (p.tensor * p.pipeline))  # includes context-parallel ranks
    expert_dp = max(1, world_size // (p.expert * p.expert_tensor * p.pipeline))
    stages, memories = stage_parameters(a, p), []
    for index, stage in enumerate(stages):
        trained, sharded, weights = stage.total, stage.dense / dp + stage.expert / expert_dp, stage.total * b
        if learner.lora is not None:
            dense, expert = adapter_parameters(a, learner.lora, p, stage)
            trained, sharded = dense + expert, dense / dp + expert / expert_dp
            weights += trained * b
        activations, layer = _activations(stage, kept, learner, min(len(stages) - index, num_microbatches))
        memory = LearnerMemory(
            stage=index,
            weights=weights,
            gradients=trained * GRADIENT_BYTES,
            moments=sharded * MOMENT_BYTES,
            masters=sharded * MASTER_BYTES if b == 2 else 0.0,
            activations=activations,
            head=kept.head_peak() if stage.has_head else 0.0,
            layer=layer,
            optimizer=_update(stage, expert_dp, dp, fused, learner.optimizer.weight_decay, gradient_noise),
            buffers=kept.buffers(),
        )
        memories.append(memory)
    return memories


def _activations(
    stage: StageParameters, kept: Activations, learner: LearnerConfig, in_flight: int
) -> tuple[float, float]:
    """Return (bytes kept for all microbatches in flight, bytes of the current layer)."""
    kinds = [True] * (stage.moe_layers > 0) + [False] * (stage.moe_layers < stage.layers)
    dense_layers = stage.layers - stage.moe_layers
    total = stage.moe_layers * kept.layer(True) + dense_layers * kept.layer(False)
    total += stage.linear_layers * kept.delta_net()
    merged = {moe: _merged_weights(kept.architecture, learner, moe) for moe in kinds}
    all_merged = stage.moe_layers * merged.get(True, 0.0) + dense_layers * merged.get(False, 0.0)
    at_hand = max(kept.layer_backward(moe) for moe in kinds)
    if learner.recompute == "full":
        each = stage.layers * kept.layer_input()
        at_hand += max(kept.widest(moe) for moe in kinds) + max(merged.values())
        if kept.parallel.expert * kept.parallel.expert_tensor > 1 or kept.fused:
            # Megatron's token dispatcher keeps the input of the recomputed layer and its gradient.
            at_hand += stage.moe_layers * kept.layer_input()
    elif learner.recompute == "selective" and stage.moe_layers:
        each = total - stage.moe_layers * kept.expert_block() + all_merged
        at_hand += kept.expert_block()
    else:
        each = total + all_merged
    return in_flight * (each + kept.outside_layers(stage.has_embedding, stage.has_head)), at_hand


def _merged_weights(a: Architecture, learner: LearnerConfig, moe: bool) -> float:
    """Return the bytes of a layer's merged weights, kept from its forward to its backward pass."""
    if learner.lora is None:
        return 0.0
    p, width = learner.parallel, ((2 + a.output_gate) * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    width = max(width, delta_net.columns(a)) // p.tensor
    width += 3 * a.moe_ffn_hidden_size * (a.num_experts // p.expert) if moe else 3 * a.ffn_hidden_size // p.tensor
    return a.hidden_size * width * BYTES[learner.dtype]


def _update(stage: StageParameters, expert_dp: int, dp: int, fused: bool, weight_decay: float, watched: bool) -> float:
    """Return the bytes of an update's temporaries.

    torch's Adam makes two tensors of a weight's size, TransformerEngine's none. Measuring the size of the update
    (`monitor.gradient_noise`) makes two or three tensors of a chunk of the shard.
    """
    adam = 0.0 if fused else 2 * 4 * stage.largest
    chunk = min(UPDATE_CHUNK, max(stage.dense / dp, stage.expert / expert_dp))
    return max(adam, watched * (3 if weight_decay else 2) * 4 * chunk)


# Cost of a checkpoint per rank: bytes on disk, memory during the write, time.
#
# Every rank writes an equal share: its part of the weights, which are the same on data-parallel ranks, and the master
# weights and moments that it owns (`checkpoint.shards`). The share is written without a copy.


FILES = 2  # files that a rank writes, one after the other
PINNED = 2.0  # torch rounds a pinned block up to a power of two


@dataclass(frozen=True)
class CheckpointCost:
    """Cost of a checkpoint for one rank of the largest pipeline stage."""

    size: float  # bytes that it writes, then reads for their hash
    host: float  # bytes of host memory during the write
    written_s: float  # until it is complete


def checkpoint_cost(work: Workload, disk: float = DISK) -> CheckpointCost:
    """Return the cost of one save of ``work``. ``disk``: bytes/s that one node writes."""
    size = max(_share(work, stage) for stage in stage_parameters(work.architecture, work.parallel))
    written = size * work.gpus_per_node / disk + size / HASH
    if work.recipe.checkpoint.async_save:
        copy = size / (HOST_LINK * work.gpu.host_link)
        return CheckpointCost(size, PINNED * size, copy + written)
    return CheckpointCost(size, size / FILES, written)


def _share(work: Workload, stage: StageParameters) -> float:
    p, learner = work.parallel, work.recipe.learner
    b, experts = BYTES[learner.dtype], max(1, work.ranks // (p.expert * p.expert_tensor * p.pipeline))
    dense = work.data_parallel * p.context
    trained = MASTER_BYTES + MOMENT_BYTES  # fp32 weights are also master weights and are written under both names
    if learner.lora is not None:
        weights = stage.dense / dense + stage.expert / experts
        adapters = adapter_parameters(work.architecture, learner.lora, p, stage)
        return b * weights + (b + trained) * (adapters[0] / dense + adapters[1] / experts)
    return (b + trained) * (stage.dense / dense + stage.expert / experts)
