"""Ranks of two "nodes" that fetch from the same made-up servers: rank 0, and rank 2 whose LOCAL_RANK is 0, too."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.process.ranks import world_rank
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.requests import everywhere
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.servers.pool import read_table
from megatron_rl.rollout.servers.rendezvous import discover
from megatron_rl.types import Group, Prompt
from tests.support.tiny import MODEL

FIELDS = ("tokens", "inference_logprobs", "policy_versions", "routed_experts", "route_checksums")


def prompts(number: int, name: str = "p", slow: tuple[int, ...] = ()) -> list[Prompt]:
    return [Prompt(f"{'slow-' if i in slow else ''}{name}{i}", [1, 2 + i], "") for i in range(number)]


def seen(groups: list[Group]) -> dict[str, Any]:
    """What this rank knows, and what all know together."""
    flat = [rollout for group in groups for rollout in group.rollouts]
    about = [(r.id, r.length, r.finish_reason, r.owner) for r in flat]
    here = [number for number, r in enumerate(flat) if r.tokens is not None]
    texts = [r.text for r in flat]
    whole = [r for group in everywhere(groups) for r in group.rollouts]
    arrays = {name: [getattr(r, name) for r in whole] for name in FIELDS}
    return {"about": about, "here": here, "texts": texts, "arrays": arrays}


def fetch(run_dir: str, local_ranks: list[int], config: dict[str, Any]) -> dict[str, Any]:
    """The scenes of test_servers.py, in order, with one generator."""
    os.environ["LOCAL_RANK"] = str(local_ranks[world_rank()])
    said: list[str] = []
    generator = ServerGenerator(
        RolloutConfig.model_validate(config),
        MODEL,
        max_prompt_length=16,
        run_dir=Path(run_dir),
        record_routes=True,
        decode=lambda tokens: f"{len(tokens)} tokens",
        say=said.append,
    )
    result: dict[str, Any] = {"fetchers": generator._servers.fetchers}
    try:
        result["first"] = seen(generator.rollout(prompts(7), 3, policy_version=0, step=0))
        result["none for some"] = seen(generator.rollout(prompts(1), 1, policy_version=0, step=0))
        generator.refit(HFFolder(MODEL).items(), 1)
        # Prompts of rank 0 are there at once; weights must wait for the slow ones of the rank that follows it.
        begun = generator.begin(prompts(4, slow=(1, 3)), 2, policy_version=1, step=1)
        generator.refit(HFFolder(MODEL).items(), 2)
        later = generator.begin(prompts(4), 2, policy_version=2, step=2)
        result["begun"], result["later"] = (seen(generator.finish(ticket)) for ticket in (begun, later))
        generator.refit(HFFolder(MODEL).items(), 3)
        result["after the update"] = seen(generator.rollout(prompts(4), 2, policy_version=3, step=11))
        result["requeued before"] = generator.stats()["rollout/requeued"]
        begun = generator.begin(prompts(8, slow=range(8)), 2, policy_version=3, step=3)
        if world_rank() == 0:
            os.kill(discover(generator._config.servers, Path(run_dir))[0].pid, signal.SIGKILL)
        result["killed"] = seen(generator.finish(begun))
        result["requeued"] = generator.stats()["rollout/requeued"]
        result["after"] = seen(generator.rollout(prompts(4), 2, policy_version=3, step=4))
        begun = generator.begin(prompts(4, slow=range(4)), 2, policy_version=3, step=5)
        if world_rank() == 0:
            generator._servers.pool._limits.wait_s = 2.0  # of what is waited for in vain
            os.kill(discover(generator._config.servers, Path(run_dir))[1].pid, signal.SIGKILL)
        try:
            generator.finish(begun)
        except RolloutError as error:
            result["error"] = str(error)
    finally:
        generator.close()
    return result | {"said": said, "stats": generator.stats(), "table": read_table(Path(run_dir))}


def equal(left: dict[str, list], right: dict[str, list]) -> bool:
    return all(np.array_equal(a, b) for name in FIELDS for a, b in zip(left[name], right[name], strict=True))
