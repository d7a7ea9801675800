"""A real server of two workers (`rollout.tensor_parallel: 2`): what it samples while weights are broadcast to both, and
what happens when one of them dies."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.in_flight import (
    assert_sampled_as_said,
    flat,
    generator_on,
    prompts,
    served_recipe,
    two_models,
    update,
    wait,
)

LENGTH = 48


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(server: int) -> list[int]:
    """Processes below the engine's that are vLLM's workers."""
    below = [child for engine in children(server) for child in children(engine)]
    return [pid for pid in below if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "dies", "num_prompts"),
    [("broadcast", False, 4), ("files", True, 32)],  # 32: eight times what the engine holds; most wait when it dies
    ids=["weights for both workers", "a worker dies"],
)
def test_a_server_of_two_workers_costs_no_response(tmp_path, weights, dies, num_prompts):
    """The only server of its run: with `broadcast` nobody could give its successor the weights."""
    models, run_dir = two_models(tmp_path), tmp_path / "served"
    recipe, file = served_recipe(run_dir, LENGTH, tensor_parallel=2)
    generator = generator_on(run_dir, recipe, "keep", file, launch=1, weights=weights)
    try:
        pool = generator._servers.pool
        (member,) = pool.ready
        assert member.workers == 2
        ticket = generator.begin(prompts(num_prompts, dies), 2, policy_version=generator.version, step=0)
        wait(generator, lambda: pool.ready[0].in_flight > 0)
        update(generator, models)
        if dies:
            workers = workers_of(member.address.pid)
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            wait(generator, lambda: bool(member.lost))
        groups = generator.finish(ticket)
        got = [(rollout.length, rollout.sample) for _, rollout in flat(groups)]
        assert got == [(LENGTH, 0), (LENGTH, 1)] * num_prompts
        assert_sampled_as_said(generator, models, groups)
        (last,) = pool.ready  # without a newcomer those that waited would not be there
        assert (last.number, last.workers, last.version) == (1 + dies, 2, generator.version)
    finally:
        generator.close()
