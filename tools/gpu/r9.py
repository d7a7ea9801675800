"""R9, two servers and a learner by NCCL on one GPU: weights change while responses are under way, and a server dies.

Every token's log-prob and route is compared with what Hugging Face's model has by the version that the token is said to
be of (`tests/e2e/in_flight.py`).
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu.run import Problem, Run

PLANTS = ("old_weights",)
LENGTH, PROMPTS, SAMPLES = 120, 3, 2
MOST_UPDATES = 6
MOST_S, MOST_REHEARSED_S, BACK = 210.0, 500.0, 0.6  # of a mode, and the share of it for another server to start


def main(run: Run) -> None:
    for mode in ("keep",) if run.rehearse else ("keep", "abort_and_resume"):
        found: dict[str, Any] = {}
        for scene in SCENES:
            run.part(f"{scene}, {mode}", partial(judge, run, mode, scene, found))


def judge(run: Run, mode: str, scene: str, found: dict[str, Any]) -> dict[str, Any]:
    if not found:
        values = {"device": run.device, "folder": str(run.folder), "mode": mode}
        values["seconds"] = seconds = MOST_REHEARSED_S if run.rehearse else MOST_S
        found |= run.ranks(1, {"serve": ("tools.gpu.r9.serve", values)}, seconds).whole()[0]["serve"]
    if problem := found[scene].get("problem"):
        raise Problem(problem)
    return found[scene]


class Trainer:
    """Servers, and two learners whose weights take turns under rising versions."""

    def __init__(self, device: str, folder: Path, mode: str, seconds: float) -> None:
        import yaml

        from megatron_rl.config import Recipe
        from megatron_rl.learner.learner import Learner
        from megatron_rl.rollout.servers import run_servers
        from tests.e2e import in_flight
        from tests.support.forked_servers import ForkedServers
        from tests.support.tiny import tiny_recipe

        if device == "cpu":  # which imports once for all of them
            run_servers.LocalServers = ForkedServers

        self.models = in_flight.two_models(folder / mode)
        runtime = {"device": device}
        self.learners = [Learner(tiny_recipe(model={"path": str(path)}, runtime=runtime)) for path in self.models]
        servers = {"launch": 2, "weights": "broadcast"}
        more = {"servers": servers, "in_flight": {"mode": mode}, "gpu_memory_utilization": 0.3, "enforce_eager": True}
        recipe, file = in_flight.served_recipe(folder / f"served-{mode}", LENGTH, **more)
        recipe = Recipe.model_validate(recipe.model_dump() | {"runtime": recipe.runtime.model_dump() | runtime})
        file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        self.generator = in_flight.generator_on(file.parent, recipe, mode, file, **servers)
        self.generator.version, self.asked, self.patience_s = 0, 0, BACK * seconds

    @property
    def pool(self) -> Any:
        return self.generator._servers.pool

    def update(self) -> None:
        from megatron_rl.run.engines import LearnerWeights
        from tests.e2e.in_flight import wait

        self.generator.version = version = self.generator.version + 1
        self.generator.refit(LearnerWeights(self.learners[version % 2]), version)
        wait(self.generator, lambda: self.pool.weights.version == version and bool(self.pool.ready))
        if self.generator._updates.broadcaster.refused:
            raise AssertionError(f"no broadcast: {self.generator._updates.broadcaster.refused}")

    def begin(self) -> Any:
        from tests.e2e.in_flight import prompts

        self.asked += 1
        version = self.generator.version
        return self.generator.begin(prompts(PROMPTS, self.asked), SAMPLES, policy_version=version, step=0)

    def finish(self, ticket: Any) -> dict[str, Any]:
        """Every token is as said."""
        from tests.e2e.in_flight import assert_sampled_as_said, flat, runs_of

        groups = self.generator.finish(ticket)
        responses = [rollout for _, rollout in flat(groups)]
        assert [r.length for r in responses] == [LENGTH] * PROMPTS * SAMPLES, "responses are missing"
        assert_sampled_as_said(self.generator, self.models, groups)
        return {"responses": len(responses), "versions of a response": max(len(runs_of(r)) for r in responses)}


def in_flight_update(trainer: Trainer) -> dict[str, Any]:
    """Weights arrive while responses are sampled."""
    for _ in range(10):
        ticket, updates = trainer.begin(), 0
        while updates < MOST_UPDATES and not ticket.answers.done():
            trainer.update()
            updates += 1
        found = trainer.finish(ticket)
        if found["versions of a response"] > 1:
            return found | {"updates": updates, "refit_s": trainer.generator.stats()["perf/refit_engine_s"]}
    raise AssertionError("no response has tokens of two policies")


def killed_server(trainer: Trainer) -> dict[str, Any]:
    """The other server takes its responses over; a new one starts and gets the weights that are current then."""
    ticket, start = trainer.begin(), time.monotonic()
    victim = next(iter(trainer.pool.ready))
    os.kill(victim.client.address.pid, signal.SIGKILL)
    found = trainer.finish(ticket) | {"requests sent again": trainer.generator.stats()["rollout/requeued"]}
    assert found["requests sent again"] > 0, "nobody noticed that a server was killed"
    while len(trainer.pool.ready) < 2:
        assert time.monotonic() - start < trainer.patience_s, f"no server came back in {trainer.patience_s:g} s"
        trainer.generator.finish(trainer.begin())
        trainer.update()  # it gets these weights, or those of before while the learner waited for responses
    return found | trainer.finish(trainer.begin()) | {"back after_s": round(time.monotonic() - start, 1)}


SCENES: dict[str, Callable[[Trainer], dict[str, Any]]] = {
    "updates in flight": in_flight_update,
    "a server is killed": killed_server,
}


def serve(device: str, folder: str, mode: str, seconds: float) -> dict[str, Any]:
    from tests.e2e.in_flight import recorded_legs

    trainer, found = Trainer(device, Path(folder), mode, seconds), {}
    with recorded_legs():
        for name, scene in SCENES.items():
            try:
                found[name] = scene(trainer)
            except AssertionError:
                found[name] = {"problem": traceback.format_exc()}
    trainer.generator.close()
    return found
