"""Faults at every place of a run: what was computed is not lost, and the run goes on as if nothing had happened.

Every process here is a real one and is really killed; a resumed run has to write the same metrics.jsonl, bit for bit.
"""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.slow import slow_but

CHECKPOINT, MANIFEST = "megatron_rl.checkpoint.save:", "megatron_rl.checkpoint.manifest:"


def kill(at: str, call: int = 1, when: str = "before") -> dict:
    return {"at": at, "call": call, "when": when, "do": "kill"}


# In this order on one run: each start gets a little further than the one before. Checkpoints are due after steps 2, 4
# and 6; a start repeats the steps since the last one.
KILLS = [
    kill("phase:generate"),  # nothing saved yet: starts again from the beginning
    kill("phase:reward", 4),
    kill("phase:old_logprobs", 2, "after"),
    kill(CHECKPOINT + "_write"),  # saving step 2
    kill(CHECKPOINT + "_write", 1, "after"),
    kill(CHECKPOINT + "_finish_files", 1, "after"),
    kill(MANIFEST + "write_manifest", 1, "after"),  # complete, not in place: the next start puts it there
    kill("phase:forward_backward", 3),  # from step 2 on
    kill("phase:optimizer", 4, "after"),
    kill(MANIFEST + "_sync_folder", 1, "after"),  # step 4, before it has its name
    kill(MANIFEST + "publish", 1, "after"),  # step 4 is in place
    kill("phase:refit", 1, "after"),
    kill("megatron_rl.run.start:Run.record", 1, "after"),  # the line is written, the checkpoint is not
    kill("megatron_rl.monitor.run_directory:append_whole", 2),
    kill(MANIFEST + "shutil.rmtree", 3),  # somewhere in publishing and pruning step 6
    kill("phase:validate", 1, "after"),
]


SOME_KILLS = [KILLS[i] for i in (0, 3, 6, 10, 14, 15)]


@pytest.mark.parametrize("kills", slow_but([SOME_KILLS], [SOME_KILLS, KILLS]), ids=len)
def test_killed_anywhere_a_run_continues_bit_for_bit(runs, whole, kills):
    name, reached = f"victim-{len(kills)}", []
    for fault in kills:
        ended = runs.train(name, faults=[fault], expect=-signal.SIGKILL)
        reached += [
            int(line.split("step ")[1].split()[0]) for line in ended.output.splitlines() if "continues from" in line
        ]
    assert reached == sorted(reached)
    assert reached[0] == 2
    assert reached[-1] >= 6
    assert "was complete but not yet in place" in runs.log(name)
    assert "did not end in order" in runs.log(name)
    runs.train(name)
    assert runs.rows(name) == whole
    hidden = [path for path in runs.checkpoints(name) if path.startswith(".")]
    assert not hidden
    assert runs.checkpoints(name) == runs.checkpoints("whole")


BESIDE = "checkpoint.async_save=true"
KILLS_BESIDE = [  # a save beside training: its thread, then what publishes it at the end of a later step
    kill(CHECKPOINT + "_state", 1, "after"),  # step 2 is copied, nothing is written
    kill(CHECKPOINT + "_write"),
    kill(CHECKPOINT + "_write", 1, "after"),
    kill(CHECKPOINT + "_hash_own_files", 1, "after"),
    kill(CHECKPOINT + "gather_to_main"),
    kill(CHECKPOINT + "_finish_files", 1, "after"),
    kill(MANIFEST + "write_manifest", 1, "after"),  # complete, not in place
    kill(CHECKPOINT + "_write", 1, "after"),  # step 4
    kill(MANIFEST + "publish", 1, "after"),
    kill(MANIFEST + "shutil.rmtree", 3),  # somewhere in publishing and pruning
]


SOME_KILLS_BESIDE = [KILLS_BESIDE[i] for i in (0, 6, 7, 8)]


@pytest.mark.parametrize("kills", slow_but([SOME_KILLS_BESIDE], [SOME_KILLS_BESIDE, KILLS_BESIDE]), ids=len)
def test_killed_anywhere_in_a_save_beside_training(runs, whole, kills):
    name = f"beside-{len(kills)}"
    for fault in kills:
        runs.train(name, BESIDE, faults=[fault], expect=-signal.SIGKILL)
    assert "continues from step 2" in runs.log(name)
    assert "was complete but not yet in place" in runs.log(name)
    runs.train(name, BESIDE)
    assert runs.rows(name) == whole
    assert runs.checkpoints(name) == runs.checkpoints("whole")


def until(has_come: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not has_come():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_training_goes_on_while_a_save_is_written(runs, whole, tmp_path):
    """The thread of the first save hangs: steps 2 and 3 are done, nothing is published, the next save waits for it."""
    go, root = tmp_path / "go", runs.root / "slow"
    fault = {"at": CHECKPOINT + "_write", "do": "wait", "file": str(go)}
    child = runs.start("slow", BESIDE, faults=[fault])
    metrics = root / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) == 4)
    assert runs.checkpoints("slow") == [".partial-step_00000002"]
    go.touch()
    ended = runs.end(child)
    assert ended.status == 0, ended.output[-4000:]
    assert runs.rows("slow") == whole
    assert runs.checkpoints("slow") == runs.checkpoints("whole")
    for step in (6, 7):
        slow, saved_at_once = (shards(runs, name, step) for name in ("slow", "whole"))
        assert slow == saved_at_once


def shards(runs, name: str, step: int) -> dict:
    """Size and hash of the files that hold tensors."""
    manifest = json.loads((runs.root / name / "checkpoints" / f"step_{step:08d}" / "manifest.json").read_text())
    recorded = {file: about for file, about in manifest["files"].items() if file.endswith(".distcp")}
    assert recorded
    return recorded


def test_a_stop_waits_for_the_save_under_way(runs, whole):
    stop = {"at": "phase:forward_backward", "do": "terminate", "call": 3}
    ended = runs.train("stop-beside", BESIDE, "checkpoint.every=1", faults=[stop])
    steps = len(runs.rows("stop-beside"))
    assert f"stopped on request after step {steps - 1}" in ended.output
    assert runs.checkpoints("stop-beside")[-1] == f"step_{steps:08d}"
    assert not any(name.startswith(".") for name in runs.checkpoints("stop-beside"))
    runs.train("stop-beside")
    assert runs.rows("stop-beside") == whole


@pytest.mark.parametrize(
    "at", slow_but([CHECKPOINT + "_write"], [CHECKPOINT + "_state", CHECKPOINT + "_write", MANIFEST + "write_manifest"])
)
def test_a_save_beside_training_that_fails_is_said_and_made_up_for(runs, whole, at):
    name = "beside-" + at.rpartition(":")[2]
    runs.train(name, BESIDE, "checkpoint.keep_last=0", faults=[{"at": at, "do": "disk full"}])
    (line,) = [line[9:] for line in runs.log(name).splitlines() if "could not be written" in line]
    assert line.startswith("the checkpoint of step 2 could not be written: OSError: [Errno 28] No space left on device")
    assert runs.rows(name) == whole
    # Step 3, where the failure was known by its end.
    assert [n for n in runs.checkpoints(name) if n != "step_00000003"] == [f"step_{s:08d}" for s in (4, 6, 7)]


def test_the_run_uses_every_state_that_a_resume_must_restore(whole):
    """Otherwise the test above would prove little."""
    assert whole[-1]["step"] == 7
    assert any(row.get("alarm/growing") for row in whole)
    assert len({row["precision/loss_scale"] for row in whole[:-1]}) > 2
    assert whole[-2]["lr_sched/surge_step"] > 0
    assert whole[-2]["lr_sched/extra_halvings"] > 0
    assert max(row["groups/sampled"] for row in whole[:-1]) > 4
    for name in ("mismatch/growth", "hacking/J_pcc", "noise/grad_norm_ema", "noise/gns"):
        assert name in whole[-2], name


def test_stopped_after_any_step_by_sigterm(runs, whole):
    """The first start stops in step 0, the second in the step after."""
    name = "stopped"
    for step in range(2):
        ended = runs.train(name, faults=[{"at": "phase:forward_backward", "do": "terminate"}])
        assert f"stopped on request after step {step}; the same command continues" in ended.output
        assert len(runs.rows(name)) == step + 1
    runs.train(name)
    assert runs.rows(name) == whole


def test_ctrl_c_stops_after_the_step_and_twice_at_once(runs, whole):
    ended = runs.train("ctrl-c", faults=[{"at": "phase:forward_backward", "do": "interrupt"}])
    assert "stopping after this step; once more Ctrl-C ends the run at once" in ended.output
    assert "stopped on request after step 0; the same command continues" in ended.output
    twice = {"at": "phase:forward_backward", "do": "interrupt", "times": 2, "call": 3}
    ended = runs.train("ctrl-c", faults=[twice], expect=130)
    assert ended.last_line == "interrupted; the same command continues from the last checkpoint"
    assert "Traceback" not in ended.output
    runs.train("ctrl-c")
    assert runs.rows("ctrl-c") == whole


FILES = {
    "common.pt": CHECKPOINT + "_write_common",
    "shards": CHECKPOINT + "_write",
    "index": "torch.distributed.checkpoint:FileSystemWriter.finish",
    "manifest": MANIFEST + "write_manifest",
}


@pytest.mark.parametrize("file", slow_but(["shards"], FILES))
def test_a_disk_that_is_full_during_a_save_costs_nothing(runs, whole, file):
    """The save after step 2 fails; the run says so, goes on and saves after step 3."""
    ended = runs.train(file, "checkpoint.keep_last=0", faults=[{"at": FILES[file], "do": "disk full"}])
    (line,) = {line[9:] for line in runs.log(file).splitlines() if "could not be written" in line}
    assert line.startswith("the checkpoint of step 2 could not be written: ")
    assert "No space left on device" in line
    assert line.endswith("the run goes on and tries again after the next step")
    assert "Traceback" not in ended.output
    assert runs.rows(file) == whole
    assert runs.checkpoints(file) == [f"step_{step:08d}" for step in (3, 4, 6, 7)]


def test_a_disk_that_stays_full(runs, whole):
    """No file grows beyond 200 kB from the second save on: the first checkpoint stays, the end is one clear line."""
    faults = [{"at": CHECKPOINT + "_write", "call": 2, "do": "small files", "size": 200_000}]
    ended = runs.train("full", "num_steps=6", faults=faults, expect=1)
    assert ended.last_line.startswith("run failed: the checkpoint of step 6 could not be written: OSError: [Errno 27]")
    assert "Traceback" not in ended.output
    assert runs.checkpoints("full") == ["step_00000002"]
    assert not (runs.root / "full" / "DONE").exists()
    runs.train("full")
    assert runs.rows("full") == whole


def test_lines_that_a_full_disk_refused_are_written_later(runs, whole):
    faults = [
        {"at": "megatron_rl.monitor.run_directory:append_whole", "call": call, "do": "disk full"} for call in (2, 4, 5)
    ]
    ended = runs.train("late", faults=faults)
    assert "metrics.jsonl failed" in ended.output
    assert runs.rows("late") == whole


def test_a_run_without_its_metrics_does_not_end_well(runs, whole):
    lost = runs.root / "lost" / "metrics.jsonl"
    lost.mkdir(parents=True)
    ended = runs.train("lost", expect=1)
    assert ended.last_line.startswith(f"run failed: {lost}: 8 steps could not be written, so the run is not complete")
    assert not (lost.parent / "DONE").exists()
    lost.rmdir()
    runs.train("lost")
    assert runs.rows("lost") == whole
    assert (lost.parent / "DONE").exists()


def test_a_batch_that_cannot_be_recorded_does_not_end_the_run(runs, whole):
    fault = {"at": "megatron_rl.run.recorded_batches:save_file", "do": "safetensors fails", "call": 2}
    ended = runs.train("recorder", "recorder.record_batches=all", faults=[fault])
    assert "the batch of step 1 could not be recorded: Error while serializing" in ended.output
    recorded = sorted(path.name for path in (runs.root / "recorder" / "batches").iterdir())
    assert recorded == [f"step_{step:08d}.{kind}" for step in (0, 2, 3, 4, 5, 6) for kind in ("json", "safetensors")]
    assert runs.rows("recorder") == whole


def test_an_export_that_finds_no_room_is_made_at_the_next_start(runs, whole):
    fault = {"at": "safetensors.torch:save_file", "do": "safetensors fails"}
    ended = runs.train("export", "checkpoint.export_hf=true", faults=[fault], expect=1)
    assert re.match(r"run failed: the Hugging Face checkpoint \S+hf could not be written: Safetensor", ended.last_line)
    assert not (runs.root / "export" / "DONE").exists()
    runs.train("export", "checkpoint.export_hf=true")
    assert (runs.root / "export" / "checkpoints" / "hf" / "model.safetensors.index.json").exists()
    assert (runs.root / "export" / "DONE").exists()
    assert runs.rows("export") == whole


def damage_truncated(checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def damage_bit(checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def damage_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{")


DAMAGES = {
    damage_truncated: r"distcp has \d+ of \d+ bytes",
    damage_bit: "distcp has another SHA-256",
    damage_manifest: "manifest.json cannot be read",
}


@pytest.mark.parametrize("damage", slow_but([damage_bit], DAMAGES), ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(runs, whole, damage):
    name = damage.__name__
    shutil.copytree(runs.root / "whole", runs.root / name)
    (runs.root / name / "DONE").unlink()
    newest = runs.root / name / "checkpoints" / "step_00000007"
    damage(newest)
    refused = runs.train(name, resume=str(newest), expect=2)
    assert re.search(DAMAGES[damage], refused.last_line), refused.output
    assert refused.last_line.startswith("error: --resume ")
    runs.train(name)
    assert re.search(
        "checkpoint step_00000007 is damaged .*"
        + DAMAGES[damage]
        + ".*set aside as damaged_step_00000007; falling back",
        runs.log(name),
    )
    assert runs.rows(name) == whole
    assert "damaged_step_00000007" in runs.checkpoints(name)


def test_with_no_checkpoint_left_whole_nothing_starts_anew(runs):
    shutil.copytree(runs.root / "whole", runs.root / "hopeless")
    (runs.root / "hopeless" / "DONE").unlink()
    for checkpoint in (runs.root / "hopeless" / "checkpoints").iterdir():
        damage_bit(checkpoint)
    before = runs.rows("hopeless"), runs.checkpoints("hopeless")
    for _ in range(2):
        refused = runs.train("hopeless", expect=2)
        assert "checkpoints is whole; step_00000007: " in refused.last_line
        assert "Traceback" not in refused.output
    assert before == (runs.rows("hopeless"), runs.checkpoints("hopeless"))


def test_going_back_leaves_no_way_into_the_other_history(runs, whole):
    """Resumed from an older checkpoint and killed: `auto` must not return to what was newer."""
    shutil.copytree(runs.root / "whole", runs.root / "back")
    older = runs.root / "back" / "checkpoints" / "step_00000006"
    runs.train("back", resume=str(older), faults=[kill("phase:generate")], expect=-signal.SIGKILL)
    assert "abandoned_step_00000007" in runs.checkpoints("back")
    assert "continues from step 6" in runs.train("back").output
    assert runs.rows("back") == whole


def test_a_complete_run_goes_on_to_more_steps(runs, whole):
    """DONE says what was asked for: it goes when more is asked; the same command again ends at once."""
    done = runs.root / "longer" / "DONE"
    runs.train("longer", "num_steps=4", "checkpoint.every=0")
    assert done.read_text() == "4\n"
    before = runs.files("longer")
    again = runs.train("longer", "num_steps=4", "checkpoint.every=0")
    assert "complete, 4 steps; nothing is left to do" in again.last_line
    assert runs.files("longer") == before
    runs.train("longer", faults=[kill("phase:generate", 2)], expect=-signal.SIGKILL)
    assert not done.exists()
    runs.train("longer")
    assert done.read_text() == "7\n"
    # Four steps ended with a validation of their own, which the rule on held-out reward goes on to remember.
    own = "alarm/held-out-drop"
    later, expected = (
        [{k: v for k, v in row.items() if k != own} for row in rows] for rows in (runs.rows("longer"), whole)
    )
    assert later[5:] == expected[5:]


def test_a_stop_while_nothing_can_be_sampled_gives_the_step_up(runs, whole):
    """What a generator raises that waits for servers when a stop is asked for: saved before the step, status 0."""
    (runs.root / "given-up").mkdir()
    (runs.root / "given-up" / "STOP").touch()
    ended = runs.train("given-up", faults=[{"at": "phase:generate", "call": 1, "do": "interrupted"}])
    assert ended.last_line.startswith("stopped on request: a stop was asked for while waiting for a server; the same")
    assert not (runs.root / "given-up" / "STOP").exists()
    assert not (runs.root / "given-up" / "metrics.jsonl").exists()
    fault = {"at": "megatron_rl.run.lookahead:Lookahead.sample", "call": 4, "do": "interrupted"}
    runs.train("given-up", faults=[fault])
    steps = len(runs.rows("given-up"))
    assert runs.checkpoints("given-up")[-1] == f"step_{steps:08d}"
    runs.train("given-up")
    assert runs.rows("given-up") == whole


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"at": "tests.reliability.programs:SeededResponses.rollout", "do": "engine error"}, "the engine is gone"),
        (
            {"at": "megatron_rl.rewards.rewarder:Rewarder.score", "do": "worker error"},
            "rewards could not be computed: RuntimeError: a reward worker did not start",
        ),
    ],
    ids=["engine", "rewards"],
)
def test_an_engine_or_worker_that_fails_loses_no_step(runs, whole, fault, message):
    """No checkpoint is due before the end: the one of the fault is what the run continues from."""
    name = fault["do"].split()[0]
    ended = runs.train(name, "checkpoint.every=0", faults=[{**fault, "call": 6}], expect=1)
    assert ended.last_line.startswith("run failed: ")
    assert message in ended.last_line
    done = len(runs.rows(name))
    assert done > 1
    assert runs.checkpoints(name) == [f"step_{done:08d}"]
    assert f"continues from step {done}" in runs.train(name, "checkpoint.every=0").output
    assert runs.rows(name) == whole


def test_no_clock_decides_anything(runs, whole):
    runs.train("clock", faults=[{"at": "phase:generate", "call": 2, "do": "clock jumps"}])
    assert runs.rows("clock") == whole


def test_two_runs_never_share_a_directory(runs, whole, tmp_path):
    go = tmp_path / "go"
    first = runs.start("shared", faults=[{"at": "phase:generate", "call": 3, "do": "wait", "file": str(go)}])
    until(go.with_suffix(".waiting").exists)
    owner = json.loads((runs.root / "shared" / "LOCK").read_text())
    assert owner["pid"] == first.pid
    before = (runs.root / "shared" / "metrics.jsonl").read_bytes()

    from megatron_rl.errors import InputError
    from megatron_rl.run.control import RunLock

    with pytest.raises(InputError, match=f"shared is in use by process {first.pid} on .*STOP.*another name"):
        RunLock(runs.root / "shared" / "LOCK", patience_s=0.3).acquire()
    assert (runs.root / "shared" / "metrics.jsonl").read_bytes() == before
    go.touch()
    assert first.wait() == 0
    assert runs.rows("shared") == whole


@pytest.mark.parametrize("responses", slow_but(["empty"], ["empty", "wrong"]))
def test_responses_that_teach_nothing(runs, responses):
    """Only the stop token, or all groups without signal: every step is recorded, nothing breaks, and it resumes."""
    short = ("num_steps=3", "checkpoint.every=1")
    ended = runs.train(responses, *short, responses=responses)
    assert [row["step"] for row in runs.rows(responses)] == [0, 1, 2, 3]
    assert "Traceback" not in ended.output
    for step in range(3):
        assert f"step {step}: every group was filtered out (all rewards equal); no update" in ended.output
    again, fault = responses + "-again", kill("phase:generate", 7)
    runs.train(again, *short, responses=responses, faults=[fault], expect=-signal.SIGKILL)
    runs.train(again, *short, responses=responses)
    assert runs.rows(again) == runs.rows(responses)


def test_empty_responses_can_be_learned_from(runs):
    """With unfiltered groups, responses of one token go through the update."""
    batch = "batch={prompts: 4, filter_groups: false, max_generations: 1}"
    runs.train("short", "num_steps=2", batch, responses="empty")
    assert all("actor/grad_norm" in row for row in runs.rows("short")[:2])
