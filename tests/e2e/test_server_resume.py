"""A run whose weights change while responses are under way, killed and stopped in the middle: what continues learns
from the same prompts in the same order, each once, and no token is of weights that the run did not have.

The servers outlive the trainer, and are at work for the one that is killed.
"""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_rl.config import load_recipe
from megatron_rl.rollout.servers.rendezvous import folder, read
from megatron_rl.run.recorded_batches import RecordedBatch, batch_path, load_batch, recorded_steps
from tests.support.forked_servers import ForkedServers
from tests.support.slow import slow_but
from tests.support.tiny import REPOSITORY
from tests.support.zygote import surroundings, zygote

TOKEN = "token-of-the-servers-in-this-test"
RECIPE = REPOSITORY / "recipes" / "tiny" / "servers.yaml"
STEPS, PROMPTS, SAMPLES = 7, 4, 4
SETTINGS = [
    f"num_steps={STEPS}",
    f"batch.prompts={PROMPTS}",
    f"rollout.num_samples={SAMPLES}",
    "rollout.max_staleness=1",
    "rollout.servers.health_every_s=0.5",
    "validation.every=0",
    "monitor.plots=false",
    "recorder.record_batches=all",
    "checkpoint.every=2",
]
# Of each start. At the first fault step 3 is learned from and step 4 being sampled; at the second, steps 4 and 5.
FAULTS = [
    ([{"at": "phase:forward_backward", "call": 4, "do": "kill"}], -signal.SIGKILL),
    ([{"at": "phase:forward_backward", "call": 3, "do": "terminate"}], 0),
    ([], 0),
]
RESUMED_AT = (2, 5)


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> list[str]:
    """Where two servers are, which the runs of all modes use."""
    run_dir = tmp_path_factory.mktemp("servers") / "served"
    run_dir.mkdir()
    recipe = load_recipe(RECIPE, [*SETTINGS, f"name={run_dir.name}", f"run_root={run_dir.parent}"])
    file = run_dir / "recipe.resolved.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    local = ForkedServers(2, file, run_dir, TOKEN)
    try:
        addresses = [None, None]
        while not all(addresses):
            local.check()
            time.sleep(0.05)
            addresses = [read(folder(run_dir) / f"local-{number}.json") for number in range(2)]
        yield [address.url for address in addresses]
    finally:
        local.close()


class Interrupted:
    """A run under ``mode`` that was killed, resumed, stopped, resumed, and is complete."""

    def __init__(self, mode: str, urls: list[str], root: Path) -> None:
        self.run_dir = root / mode
        settings = [*SETTINGS, f"name={mode}", f"run_root={root}", f"rollout.in_flight.mode={mode}"]
        settings += ["rollout.servers.launch=0", f"rollout.servers.addresses={json.dumps(urls)}"]
        arguments = [str(RECIPE), *(part for setting in settings for part in ("--set", setting))]
        self.outputs, self.after, self.ahead = [], [], []  # after each start
        for number, (faults, status) in enumerate(FAULTS):
            child = zygote().start(
                "tests.e2e.programs.interrupted",
                "train",
                {"arguments": arguments, "faults": faults},
                log=root / f"{mode}-{number}.log",
                env=surroundings() | {"MRL_SERVER_TOKEN": TOKEN},
            )
            assert child.wait() == status, child.output[-4000:]
            self.outputs.append(child.output)
            self.after.append(self.batches())
            saved = max((self.run_dir / "checkpoints").glob("step_*")) / "trainer.json"
            self.ahead.append(json.loads(saved.read_text())["ahead"])

    def batches(self) -> dict[int, RecordedBatch]:
        recorded = self.run_dir / "batches"
        return {step: load_batch(batch_path(recorded, step)) for step in recorded_steps(recorded)}

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=slow_but(["keep"], ["abort_and_resume", "keep"]))
def run(request, urls, tmp_path_factory) -> Interrupted:
    return Interrupted(request.param, urls, tmp_path_factory.mktemp("runs"))


def ids(batch: RecordedBatch) -> list[str]:
    return [sequence.id for sequence in batch.batch.sequences]


def versions(batch: RecordedBatch) -> np.ndarray:
    return np.concatenate([sequence.policy_versions for sequence in batch.batch.sequences])


def test_what_is_lost_is_said(run):
    _, stopped, last = run.outputs
    assert "stopped on request after step 4; the same command continues" in stopped
    for output, step in zip((stopped, last), RESUMED_AT, strict=True):
        assert f"continues from step {step} of" in output
        assert f"{PROMPTS} prompts that were begun for later steps are sampled anew" in output
    assert sorted(run.after[0]) == [0, 1, 2], "step 2 was learned from, and is repeated from the checkpoint before it"


def test_nothing_is_learned_twice_and_nothing_is_left_out(run):
    assert [row["step"] for row in run.rows] == list(range(STEPS))
    batches = run.batches()
    assert sorted(batches) == list(range(STEPS))
    names = [name for step in range(STEPS) for name in ids(batches[step])]
    assert len(names) == len(set(names)) == STEPS * PROMPTS * SAMPLES
    for step in run.after[0]:  # a step that is repeated has the prompts that it had
        assert ids(run.after[0][step]) == ids(batches[step])
    for step in run.after[1]:  # what was learned before the stop stays
        assert ids(run.after[1][step]) == ids(batches[step])
        assert (versions(run.after[1][step]) == versions(batches[step])).all()
    for step, ahead in zip(RESUMED_AT, run.ahead, strict=False):
        assert [item["step"] for item in ahead] == [step]
        assert list(dict.fromkeys(name.rpartition("/")[0] for name in ids(batches[step]))) == ahead[0]["prompts"]


def test_every_token_is_of_weights_that_the_run_had_when_its_batch_was_sampled(run):
    """At most one step older than the learner's; none older than the checkpoint, in the step after a resume."""
    for (step, batch), row in zip(sorted(run.batches().items()), run.rows, strict=True):
        assert batch.policy_version == step
        sampled_by = versions(batch)
        begun_with = step if step in (0, *RESUMED_AT) else step - 1
        assert begun_with <= sampled_by.min() <= sampled_by.max() <= step
        assert row["rollout/staleness_max"] == step - sampled_by.min()
        assert row["rollout/legs_mean"] >= 1.0
        assert row["rollout/versions_mean"] >= 1.0
