"""The sections `rollout` (how responses are sampled, what the engine may use) and `exact` (`rollout.engine: exact`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.base import FUNCTION_PATH, AnyPath, Dtype, LookedUp, OffCount, Section, Short

# What the rollout engine rounds beyond its dtype: the section `rollout.quantization`, see docs/precision.md.


WeightType = Literal["fp8", "int8", "int4"]
Block = tuple[int | None, int | None]

OWN_BLOCK: dict[str, Block] = {"fp8": (128, 128), "int8": (1, None), "int4": (1, 128)}
"""Rows and columns that share a scale where the recipe does not say."""
ON_CUDA: dict[Block, str] = {(128, 128): "fp8_per_block", (1, None): "fp8_per_channel", (None, None): "fp8_per_tensor"}
"""What vLLM 0.30 rounds by itself while it loads, in all linear layers and experts: block of fp8 → its name."""


class QuantizationConfig(Section):
    weights: WeightType | None = None
    """Type that weights of linear layers and experts are rounded to; embeddings, head, routers and norms keep `dtype`.
    null: none. int8 and int4: on a CPU only, which computes with the rounded numbers in `dtype`."""
    block: Annotated[list[PositiveInt | None], Field(min_length=2, max_length=2)] | None = None
    """Outputs and inputs of a weight that share a scale; null in it: all of them. null: [128, 128] for fp8, [1, null]
    for int8, [1, 128] for int4. On CUDA fp8 has [128, 128], [1, null] and [null, null]."""
    kv_cache: Literal["fp8"] | None = None
    """Type of keys and values in the cache, e4m3 with scale 1. null: `dtype`."""

    @property
    def of_weights(self) -> Block:
        """The recipe's ``block``, or the default of the type."""
        if self.block is not None:
            return self.block[0], self.block[1]
        return OWN_BLOCK[self.weights or "fp8"]

    @property
    def words(self) -> str:
        """How the weights are rounded, in words for the precision contract."""
        return in_words(self.weights, self.of_weights) if self.weights else "off"

    @model_validator(mode="after")
    def _block_is_of_something(self) -> QuantizationConfig:
        if self.block is not None and self.weights is None:
            raise ValueError(
                f"block: {self.block}, but weights is null and nothing is rounded; set weights or leave it"
            )
        return self


def in_words(weights: str, block: Block) -> str:
    """Type and block, as the precision contract names them."""
    return f"{weights} [{', '.join(str(size or 'all') for size in block)}]"


# `rollout.servers`: vLLM servers as rollout engines, for `rollout.engine: vllm_server`.


TOKEN_VARIABLE = "MRL_SERVER_TOKEN"


class ServersConfig(Section):
    launch: OffCount = 0
    """Servers that `train` itself starts on its own machine and ends with the run, to try it out. 0: none; they are
    started with `megatron-rl serve RECIPE`."""
    addresses: list[str] = []
    """Where servers are, as `http://host:port`. []: they say so themselves, in files in the run directory's
    servers/ folder."""
    count: PositiveInt = 1
    """Servers that must be there before the run begins; with `launch` or `addresses`, as many as these say. Fewer are
    enough afterwards, and further ones are used as they come."""
    wait_s: PositiveFloat = 900.0
    """Seconds to wait for `count` servers at the start, and for one to come back when all are lost, before the run
    ends with an error."""
    request_deadline_s: PositiveFloat = 1800.0
    """A response, or a weight update of one server, that takes longer is given up; the response is asked for again,
    three times at most."""
    health_every_s: PositiveFloat = 5.0
    """Seconds between looks at every server's health and for new servers; three looks without an answer and a server
    counts as lost."""
    weights: Literal["broadcast", "files"] = "files"
    """How weights reach servers. `broadcast`: straight from the learner's memory, over NCCL, or gloo on a CPU; servers
    have to reach ports of the learner's first node. Where no group can be formed the log says so, and weights go
    through files. `files`: through `weights_dir`."""
    weights_dir: AnyPath | None = None
    """Folder that weights in files travel through; the learner's first node and all servers have to see it. The run
    makes a subfolder of its own in it and removes nothing else. On one machine /dev/shm is fastest. A relative path
    counts from the working directory. null: servers/weights in the run directory."""

    @model_validator(mode="after")
    def _one_source(self) -> ServersConfig:
        if self.launch and self.addresses:
            raise ValueError("launch and addresses: set one of the two; launched servers need no address")
        for address in self.addresses:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"addresses: found {address!r}; write http://host:port")
        return self

    @property
    def num_expected(self) -> int:
        """Servers to wait for at the start."""
        return self.launch or len(self.addresses) or self.count


CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_EXPERT_MULTIPLE = 32

MOST_KEPT = 1024
SPARE_CANDIDATES = 16
"""Tokens that may tie with the top_k-th one, which vLLM keeps too."""

InFlightMode = Literal["finish", "abort_and_resume", "keep"]
"""What a weight update does to responses under way: it waits for them, cuts them, or lets them go on."""


class InFlightConfig(Section):
    mode: InFlightMode = "finish"
    """What an update of the servers' weights does to responses that are under way. `finish`: the update waits until
    they are complete. `abort_and_resume`: they are cut, and the new weights continue them, reading what is there anew.
    `keep`: sampling stops for the time of the update and goes on with the new weights and the old ones' keys and
    values. The last two need `max_staleness` of 1 or more; see docs/servers.md."""


class RolloutConfig(Section):
    engine: Literal["vllm", "vllm_server", "exact"] = "vllm"
    """`vllm`: an engine inside every rank, in the learner's own process. `vllm_server`: vLLM servers beside the learner
    or on other nodes, see docs/servers.md. `exact`: the learner's own forward pass with
    batch-invariant computation, the arm without mismatch; slow, see docs/exact.md."""
    dtype: Dtype = "bf16"
    """Dtype of the engine's weights and activations; weights reach it directly in this dtype at every update. fp32 and
    tf32 as in `learner.dtype`."""
    quantization: Annotated[QuantizationConfig, Short("weights", or_null=True)] = QuantizationConfig()
    """What the engine rounds beyond `dtype`: weights, at load and at every update, and its key/value cache. The name of
    a type alone stands for {weights: ...}, null for nothing."""
    num_samples: PositiveInt = 8
    """Responses sampled to each prompt: the group size G."""
    max_response_length: PositiveInt = 1024
    """Longest response in tokens, the stop token included. What reaches it without stopping counts as truncated."""
    temperature: float = Field(1.0, ge=0.01, le=2)
    """Sampling temperature; vLLM raises anything below 0.01 to 0.01 and refuses more than 2. Log-probs are those of the
    distribution after temperature, top-p and top-k."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities reach this sum. 1: from all."""
    top_k: OffCount = 0
    """Sample from this many most probable tokens. 0 or null: from all."""
    kept_sets: bool = False
    """true: the engine returns with each token the set that top-k and top-p kept, and the learner's softmax is over the
    same set, so that mu and pi are distributions over it. Needs `top_k` of 1 to 1024; engine `vllm` only."""
    sampled_head: OffCount = 0
    """k: with each token come the k tokens that were most probable there, and their log mu, for
    `objective.score_centering`; at most 1024. 128 in arXiv 2609.20807, where 32 did as well. With `kept_sets` the head
    is the kept set, and k has to be `top_k`. 0 or null: none."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Tokens that end a response and stay in it. null: `eos_token_id` of the checkpoint's generation_config.json.
    []: only `max_response_length` ends one."""
    function: Annotated[str | None, Field(pattern=FUNCTION_PATH), LookedUp(is_function=True)] = None
    """`file.py:function`, an `async def f(client, problem)` that holds a conversation of several turns and returns it;
    see docs/turns.md. null: one turn. Engines `vllm`, without `tensor_parallel`, and `vllm_server`."""
    seed: NonNegativeInt = 0
    """Every response is drawn from (seed, step, prompt id, sample number), whichever engine and batch it falls to."""
    max_num_seqs: PositiveInt = 256
    """Most responses that one engine works on at a time."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens that one step of an engine computes: of new prompts, and one of each running response. More read
    prompts faster, and take memory for activations. null: vLLM's own choice."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share one engine. The other ranks have engines of their own, and prompts are dealt out to all."""
    all_reduce: Literal["custom", "nccl"] = "custom"
    """What adds up the parts of an engine's ranks on GPUs. `custom`: vLLM's own kernel for up to 8 MiB on GPUs that
    reach each other's memory, else NCCL. `nccl`: NCCL alone. See docs/precision.md."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory of one engine's key/value cache in GiB. null: 0.25 on a CPU, else what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that the engine may fill when `kv_cache_gib` is null; no effect on a CPU."""
    enforce_eager: bool | None = None
    """Run without compilation and CUDA graphs. null: true on a CPU, where compiling takes half a minute at every start,
    wants a C++ compiler and makes generation a tenth faster; else false."""
    deadline_s: PositiveFloat | None = 3600.0
    """A rollout phase that takes longer than this many seconds ends the run with an error. null: no limit."""
    verify_refit: bool = True
    """At start, send the engine the checkpoint it has just loaded as a weight update and require every stored
    parameter to stay the same bit for bit. Costs one more read of the checkpoint; finds engine builds that
    corrupt weights on updates."""

    max_staleness: OffCount = 0
    """How many steps generation may run ahead of the learner. 0: synchronous, every batch is sampled from the weights
    that it updates. k ≥ 1 (engine `vllm_server` only): while the learner works on a step, the batches of the next k are
    sampled, from weights that are up to k steps old when their batch is learned from."""
    in_flight: InFlightConfig = InFlightConfig()
    """Responses that are under way when weights change."""
    servers: ServersConfig = ServersConfig()
    """The servers of engine `vllm_server`."""

    @property
    def candidates(self) -> int:
        """Most tokens of a kept set that the engine returns; 0 without `kept_sets`."""
        return (self.top_k or 0) + SPARE_CANDIDATES if self.kept_sets else 0

    @property
    def hang_limit_s(self) -> float | None:
        """Beyond this a step of the engine does not return: `deadline_s` is looked at between steps."""
        return None if self.deadline_s is None else 1.25 * self.deadline_s + 2.0

    @property
    def why_files(self) -> str:
        """Why weights go to servers through files from the start; "" where they are broadcast."""
        if self.servers.weights == "files":
            return "rollout.servers.weights: files"
        if self.max_staleness > 1 and self.in_flight.mode == "finish":
            return (
                f"rollout.max_staleness {self.max_staleness} under rollout.in_flight.mode finish: weights wait behind "
                "batches that the learner does not wait for"
            )
        return ""

    @model_validator(mode="after")
    def _function_is_served(self) -> RolloutConfig:
        if self.function is None:
            return self
        named = f"function: {self.function}"
        if self.engine == "exact":
            raise ValueError(
                f"{named} with engine: exact; conversations of several turns need engine: vllm or vllm_server, or set "
                "function: null"
            )
        if self.tensor_parallel > 1 and self.engine == "vllm":
            raise ValueError(
                f"{named} with tensor_parallel: {self.tensor_parallel}, whose ranks would each call it; use "
                "tensor_parallel: 1, or function: null"
            )
        if self.kept_sets:
            raise ValueError(
                f"{named} with kept_sets: true: tokens that the policy did not sample have no set; use kept_sets: "
                "false, or function: null"
            )
        return self

    @model_validator(mode="after")
    def _sets_are_known(self) -> RolloutConfig:
        if not self.kept_sets:
            return self
        if not 0 < (self.top_k or 0) <= MOST_KEPT:
            raise ValueError(
                f"kept_sets: true needs top_k of 1 to {MOST_KEPT}, found {self.top_k}: it bounds what comes with each "
                "token; set one that seldom cuts what top_p keeps (100), or kept_sets: false"
            )
        if self.engine != "vllm":
            raise ValueError(f"kept_sets: true, but engine {self.engine} returns no sets; use engine: vllm")
        return self

    @model_validator(mode="after")
    def _head_is_known(self) -> RolloutConfig:
        head = self.sampled_head
        if not head:
            return self
        named = f"sampled_head: {head}"
        if head > MOST_KEPT:
            raise ValueError(f"{named}: at most {MOST_KEPT} are returned; 128 is what the paper takes")
        if self.function is not None:
            raise ValueError(
                f"{named} with function: {self.function}: conversations carry no heads; use function: null, or "
                "sampled_head: 0"
            )
        if self.kept_sets and head != self.top_k:
            raise ValueError(
                f"{named} with kept_sets: true, whose head is the set that top_k: {self.top_k} keeps; use "
                f"sampled_head: {self.top_k}"
            )
        if not self.kept_sets and (self.top_p < 1 or self.top_k):
            raise ValueError(
                f"{named} with top_p: {self.top_p:g}, top_k: {self.top_k}, which cut the tail off mu but not off pi; "
                "use top_p: 1 and top_k: 0, or kept_sets: true"
            )
        return self

    @model_validator(mode="after")
    def _ahead_of_the_learner(self) -> RolloutConfig:
        if self.max_staleness and self.engine != "vllm_server":
            raise ValueError(
                f"max_staleness: {self.max_staleness}, but engine `{self.engine}` works in the learner's own process "
                "and cannot sample while it learns; use 0, or engine: vllm_server"
            )
        if self.in_flight.mode != "finish" and not self.max_staleness:
            raise ValueError(
                f"in_flight.mode: {self.in_flight.mode}, but with max_staleness: 0 no response is under way when "
                "weights change; use max_staleness: 1 or more, or in_flight.mode: finish"
            )
        return self


NoiseKind = Literal["logits", "frozen", "router", "hidden", "weights", "stale"]
NoiseOperator = Literal["input_norm", "o_proj", "second_norm", "mlp", "output"]
SIZE_OF: dict[str, str] = dict.fromkeys(("logits", "frozen", "router", "hidden"), "std")
SIZE_OF |= {"weights": "bits", "stale": "updates"}
"""The key that says how large a dose of each kind is."""


class NoiseConfig(Section):
    """A dose of mismatch: what makes the sampler's mu differ from the learner's po."""

    kind: NoiseKind = "logits"
    """`logits`: independent Gaussian noise on the sampling logits, of (rollout.seed, step, prompt id, sample
    number, position). `frozen`: Gaussian noise on them that is a fixed function of rollout.seed and the last
    `context` tokens, the same in every step. `router`: on the routers' logits, `hidden`: on what every layer puts
    out, in units of the root mean square of the token's own; both independent, as `logits`, in all layers or in
    `layers`. `weights`: linear layers and experts are rounded to `bits`. `stale`: weights of `updates` optimizer
    steps ago."""
    std: NonNegativeFloat = 0.0
    """Standard deviation, for the kinds `logits`, `frozen`, `router` and `hidden`."""
    context: PositiveInt | None = None
    """How many of the last tokens noise of the kind `frozen` is a function of. null: one."""
    bits: WeightType | None = None
    """Type that the sampler's weights are rounded to, for the kind `weights`; embeddings, head, routers and norms are
    left."""
    block: Annotated[list[PositiveInt | None], Field(min_length=2, max_length=2)] | None = None
    """As `rollout.quantization.block`, for the kind `weights`, on this rank's part of each matrix."""
    updates: NonNegativeInt = 0
    """Age of the sampler's weights in optimizer steps, for the kind `stale`; in a run's first steps the oldest
    there are."""
    layers: Annotated[list[NonNegativeInt] | None, Field(min_length=1)] = None
    """Layers that have the noise, from 0, for the kinds `router` and `hidden`. null: all."""
    operator: NoiseOperator | None = None
    """What in a layer has the noise of the kind `hidden`, under its name in `megatron-rl parity`: the first norm, the
    output projection of attention, the second norm, the MLP or sum of experts, or the layer's output. null: `output`,
    the same."""
    strength: PositiveFloat = 1.0
    """For the kind `weights`: the sampler has w + strength (rounded w - w); at 1 exactly the rounded weights."""
    hold: PositiveFloat | None = None
    """`exact/log_rho_std` that the dose is held at: after each step's rollout `std` (or `strength`) is multiplied by
    (hold / measured)^(1/4), by 1/2 to 2. Its first value is the recipe's. null: the dose stays as it is. Not with kind
    stale."""

    @property
    def quantization(self) -> QuantizationConfig:
        """The rounding that a dose of the kind `weights` applies."""
        return QuantizationConfig(weights=self.bits, block=self.block)

    @model_validator(mode="after")
    def _has_its_own_size(self) -> NoiseConfig:
        wanted = SIZE_OF[self.kind]
        if not getattr(self, wanted):
            raise ValueError(f"kind {self.kind} needs {wanted}, the size of the dose")
        if self.hold is not None and self.kind == "stale":
            raise ValueError(
                f"hold: {self.hold:g} with kind stale, whose size is a whole number of updates; remove hold"
            )
        if self.strength != 1.0 and self.kind != "weights":
            raise ValueError(f"strength: {self.strength:g} has no effect with kind {self.kind}; use std")
        beside = {"weights": {"block"}, "frozen": {"context"}, "router": {"layers"}, "hidden": {"layers", "operator"}}
        for name in ("std", "bits", "updates", "block", "context", "layers", "operator"):
            if getattr(self, name) and name not in {wanted} | beside.get(self.kind, set()):
                raise ValueError(f"{name}: {getattr(self, name)} has no effect with kind {self.kind}; remove it")
        return self


class ExactConfig(Section):
    noise: NoiseConfig | None = None
    """Dose of mismatch on the sampler. mu is what was sampled from and po what the learner computes, so that they
    differ by the dose and by nothing else; the gate compares what is computed without it. null: none. Our instrument,
    not a paper's; docs/exact.md."""
    noise_std: NonNegativeFloat = 0.0
    """Short for `noise: {kind: logits, std: …}`."""
    gate: Literal["all"] | PositiveInt = "all"
    """Sequences that each pass is compared on by the bit check: `all`, or this many, drawn anew in every step from the
    recipe's seed."""

    @property
    def dose(self) -> NoiseConfig | None:
        """The dose that ``noise`` or its short form ``noise_std`` sets."""
        return NoiseConfig(std=self.noise_std) if self.noise_std else self.noise

    @model_validator(mode="after")
    def _one_dose(self) -> ExactConfig:
        if self.noise_std and self.noise is not None:
            raise ValueError(f"noise_std: {self.noise_std:g} beside noise, of which it is the short form; remove one")
        return self
