"""The GPUs that `plan` knows, and every number that is assumed and not computed.

Figures of the GPUs are their vendor's data sheets (SXM form, dense 16-bit matrix rates). The rest are round estimates
of what well-run training and inference reach; none was measured with this project. `plan` prints those it used.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
BROADCAST_BYTES = 128 << 20  # two chunks in which the learner's first rank sends weights to servers


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float  # as PyTorch reports it, below the data sheet's
    flops_16bit: float  # per second
    flops_fp32: float  # per second, without TF32
    bandwidth: float  # bytes/s of its memory
    nvlink: float  # bytes/s to GPUs of its node, one direction
    network: float  # bytes/s to other nodes, its share of the node's adapters
    batched_tokens: int  # vLLM's default `max_num_batched_tokens` for offline use: fixes its activations
    host_link: float  # bytes/s between host memory and one GPU, one direction: PCIe 4 or 5, 16 lanes
    processors: int  # streaming multiprocessors
    host_gib: float  # host memory of a node, where `--host-memory` does not say it: that of the vendor's DGX

    def flops(self, dtype: str) -> float:
        return self.flops_fp32 if dtype == "fp32" else self.flops_16bit


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 39.4, 312e12, 19.5e12, 1.555e12, 300e9, 25e9, 8192, 32e9, 108, 1024),
        Gpu("a100-80", 79.1, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 8192, 32e9, 108, 2048),
        Gpu("h100-80", 79.1, 989e12, 67e12, 3.35e12, 450e9, 50e9, 16384, 64e9, 132, 2048),
        Gpu("h800-80", 79.1, 989e12, 67e12, 3.35e12, 200e9, 50e9, 16384, 64e9, 132, 2048),
        Gpu("h200-141", 139.8, 989e12, 67e12, 4.8e12, 450e9, 50e9, 16384, 64e9, 132, 2048),
    )
}

# Memory
RUNTIME_GIB = 2.0  # CUDA context, cuBLAS workspaces, NCCL's buffers of the learner's process groups
GRAPHS_GIB = 1.0  # CUDA graphs and communicators of a vLLM engine; they stay while it sleeps
FRAGMENTATION = 0.08  # of activations and temporaries: what the caching allocator cannot reuse
EXPERT_IMBALANCE = 1.25  # tokens of the busiest expert-parallel rank over the mean, where there are several
SERVER_UTILIZATION = 0.9  # of a GPU that serves alone
MOST_UTILIZATION = 0.85  # that the search gives an engine beside a learner: the rest is for what is not counted
PROCESS_GIB = 8.0  # of host memory of a rank: Python, CUDA, vLLM, the data set

# Speed
LEARNER_MFU = {False: 0.38, True: 0.18}  # is it an MoE? share of the peak rate that forward and backward reach
PREFILL_MFU = {False: 0.45, True: 0.25}  # the same for a forward pass alone
DECODE_FLOPS = 0.5  # share of the peak rate of large decoding batches
DECODE_BANDWIDTH = 0.7  # share of memory bandwidth of decoding
LINK = 0.7  # share of a link's rate that collectives reach
STEP_OVERHEAD_S = 1.5e-3  # vLLM's scheduler and sampler, per decoding step with CUDA graphs
EAGER_OVERHEAD_S = 20e-3  # the same without graphs
ALLREDUCE_S = 12e-6  # latency of one small all-reduce over NVLink; two a layer and decoding step
EXACT_ATTENTION_BANDWIDTH = 0.5  # share of memory bandwidth of attention in splits of 512 keys
EXACT_STEPS = 16  # between two looks of the exact engine at what was sampled: exact/room.py
KEY_BLOCK_S = 1e-6  # of a block of keys, or of a split to be joined, in the chain of one program of attention
KERNEL_S = 2.5e-6  # of a kernel in a graph beside its work: launch and tail
HOST_LINK = 0.6  # share of a bus's rate that page-locked copies reach while all GPUs of a node copy
HOST_NETWORK = 2e9  # bytes/s that a rank receives over the hosts' network, where responses travel
DISK = 2e9  # bytes/s that a node writes to the file system of its checkpoints
HASH = 1.8e9  # bytes/s of SHA-256 on one core with SHA instructions
TENSOR_OVERHEAD_S = 500e-6  # per tensor of a weight update: gathering, naming, loading
EXPERT_OVERHEAD_S = 40e-6  # the same of an expert's matrix, which are loaded a stack at a time
ADAM_BYTES = 30  # read and written per weight of the shard: gradient, master, two moments, weight

# Workload, where neither recipe nor command line says it
RESPONSE_SHARE = 0.5  # mean response over the longest allowed
PROMPT_SHARE = 0.125  # mean prompt over the longest allowed
REFILL_ROUNDS = 1.5  # sampling rounds of a step that replaces uninformative groups, at most `max_generations`
