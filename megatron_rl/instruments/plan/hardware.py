"""The GPUs that `plan` supports, and all assumed numbers.

Figures of GPUs come from NVIDIA's data sheets (SXM form, dense 16-bit matrix rates): "A100 Tensor Core GPU", "H100
Tensor Core GPU" (also for the rates of H800), "H200 Tensor Core GPU", "HGX H20", "DGX B200" with the table of the HGX
platform, "GB200 NVL72" (a 72nd of the rack). Memory is what torch reports. Shares and fixed parts are fitted to what
others published (`published.json`, `decoding.tsv`) or round estimates. `plan --detail` prints the ones that it used.

`--gpu FILE` gives the figures of one's own GPUs, from data sheets or measured on a node:

    name: ours                                  # default: the file's name
    base: h100-80                               # whose figures count where this file has none
    memory_gib: 79.1                            # as torch reports it
    tflops: {bf16: 989, tf32: 494.5, fp32: 67}  # peak rates of dense matrices; bf16 stands for fp16 too
    memory_tb_s: 3.35
    nvlink_gb_s: 450                            # to GPUs of the node, one direction
    network_gb_s: 50                            # to other nodes, of one GPU
    measured: {tflops: {bf16: 690}}             # what `megatron-rl doctor --measure FILE` writes

All keys are in `GpuFile`. Without `base` the required ones must be there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from megatron_rl.config.base import Section
from megatron_rl.config.explain import explain
from megatron_rl.config.loader import read_yaml
from megatron_rl.errors import InputError

GIB = 1 << 30
BROADCAST_BYTES = 128 << 20  # the two buffers in which the learner's first rank sends weights to servers


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float  # as PyTorch reports it, below the data sheet's
    flops_16bit: float  # per second
    flops_fp32: float  # per second, without TF32
    flops_tf32: float  # per second
    bandwidth: float  # bytes/s of its memory
    nvlink: float  # bytes/s to GPUs of its node, one direction
    network: float  # bytes/s to other nodes, its share of the node's adapters
    batched_tokens: int  # vLLM's default `max_num_batched_tokens` for offline use, which determines its activations
    host_link: float  # bytes/s between host memory and one GPU, one direction: PCIe 4 or 5, 16 lanes
    host_gib: float  # host memory of a node without `--host-memory`: that of the vendor's DGX
    family: str = "hopper"  # whose fitted figures count: hopper, h20 or blackwell
    nvlink_gpus: int = 0  # GPUs that NVLink joins beyond the node: a rack of GB200 is one such group
    attention_cost: float = 1.0  # seconds of an operation of attention over those of one of a product, if measured
    measured: tuple[str, ...] = ()  # figures that were measured on a node, in words

    def fitted(self, figures: dict[str, float]) -> float:
        """Return the figure of this GPU's family; one that was not measured by itself has Hopper's."""
        return figures.get(self.family, figures["hopper"])

    def flops(self, dtype: str) -> float:
        return {"fp32": self.flops_fp32, "tf32": self.flops_tf32}.get(dtype, self.flops_16bit)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 39.4, 312e12, 19.5e12, 156e12, 1.555e12, 300e9, 25e9, 8192, 32e9, 1024),
        Gpu("a100-80", 79.1, 312e12, 19.5e12, 156e12, 2.039e12, 300e9, 25e9, 8192, 32e9, 2048),
        Gpu("h100-80", 79.1, 989e12, 67e12, 494.5e12, 3.35e12, 450e9, 50e9, 16384, 64e9, 2048),
        Gpu("h800-80", 79.1, 989e12, 67e12, 494.5e12, 3.35e12, 200e9, 50e9, 16384, 64e9, 2048),
        Gpu("h200-141", 139.8, 989e12, 67e12, 494.5e12, 4.8e12, 450e9, 50e9, 16384, 64e9, 2048),
        Gpu("h20-96", 95.0, 148e12, 44e12, 74e12, 4.0e12, 450e9, 50e9, 16384, 64e9, 2048, "h20"),
        Gpu("b200-180", 178.3, 2250e12, 75e12, 1125e12, 8.0e12, 900e9, 50e9, 16384, 64e9, 2048, "blackwell"),
        # A node is a tray of 4 GPUs with two Grace processors of 480 GB; two GPUs share the 450 GB/s of NVLink-C2C.
        Gpu("gb200-186", 184.3, 2500e12, 80e12, 1250e12, 8.0e12, 900e9, 50e9, 16384, 225e9, 894, "blackwell", 72),
    )
}

# Memory
CONTEXT_GIB = 0.8  # of a process on a GPU: CUDA, kernels, cuBLAS's workspaces (32 MiB a handle on Hopper)
GROUP_GIB = 0.25  # NCCL's buffers of a process group: channels of 4 MiB to its peers
EXCHANGE_GIB = 0.2
"""Of an engine of several GPUs: 64 MiB of symmetric memory (`SYMM_MEM_ALL_REDUCE_MAX_SIZES` of vLLM 0.30's
all_reduce_utils.py), twice 8 MiB of `CustomAllreduce`, and the workspace of FlashInfer's all-reduce."""
FLASHINFER_GIB = {"hopper": 0.0, "blackwell": 394 / 1024}
"""`VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE` of vLLM 0.30's envs.py: its attention is FlashInfer's on Blackwell."""
ALLOCATOR = (0.034, 0.05, 0.078)
"""Share of the learner's peak that the caching allocator holds on top of it: least, middle, most on an H200
(docs/gpu.md)."""
GRAPHS_GIB = 1.0  # CUDA graphs of a vLLM engine; they stay while it sleeps
EXPERT_IMBALANCE = 1.25  # tokens of the busiest expert-parallel rank over the mean, if there are several
MOST_UTILIZATION = 0.85  # largest share that the search gives an engine beside a learner; the rest is reserve
PROCESS_GIB = 8.0  # host memory of a rank: Python, CUDA, vLLM, the data set

# Speed. The fitted figures are those of `python -m tools.dev.published`, which fits them to what others measured.
DECODE_BANDWIDTH = 0.9  # share of memory bandwidth of decoding
DECODE_LAYER_S = {"hopper": 60e-6, "blackwell": 72e-6}  # fitted: a layer in a decoding step with CUDA graphs
DECODE_EXCHANGE_S = {"hopper": 39e-6, "blackwell": 81e-6}  # fitted: more of a layer, if an engine has several GPUs
ACROSS_NODES = 5.0  # such exchanges between nodes over those in a node
ROUNDED_LAYER_S = 115e-6  # fitted: more of a layer of weights in fp8
SERVED_S = 62e-6  # fitted: a sequence in a decoding step of a server that streams its tokens over HTTP
SAMPLED_S = 20e-6  # the same of an engine in the learner's process (Qwen3-8B on one H100, vLLM 0.30)
EAGER_LAYER_S = 650e-6  # a layer without CUDA graphs (verl on H20)
PREFILL_MFU = {False: 0.45, True: 0.25}  # by "is it an MoE?": share of the peak rate of an engine's prefill
LEARNER_SHARE = {"hopper": 0.36, "h20": 0.5, "blackwell": 0.3}
"""Share of the peak rate of the learner's products. Each is set by the published runs whose passes are products alone:
hopper: automodel-30b-8h100 and nemo04-32b-32h100-sync; h20: verl-30b-32h20-learner; blackwell:
nemo05-32b-16gb200-sync."""
LAYER_HOST_S = {"dense": 0.6e-3, "flex": 2e-3, "alltoall": 6e-3, "allgather": 6e-3}
"""Host seconds of a layer's forward pass over a microbatch, by how tokens get to experts: launches, and the wait for
the number of tokens of each expert. A backward pass takes twice as long. The longer of host and products counts.
alltoall is set by nemo06-30b-32h100-sync, nemo04-30b-32h100-sync and nemo05-30b-32gb200-async, flex by
relax-30b-8h800-cp2; dense is an upper bound (no published run waits for it), allgather that of alltoall."""
EXPERT_WAIT = 1.3  # time of the busiest expert-parallel rank over the mean, with routes that nobody balances
REFIT_S = {False: 0.5, True: 4.0}  # by "is the engine beside the learner?": fixed part of a weight update
SWITCH_S = 3.0  # fixed part of sleep or wake of an engine beside the learner
HOST_LINK = 0.3  # share of a bus's rate of copies to and from the host while all GPUs of a node copy
PRODUCT_SHARE = 0.7  # share of the peak rate of large products alone, to which a measured rate is compared
COPY_SHARE = 0.9  # the same of memory bandwidth and large copies
DECODE_FLOPS = 0.5  # share of the peak rate of large decoding batches
LINK = 0.7  # share of a link's rate that collectives reach
EXACT_EAGER_S = 20e-3  # a step of the exact engine without graphs
ALLREDUCE_S = 12e-6  # latency of one small all-reduce over NVLink
ERRORS = {
    "generate": 1.35,
    "old_logprobs": 1.6,
    "update": 1.5,
    "optimizer": 2.0,
    "refit": 2.0,
    "switch": 2.0,
    "offload": 2.0,
    "scores": 1.6,
    "second_models": 1.6,
    "teachers": 1.6,
    "acceptance": 1.5,
}
"""Factor by which a phase may be off either way: about that of 8 of 10 published phases, whose ratios
`python -m tools.dev.published` prints. generate: 1.09 and 1.49, and up to 1.33 of steps that are mostly generation;
old_logprobs: 1.38 and 1.67; update: 1.0 to 1.6 of five learners, and two beyond; refit: 1.2 to 1.6 of five, and one
beyond. optimizer, switch and offload are published in sums alone, which differ by up to 3: they have refit's. scores,
second_models and teachers are passes as old_logprobs is, acceptance mostly generation with a pass."""
# Of exact mode's kernels on an H200 (docs/gpu.md), in the small tile of decoding: dense products and those of experts.
EXACT_BANDWIDTH = {"dense": 0.47, "experts": 0.37}  # share of memory bandwidth with few rows: 64, and 4 an expert
EXACT_FLOPS = {  # share of the peak rate with many rows, by bytes of an element
    2: {"dense": 0.3, "experts": 0.11},
    4: {"dense": 0.21, "experts": 0.19},
}
EXACT_CACHE = 0.5  # share of memory bandwidth of attention
KERNEL_S = 2.5e-6  # overhead of a kernel in a graph: launch and tail
DISK = 2e9  # bytes/s that a node writes to the file system of its checkpoints
HASH = 1.8e9  # bytes/s of SHA-256 on one core with SHA instructions
TENSOR_OVERHEAD_S = 500e-6  # per tensor of a weight update: gathering, naming, loading
EXPERT_OVERHEAD_S = 40e-6  # the same per matrix of an expert; they are loaded in stacks
ADAM_BYTES = 30  # read and written per weight of the shard: gradient, master, two moments, weight

# Workload, if neither recipe nor command line sets it
SPREAD = 0.8  # sigma of the logarithm of lengths of responses, cut at the longest allowed
RESPONSE_SHARE = 0.5  # mean response over the longest allowed
PROMPT_SHARE = 0.125  # mean prompt over the longest allowed
REFILL_ROUNDS = 1.5  # rounds of sampling in a step that replaces uninformative groups, at most `max_generations`


class Rates(Section):
    """Of dense matrices, in TFLOP/s."""

    bf16: PositiveFloat | None = None
    """Also of fp16."""
    tf32: PositiveFloat | None = None
    fp32: PositiveFloat | None = None

    def flops(self) -> dict[str, float]:
        """Return the rates that are given, under the names of `Gpu`'s fields."""
        fields = {"flops_16bit": self.bf16, "flops_tf32": self.tf32, "flops_fp32": self.fp32}
        return {field: 1e12 * rate for field, rate in fields.items() if rate is not None}


class Figures(Section):
    tflops: Rates = Rates()
    memory_tb_s: PositiveFloat | None = None
    nvlink_gb_s: PositiveFloat | None = None
    network_gb_s: PositiveFloat | None = None


class Measured(Figures):
    """What was measured on a node; each replaces the peak of which such a measurement reaches a known share."""

    attention_tflops: PositiveFloat | None = None
    """Causal attention, in the one type of `tflops`."""
    source: Any = None


class GpuFile(Figures):
    """A file of `--gpu`."""

    name: str | None = Field(None, min_length=1)
    base: Literal[tuple(GPUS)] | None = None
    memory_gib: PositiveFloat | None = None
    host_link_gb_s: PositiveFloat | None = None
    host_memory_gib: PositiveFloat | None = None
    batched_tokens: PositiveInt | None = None
    nvlink_gpus: PositiveInt | None = None
    measured: Measured = Measured()


FIELDS = {
    "memory_gib": ("memory_gib", 1),
    "memory_tb_s": ("bandwidth", 1e12),
    "nvlink_gb_s": ("nvlink", 1e9),
    "network_gb_s": ("network", 1e9),
    "host_link_gb_s": ("host_link", 1e9),
    "host_memory_gib": ("host_gib", 1),
    "batched_tokens": ("batched_tokens", 1),
    "nvlink_gpus": ("nvlink_gpus", 1),
}
"""Key → field of `Gpu`, and units of the field in one of the key."""
OPTIONAL = {"batched_tokens": 16384, "nvlink_gpus": 0}  # what counts without a base
SHARES = {"memory_tb_s": COPY_SHARE, "nvlink_gb_s": LINK, "network_gb_s": LINK}  # of the peak, of what was measured
TOLD = {"memory_tb_s": "copies in memory", "nvlink_gb_s": "links in a node", "network_gb_s": "links between nodes"}


def find_gpu(text: str) -> Gpu:
    """Return the GPU of this name, or that of a file. Raises `InputError` for a file that cannot be used."""
    return GPUS[text] if text in GPUS else read_gpu(Path(text))


def read_gpu(path: Path) -> Gpu:
    """Return the GPU that ``path`` (YAML or JSON) describes. A measured figure replaces the assumed one."""
    try:
        file = GpuFile.model_validate(read_yaml(path, "GPU"))
    except ValidationError as error:
        raise InputError(f"GPU {path}:\n" + explain(error, GpuFile)) from error
    given = {key: value for key in FIELDS if (value := getattr(file, key)) is not None}
    own = {FIELDS[key][0]: value * FIELDS[key][1] for key, value in given.items()} | file.tflops.flops()
    name = file.name or path.stem
    if file.base is not None:
        return _with_measured(path, file.measured, replace(GPUS[file.base], name=name, **own))
    missing = [key for key in FIELDS if key not in given and key not in OPTIONAL]
    missing += [] if len(file.tflops.flops()) == 3 else ["tflops: {bf16, tf32, fp32}"]
    if missing:
        raise InputError(
            f"GPU {path}: {', '.join(missing)}: missing; give them, or `base: NAME`, one of {', '.join(GPUS)}, whose "
            "figures then count where the file has none"
        )
    return _with_measured(
        path, file.measured, Gpu(name=name, **{k: v for k, v in OPTIONAL.items() if k not in own} | own)
    )


def _with_measured(path: Path, measured: Measured, gpu: Gpu) -> Gpu:
    """Return ``gpu`` with peaks that give what was measured. A share of the peak is assumed of each measurement."""
    rates = measured.tflops.flops()
    changes, sentences = {field: rate / PRODUCT_SHARE for field, rate in rates.items()}, []
    for dtype, rate in measured.tflops.model_dump(exclude_none=True).items():
        sentences.append(f"products in {dtype} {rate:.4g} TFLOP/s (counted as {PRODUCT_SHARE:.0%} of the peak)")
    if measured.attention_tflops is not None:
        if len(rates) != 1:
            raise InputError(
                f"GPU {path}: measured.attention_tflops: {measured.attention_tflops}, but measured.tflops has "
                f"{len(rates)} types; give one, that in which attention was measured"
            )
        changes["attention_cost"] = next(iter(rates.values())) / 1e12 / measured.attention_tflops
        sentences.append(f"attention {measured.attention_tflops:.4g} TFLOP/s")
    for key, share in SHARES.items():
        if (value := getattr(measured, key)) is not None:
            field, unit = FIELDS[key]
            changes[field] = value * unit / share
            sentences.append(f"{TOLD[key]} {value * unit / 1e9:.4g} GB/s (counted as {share:.0%} of the peak)")
    return replace(gpu, measured=tuple(sentences), **changes)
