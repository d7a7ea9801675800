"""Branches without engines: the checkpoint, the recipe of an arm, refusals, resuming, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.errors import InputError
from megatron_rl.instruments.branch.plan import AFTERWARDS, Branch, common_keys, plan_branch
from megatron_rl.instruments.lab import runner as runner_module
from megatron_rl.instruments.lab.runner import StudyRunner
from megatron_rl.instruments.why.changed import Event
from megatron_rl.instruments.why.onset import Change, Finding, Sign, find
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.run.identity import keep_recipe
from tests.support.rounding import rounded
from tests.support.sick_run import ONSET, SICK, STEPS, checkpoint, finish, make_run, rows
from tests.support.tiny import tiny_recipe


@pytest.fixture
def sick(tmp_path) -> Path:
    return make_run(tmp_path / "sick")


# -- where it starts


def test_it_starts_at_the_newest_complete_checkpoint_up_to_the_onset(tmp_path):
    folder = make_run(tmp_path / "sick", checkpoints=(5, 10, 30))
    checkpoint(folder, 15, complete=False)
    branch = plan_branch(folder)
    assert (branch.begin, branch.checkpoint.name) == (10, "step_00000010")
    sign = find("sick", rows(), {}).first_sign
    assert ONSET <= branch.onset <= sign <= ONSET + 5
    assert branch.steps == sign - 10 + AFTERWARDS
    assert plan_branch(folder, from_step=5).begin == 5
    assert plan_branch(folder, from_step=0).checkpoint is None


def finding(signs: list[int], changes: list[int], recipe_changed: int | None = None) -> Finding:
    history = () if recipe_changed is None else (Event(recipe_changed, "recipe", "batch.prompts", 8, 1),)
    changed = [Change("actor/entropy", step, 1.0, 2.0, 0.001) for step in changes]
    return Finding("run", 90, None, tuple(Sign("reward-drop", step, "") for step in signs), tuple(changed), (), history)


@pytest.mark.parametrize(
    ("signs", "changes", "recipe_changed", "onset"),
    [
        ([80, 85], [70], None, 70),
        ([80], [72, 75], None, 72),
        ([80], [70, 75], 73, 75),  # what departed before the recipe changed was not its doing
        ([80], [70], 73, 80),
        ([80], [70], 81, 70),  # changed after the sign
        ([80], [], None, 80),
        ([80], [84], None, 80),
        ([], [12], None, None),
    ],
)
def test_the_onset_is_the_first_departure_since_the_recipe_changed(signs, changes, recipe_changed, onset):
    assert finding(signs, changes, recipe_changed).onset == onset


def test_without_a_checkpoint_before_the_onset_it_says_which_there_are(tmp_path):
    folder = make_run(tmp_path / "sick", checkpoints=(30, 35))
    with pytest.raises(InputError, match=r"at or before the onset, step \d+; steps that have one: 30, 35\. --from 0"):
        plan_branch(folder)
    with pytest.raises(InputError, match=r"--from 31: .* no complete checkpoint of this step.*30, 35"):
        plan_branch(folder, from_step=31)


def test_a_healthy_run_has_no_cause_to_look_for(tmp_path):
    folder = make_run(tmp_path / "well", rows(healthy=True))
    with pytest.raises(InputError, match="there is no cause to look for"):
        plan_branch(folder)
    with pytest.raises(
        InputError, match=r"(?s)nothing to bring back:.*critic/score/mean is 0.6 before step 10 and 0.6"
    ):
        plan_branch(folder, from_step=10)


def changed_run(folder, step, **keys):
    """A run whose recipe has other ``keys`` from ``step`` on."""
    make_run(folder)
    keep_recipe(RunDirectory(folder), tiny_recipe(name="sick", num_steps=STEPS, **(SICK | keys)), step)
    return folder


@pytest.mark.parametrize(("begin", "changed"), [(10, 20), (20, 20), (10, 15)])
def test_the_recipe_is_the_one_that_was_in_force_at_the_sign(begin, changed, tmp_path):
    """The arms begin with what the run went wrong with, and the first one undoes it."""
    folder = changed_run(tmp_path / "sick", changed, learner={"optimizer": {"lr": 7e-3}}, batch={"minibatches": 2})
    branch = plan_branch(folder, from_step=begin)
    assert branch.recipe_of_run.learner.optimizer.lr == 7e-3
    first = {arm.name: dict(arm.keys) for arm in branch.arms[:3]}
    undone = {"batch.minibatches": 4, "learner.optimizer.lr": 3e-3}
    assert first == {
        "as-before": undone,
        "before-batch-minibatches": {"batch.minibatches": 4},
        "before-learner-optimizer-lr": {"learner.optimizer.lr": 3e-3},
    }
    assert [arm.name for arm in plan_branch(folder, from_step=begin, wanted=["as-before"]).arms] == ["as-before"]


def test_a_change_after_the_sign_is_not_what_went_wrong(tmp_path):
    folder = changed_run(tmp_path / "sick", 36, learner={"optimizer": {"lr": 7e-3}})
    branch = plan_branch(folder, from_step=10)
    assert branch.recipe_of_run.learner.optimizer.lr == 3e-3
    assert "as-before" not in [arm.name for arm in branch.arms]


def test_a_section_that_came_is_taken_away_again(tmp_path):
    folder = changed_run(tmp_path / "sick", 20, reward={"overlong": {"buffer": 4}})
    (first, *_) = plan_branch(folder, from_step=20).arms
    assert (first.name, dict(first.keys)) == ("as-before", {"reward.overlong": None})


# -- the arms


def test_a_schedule_that_ends_with_the_run_keeps_its_end(tmp_path):
    linear = tiny_recipe(num_steps=STEPS, schedule={"style": "linear"}, **SICK)
    assert common_keys(linear, 10, 20)["schedule.decay_steps"] == 4 * STEPS
    assert "schedule.decay_steps" not in common_keys(tiny_recipe(num_steps=STEPS), 10, 20)


def test_no_alarm_ends_an_arm_but_one_that_halves_the_rate_still_does():
    alarms = [
        {"name": "a", "metric": "m", "above": 1.0, "then": ["warn"]},
        {"name": "b", "metric": "m", "above": 1.0, "then": ["decay_lr", "stop"]},
        {"name": "c", "metric": "m", "above": 1.0, "then": ["stop", "save"]},
    ]
    keys = common_keys(tiny_recipe(monitor={"alarms": alarms}), 0, 10)
    assert {key: value for key, value in keys.items() if "alarms" in key} == {
        "monitor.alarms.1.then": ["decay_lr"],
        "monitor.alarms.2.then": ["warn"],
    }


def test_an_arm_that_falls_ill_keeps_no_evidence():
    """Each arm would otherwise keep a checkpoint more at its first alarm."""
    keys = common_keys(tiny_recipe(), 0, 10)
    assert (keys["recorder.record_batches"], keys["recorder.evidence"]) == ("off", None)


# -- the outcome


def test_what_was_lost_is_measured_in_the_second_half_of_the_arms(sick):
    branch = plan_branch(sick, from_step=10, steps=20)
    loss = branch.loss
    assert (branch.first_step, loss.metric, loss.before, loss.after) == (
        20,
        "critic/score/mean",
        rounded(0.6),
        rounded(0.1),
    )
    assert (loss.back, loss.margin) == ("higher", rounded(0.125))


def test_the_mismatch_is_the_outcome_where_no_reward_fell(tmp_path):
    records = rows(healthy=True)
    for record in records[ONSET:]:
        record["mismatch/rho_std"] = 4e-6
    branch = plan_branch(make_run(tmp_path / "run", records), from_step=10, steps=20)
    assert (branch.loss.name, branch.loss.back) == ("mismatch", "lower")
    assert (
        plan_branch(make_run(tmp_path / "b"), steps=20, outcome="critic/rewards/mean").loss.metric
        == "critic/rewards/mean"
    )


# -- verdicts on planted curves


ARMS = ("third-rate", "one-update")
# -- running


RUN = """
import json, pathlib, sys
folder, source, resume = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(folder.parent / (folder.name + ".calls"), "a") as calls: calls.write(resume + "\\n")
(folder / "DONE").write_text("30")
"""


def test_finished_arms_are_not_run_again_and_half_done_ones_go_on(sick, tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.02)
    branch = plan_branch(sick, from_step=10, steps=20, wanted=["third-rate"], seeds=2)
    root = tmp_path / "arms"
    finish(branch, root)
    own = {"third-rate-seed0": True, "control-seed1": False}  # interrupted: with a checkpoint of its own, or without
    for name, has_checkpoint in own.items():
        (root / name / "DONE").unlink()
        if has_checkpoint:
            checkpoint(root / name, 15)

    def command(job):
        whole = branch.command(job, root)
        assert whole[1:4] == ["-m", "megatron_rl", "train"]
        return [sys.executable, "-c", RUN, str(root / job.name), whole[4], whole[-1]]

    states = StudyRunner(branch, root, 2, command, say=lambda line: None).run(branch.jobs(root))
    assert set(states.values()) == {"done"}
    calls = {path.name.removesuffix(".calls"): path.read_text().split() for path in root.glob("*.calls")}
    assert calls == {"third-rate-seed0": ["auto"], "control-seed1": [str(sick / "checkpoints" / "step_00000010")]}


def test_a_run_on_several_nodes_is_not_started_here(sick, capsys):
    (sick / "environment.json").write_text(json.dumps({"variables": {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}}))
    assert main(["run", "branch", str(sick)]) == 2
    assert "ran on 16 ranks, 8 of them on a node; --print-jobs" in capsys.readouterr().err
    assert not (sick / "branch").exists()
    branch = plan_branch(sick, from_step=10)
    (sick / "environment.json").write_text(json.dumps({"variables": {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}}))
    assert "--nproc-per-node=8" in branch.command(branch.jobs(sick)[0], sick)


def test_seed_0_is_the_runs_own_and_others_sample_the_same_prompts_anew(tmp_path):
    folder = make_run(tmp_path / "sick", seed=3, rollout={"seed": 5}, data={"seed": 7})
    branch = plan_branch(folder, from_step=10, wanted=["other-data-order"], seeds=2)
    seeds = {
        job.name: (r.seed, r.rollout.seed, r.data.seed) for job in branch.jobs(tmp_path) for r in [branch.recipe(job)]
    }
    assert seeds == {
        "control-seed0": (3, 5, 7),
        "control-seed1": (4, 6, 7),
        "other-data-order-seed0": (3, 5, 1007),
        "other-data-order-seed1": (4, 6, 1007),
    }


# -- the command


def test_a_dry_run_says_arms_steps_and_cost_and_starts_nothing(sick, capsys):
    assert main(["run", "branch", str(sick), "--dry-run", "--steps", "20", "--jobs", "2", "--arms", *ARMS]) == 0
    out = capsys.readouterr().out
    assert "2 arms and the control, 4 seeds, 20 steps each" in out
    assert "third-rate  undoes learning rate: learner.optimizer.lr 0.003 → 0.001" in out
    # 12 runs of 20 steps of 36 s
    assert "12 runs, 240 steps: 2.4 hours by the run's own steps, 1.2 with 2 at a time, 2.4 rank-hours" in out
    assert not (sick / "branch").exists()


def test_jobs_for_slurm_are_printed_for_what_is_missing(sick, capsys):
    branch = plan_branch(sick, steps=20, wanted=["third-rate"], seeds=1)
    finish(branch, branch.root, only=["control-seed0"])
    arguments = ["branch", str(sick), "--print-jobs", "--steps", "20", "--arms", "third-rate", "--seeds", "1"]
    assert main(arguments) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("slurm/submit.sh --job-name=sick-third-rate-seed0 slurm/train.sbatch ")
    assert line.endswith(f"--begin-from {branch.checkpoint}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "argument --seeds: '0' is not a whole number from 1"),
        (["--from", "-1"], "argument --from: '-1' is not a whole number from 0"),
        (["--arm", "x", "batch.minibatches=2", "--arm", "x", "batch.minibatches=1"], "--arm x: given twice"),
    ],
)
def test_options_that_cannot_be_are_refused(sick, arguments, message, capsys):
    try:
        status = main(["run", "branch", str(sick), *arguments])
    except SystemExit as ended:  # of argparse
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_without_a_finished_arm_there_is_no_verdict(sick, capsys, monkeypatch):
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(Branch, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('out of luck')"])
    assert main(["run", "branch", str(sick), "--arms", "third-rate", "--seeds", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "failed third-rate-seed0" in err
    assert "exit status 1: out of luck" in err
    assert "no arm is finished" in err


def test_finished_arms_are_judged_by_the_command(sick, capsys):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, branch.root)
    arguments = ["run", "branch", str(sick), "--from", "10", "--steps", "20", "--arms", *ARMS]
    assert main(arguments) == 0
    assert "Verdict: third-rate" in capsys.readouterr().out
    assert main([*arguments, "--steps", "24"]) == 2  # others than those in the folder
    assert "was run with another num_steps" in capsys.readouterr().err
