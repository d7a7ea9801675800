"""Two ranks, each the first of its "node", that ask the same real servers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.process.ranks import any_rank, world_rank
from megatron_rl.rollout import Sampling
from megatron_rl.rollout.requests import everywhere
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.types import Prompt

Batch = tuple[list[Prompt], int]


def fetch(
    run_dir: str,
    config: dict[str, Any],
    models: list[Path],
    max_prompt_length: int,
    calm: Batch,
    hard: Batch,
    sampling: Sampling,
) -> dict[str, Any]:
    """Responses to ``calm`` by ``sampling``, then to ``hard`` while weights change and a server dies.

    Batches are prompts and a step. Weights 0 are those that the servers started from.
    """
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    generator = ServerGenerator(
        RolloutConfig.model_validate(config),
        models[0],
        max_prompt_length=max_prompt_length,
        run_dir=Path(run_dir),
        record_routes=True,
        say=lambda text: None,
    )
    try:
        first = generator.rollout(calm[0], 2, policy_version=0, step=calm[1], sampling=sampling)
        ticket = generator.begin(hard[0], 2, policy_version=0, step=hard[1])
        if generator._overlaps:  # else they would wait for the batch
            generator.refit(HFFolder(models[1]).items(), 1)
        if world_rank() == 0:
            victim = generator._servers.pool.ready[0]
            os.kill(victim.address.pid, signal.SIGKILL)
        second = generator.finish(ticket)
        return {
            "fetchers": generator._servers.fetchers,
            "owners": [rollout.owner for group in first for rollout in group.rollouts],
            "calm": everywhere(first),
            "hard": everywhere(second),
        }
    finally:
        any_rank(False)  # rank 0 ends last
        generator.close()
