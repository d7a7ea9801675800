"""The `rollout` section: how responses are sampled and what the engine that samples them may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.base import Dtype, OffCount, Section, Short
from megatron_rl.config.quantization import QuantizationConfig
from megatron_rl.config.servers import ServersConfig

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_EXPERT_MULTIPLE = 32

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
    """Dtype of the engine's weights and activations; weights reach it directly in this dtype at every update."""
    quantization: Annotated[QuantizationConfig, Short("weights", or_null=True)] = QuantizationConfig()
    """What the engine rounds beyond `dtype`: weights, at load and at every update, and its key/value cache. The name of
    a type alone stands for {weights: ...}, null for nothing."""
    num_samples: PositiveInt = 8
    """Responses sampled to each prompt: the group size G."""
    max_response_length: PositiveInt = 1024
    """Longest response in tokens, the stop token included. What reaches it without stopping counts as truncated."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. Log-probs are those of the distribution after temperature, top-p and top-k."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities reach this sum. 1: from all."""
    top_k: OffCount = 0
    """Sample from this many most probable tokens. 0 or null: from all."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Tokens that end a response and stay in it. null: `eos_token_id` of the checkpoint's generation_config.json.
    []: only `max_response_length` ends one."""
    seed: NonNegativeInt = 0
    """Every response is drawn from (seed, step, prompt id, sample number), whichever engine and batch it falls to."""
    max_num_seqs: PositiveInt = 256
    """Most responses that one engine works on at a time."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share one engine. The other ranks have engines of their own, and prompts are dealt out to all."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory of one engine's key/value cache in GiB. null: 0.25 on a CPU, else what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that the engine may fill when `kv_cache_gib` is null; no effect on a CPU."""
    enforce_eager: bool | None = None
    """Run without compilation and CUDA graphs. null: true on a CPU, where compiling takes half a minute at every start,
    wants a C++ compiler and makes generation a tenth faster; else false."""
    enable_prefix_caching: bool = True
    """Reuse the key/value cache of equal beginnings of prompts; it is emptied at every weight update."""
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
