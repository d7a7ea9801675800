"""`rollout.servers`: vLLM servers as rollout engines, for `rollout.engine: vllm_server`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.base import AnyPath, LookedUp, OffCount, Section

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
    """A response, or a weight update of one server, that takes longer is given up; the response is asked for again."""
    retries: NonNegativeInt = 3
    """How often a response that failed is asked for again before the run ends with an error."""
    concurrency: PositiveInt | None = None
    """Most requests in flight to one server. null: rollout.max_num_seqs."""
    health_every_s: PositiveFloat = 5.0
    """Seconds between looks at every server's health and for new servers; three looks without an answer and a server
    counts as lost."""
    token_file: Annotated[AnyPath | None, LookedUp()] = None
    """File (mode 600) with the token that servers ask for. null: the environment variable MRL_SERVER_TOKEN; with
    `launch`, a random one if that is not set."""
    weights: Literal["broadcast", "files"] = "files"
    """How weights reach servers. `broadcast`: straight from the learner's memory, over NCCL, or gloo on a CPU; servers
    have to reach ports of the learner's first node. Where no group can be formed the log says so, and weights go
    through files. `files`: through `weights_dir`."""
    weights_stall_s: PositiveFloat = 60.0
    """A broadcast in which nothing moves for this long is given up."""
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
