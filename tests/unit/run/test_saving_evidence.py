"""What explains an alarm stays on disk: the batches before it, and a checkpoint from before its onset."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.manifest import checkpoint_name, checkpoint_step, list_checkpoints
from megatron_rl.checkpoint.save import PendingSave
from megatron_rl.config import Recipe
from megatron_rl.instruments.batch.rerun import plan_weights
from megatron_rl.monitor import AlarmEvent, RunDirectory
from megatron_rl.run.recorded_batches import batch_bytes, batch_path, load_batch, recorded_steps
from megatron_rl.run.saving import GIB, Evidence, Rollbacks, Saving
from megatron_rl.run.start import Run, continue_from
from megatron_rl.train import act_on, record
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import stored_rollouts, tiny_recipe


class Share(PendingSave):
    """A save whose rank writes nothing: what is published has only the loop's state."""

    def _work(self) -> None:
        self._written = [], {}


class Learner:
    """Of a learner, what saves and resumes."""

    def __init__(self) -> None:
        self.step = 0
        self.offload = MagicMock()

    def begin_save(self, folder, state, keep_last, protected, in_background) -> Share:
        final = folder / checkpoint_name(self.step)
        partial_folder = manifest.partial_path(final)
        partial_folder.mkdir(parents=True)
        text, writer = json.dumps(state), MagicMock()
        return Share(lambda action: action(), partial_folder, final, writer, None, text, keep_last, protected)

    def load(self, path: Path, verify: bool) -> dict:
        self.step = checkpoint_step(path)
        return json.loads((path / manifest.TRAINER_FILE).read_text())

    def __getattr__(self, name: str):
        return MagicMock()


def a_run(folder: Path, **sections) -> Run:
    """A run without engines, from its newest checkpoint on."""
    recipe: Recipe = tiny_recipe(run_root=str(folder), **sections)
    directory = RunDirectory(recipe.run_dir).create()
    monitor = MagicMock(state_dict=dict)
    learner, said = Learner(), []
    monitor.log = lambda message, style=None: said.append(message)
    saving = Saving(recipe.checkpoint, directory.checkpoints, learner, monitor.log)
    own = MagicMock(state_dict=dict)
    evidence = Evidence(recipe.recorder, directory.batches, saving, monitor.log)
    rollbacks = Rollbacks(directory.rollbacks, recipe.monitor.max_rollbacks)
    rest = (own, own, own, own, own, monitor, own, saving, evidence, rollbacks, own)
    run = Run(recipe, directory, learner, *rest)
    run.said = said
    if checkpoints := list_checkpoints(directory.checkpoints):
        continue_from(run, checkpoints[-1])
    return run


def steps(run: Run, end: int, alarms: dict[int, tuple[str, int]] | None = None, routes: bool = False) -> None:
    """Make the steps up to ``end``. ``alarms``: step → name and onset of the alarm that goes off in it."""
    every = run.recipe.checkpoint.every
    for step in range(run.learner.step, end):
        batch = stored_rollouts(step, num_sequences=3)
        if routes:
            with_routes(batch, random_routes(batch))
        for s in batch.sequences:
            s.current_logprobs = s.inference_logprobs
        run.learner.step = step + 1
        gone_off = [(alarms or {})[step]] if step in (alarms or {}) else []
        record(run, batch, step, {}, [AlarmEvent(name, step, ("warn",), "", onset) for name, onset in gone_off])
        run.saving.settle()
        if every and (step + 1) % every == 0:
            run.try_save()


def checkpoints(run: Run) -> list[int]:
    return [checkpoint_step(path) for path in list_checkpoints(run.directory.checkpoints)]


def batches(run: Run) -> list[int]:
    return recorded_steps(run.directory.batches)


EVERY_5 = {"checkpoint": {"every": 5, "keep_last": 2}}
FOUR = {"recorder": {"evidence": {"batches": 4}}}


def test_without_an_alarm_the_newest_stay(tmp_path):
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    steps(run, 31)
    assert batches(run) == [27, 28, 29, 30]
    assert checkpoints(run) == [25, 30]
    assert len(list(run.directory.batches.iterdir())) == 8, "arrays of deleted batches are left"


LAST = [56, 57, 58, 59]


@pytest.mark.parametrize(
    ("alarms", "kept", "pinned"),
    [
        ({22: ("reward-drop", 17)}, [19, 20, 21, 22], 15),
        ({22: ("policy-jump", 20)}, [19, 20, 21, 22], 15),
        ({12: ("update-size", 10), 22: ("reward-drop", 17)}, [19, 20, 21, 22], 15),
        ({8: ("reward-errors", 8), 22: ("reward-drop", 17)}, [19, 20, 21, 22], 15),
        ({33: ("mismatch-growth", 2)}, [30, 31, 32, 33], 25),
        (
            {1: ("no-signal", 0), 3: ("no-gradient", 0), 28: ("reward-drop", 24), 40: ("truncated", 31)},
            [0, 1, 25, 26, 27, 28],
            20,
        ),
    ],
    ids=[
        "the newest before the onset",
        "that of the onset itself is not from before it",
        "a risk keeps nothing",
        "one failed reward keeps nothing",
        "none is from before the onset: the oldest",
        "before the first checkpoint the pin is left to the next; two alarms at most keep batches",
    ],
)
def test_an_alarm_keeps_the_batches_before_it_and_a_checkpoint_from_before_its_onset(tmp_path, alarms, kept, pinned):
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    steps(run, 60, alarms)
    assert batches(run) == [*kept, *LAST]
    assert checkpoints(run) == [pinned, 55, 60]
    (line,) = [line for line in run.said if "stay; " in line and f"step_000000{pinned}" in line]
    (alarm, onset) = max(alarms.items())[1] if len(alarms) < 4 else alarms[28]
    age = "the newest from before" if pinned < onset else "the oldest there is, none is from before"
    assert line == (
        f"evidence of {alarm}: batches of steps {kept[-4]} to {kept[-1]} stay; step_000000{pinned} stays, {age} step "
        f"{onset}"
    )


def test_the_evidence_stays_over_resumes_and_later_alarms(tmp_path):
    steps(a_run(tmp_path, **EVERY_5, **FOUR), 33, {22: ("reward-drop", 17)})
    for end, alarm in ((48, 41), (71, 66), (90, 80)):
        run = a_run(tmp_path, **EVERY_5, **FOUR)
        steps(run, end, {alarm: ("no-signal", alarm - 4)})
    assert checkpoints(run) == [15, 85, 90]
    assert batches(run) == [19, 20, 21, 22, 86, 87, 88, 89]


def test_a_run_killed_behind_its_alarm_repeats_the_steps_with_the_same_evidence(tmp_path):
    steps(a_run(tmp_path, **EVERY_5, **FOUR), 24, {22: ("reward-drop", 17)})  # the newest checkpoint is of step 20
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    assert run.learner.step == 20
    steps(run, 60, {22: ("reward-drop", 17)})
    assert checkpoints(run) == [15, 55, 60]
    assert batches(run) == [19, 20, 21, 22, 56, 57, 58, 59]


def test_batches_of_the_steps_to_come_push_none_out(tmp_path):
    """What a killed attempt left of later steps is not newer than what this attempt records."""
    steps(a_run(tmp_path, **EVERY_5, **FOUR), 24)
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    steps(run, 22, {21: ("no-signal", 17)})
    assert batches(run) == [20, 21, 22, 23]
    assert [json.loads(batch_path(run.directory.batches, s).read_text())["kept"] for s in (20, 21, 22, 23)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_checkpoint_deleted_by_hand_leaves_room_for_that_of_the_next_alarm(tmp_path):
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    steps(run, 30, {22: ("reward-drop", 17)})
    manifest.delete(run.directory.checkpoints / checkpoint_name(15))
    steps(run, 60, {42: ("reward-drop", 37)})
    assert checkpoints(run) == [35, 55, 60]


def test_a_save_under_way_neither_deletes_the_pin_nor_misses_it(tmp_path):
    run = a_run(tmp_path, checkpoint={"every": 0, "keep_last": 1}, **FOUR)
    for at, before, pinned in ((20, 18, 10), (40, 99, 40)):
        run.saving.pinned = None
        run.learner.step = 10
        run.save()
        run.learner.step = at
        run.try_save(in_background=True)
        assert run.saving.pin(before) == pinned
        run.saving.settle(wait=True)
        assert pinned in checkpoints(run)
        run.learner.step = at + 1
        run.save()
        assert pinned in checkpoints(run)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_stop_on_a_step_with_a_due_save_saves_once(tmp_path, in_background):
    run = a_run(tmp_path, checkpoint={"every": 0})
    run.learner.step = 5
    run.try_save(in_background=in_background)
    assert run.save() == run.directory.checkpoints / checkpoint_name(5)
    assert len([line for line in run.said if line.startswith("checkpoint: ")]) == 1
    run.learner.step = 6
    run.save()
    assert checkpoints(run) == [5, 6]


def test_after_a_rollback_the_same_step_is_saved_again(tmp_path):
    run = a_run(tmp_path, checkpoint={"every": 0})
    for step in (4, 8):
        run.learner.step = step
        run.save()
    run.learner.scheduler = MagicMock(get_lr=lambda group: 1e-4)
    assert run.roll_back([AlarmEvent("a", 8, ("rollback",), "", 6)])
    assert (run.learner.step, checkpoints(run)) == (4, [4])
    run.learner.step = 8
    run.save()
    assert checkpoints(run) == [4, 8]
    assert [line.rpartition("_")[2] for line in run.said if line.startswith("checkpoint: ")] == [
        "00000004",
        "00000008",
        "00000008",
    ]


def test_an_alarm_of_the_last_step_leaves_the_save_to_the_end(tmp_path):
    run = a_run(tmp_path, num_steps=8, checkpoint={"every": 0})
    asks = [AlarmEvent("a", 8, ("save",), "", 7)]
    run.learner.overflow = MagicMock(reason_to_end="")
    for step, saves in ((7, True), (8, False)):
        run.learner.step = step
        assert act_on(asks, run) is saves
        run.saving.settle(wait=True)
    assert checkpoints(run) == [7]


@pytest.mark.parametrize(
    ("recorder", "left", "pinned"),
    [
        ({"evidence": None}, [], []),
        ({"evidence": None, "record_batches": "last_n", "keep": 2}, [58, 59], []),
        (
            {"evidence": {"batches": 3}, "record_batches": "last_n", "keep": 5},
            [18, 19, 20, 21, 22, *range(55, 60)],
            [15],
        ),
        ({"evidence": {"batches": 4}, "record_batches": "off"}, [], [15]),
        ({"evidence": {"batches": 4}, "record_batches": "all"}, list(range(60)), [15]),
        ({"evidence": None, "record_batches": "all"}, list(range(60)), []),
    ],
    ids=["off", "last_n without", "last_n", "no batches", "all", "all without"],
)
def test_one_key_turns_it_off(tmp_path, recorder, left, pinned):
    run = a_run(tmp_path, **EVERY_5, recorder=recorder)
    steps(run, 60, {22: ("reward-drop", 17)})
    assert batches(run) == left
    assert checkpoints(run) == [*pinned, 55, 60]


def test_turned_off_later_it_lets_the_checkpoint_go(tmp_path):
    steps(a_run(tmp_path, **EVERY_5, **FOUR), 30, {22: ("reward-drop", 17)})
    run = a_run(tmp_path, **EVERY_5, recorder={"evidence": None})
    steps(run, 40)
    assert checkpoints(run) == [35, 40]


def test_batches_beyond_the_disk_they_may_take_go(tmp_path):
    probe = a_run(tmp_path / "probe", recorder={"evidence": {"batches": 9}})
    steps(probe, 9)
    sizes = [batch_bytes(probe.directory.batches, step) for step in range(9)]
    room = sum(sizes[-3:]) + 1
    run = a_run(tmp_path, recorder={"evidence": {"batches": 9, "max_gib": room / GIB}})
    steps(run, 9)
    assert batches(run) == [6, 7, 8]
    tight = a_run(tmp_path / "tight", recorder={"evidence": {"max_gib": 1 / GIB}})
    steps(tight, 9)
    assert batches(tight) == [8], "the newest stays, whatever its size"


def test_what_is_kept_is_read_by_the_commands_on_stored_batches(tmp_path):
    """With routes: all that `batch attribute` needs. The weights of the alarm's step are had again exactly."""
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    steps(run, 60, {18: ("reward-drop", 17)}, routes=True)
    stored = load_batch(batch_path(run.directory.batches, 18)).batch
    for sequence, before in zip(stored.sequences, stored_rollouts(18, num_sequences=3).sequences, strict=True):
        assert (sequence.tokens == before.tokens).all()
        assert sequence.current_logprobs is not None
        assert sequence.routed_experts is not None
    plan = plan_weights(run.directory, 18, "exact")
    assert (plan.checkpoint.name, plan.repeat) == ("step_00000015", (15, 16, 17))


def test_a_disk_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    monkeypatch.setattr("megatron_rl.run.saving.delete_batch", partial(_fails, "no such device"))
    steps(run, 8)
    assert any("no such device" in line for line in run.said)
    assert checkpoints(run) == [5]


def _fails(text, *_):
    raise OSError(text)


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    steps(run, 10)
    for path in list_checkpoints(run.directory.checkpoints):
        trainer = path / manifest.TRAINER_FILE
        state = json.loads(trainer.read_text())
        del state["evidence"]
        trainer.write_text(json.dumps(state))
        files = manifest.hash_files(path, [p.name for p in path.iterdir() if p.name != manifest.MANIFEST_FILE])
        manifest.write_manifest(path, files)
    run = a_run(tmp_path, **EVERY_5, **FOUR)
    assert run.learner.step == 10
    steps(run, 30, {16: ("no-signal", 12)})
    assert checkpoints(run) == [10, 25, 30]


def test_the_learner_keeps_the_log_probs_that_the_batches_need():
    for recorder, needed in (({}, True), ({"evidence": None}, False), ({"record_batches": "off"}, False)):
        assert tiny_recipe(recorder=recorder, monitor={"alarms": []}).may_record_batches == needed
