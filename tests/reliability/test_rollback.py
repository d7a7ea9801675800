"""Alarms with `rollback`: undone updates leave the run bit for bit as if they had not been made."""

import json
import signal

# The rate rises over 8 updates, two a step; at half the rate it never comes above the bound. The condition begins to
# hold in step 3 and the alarm goes off in step 4: checkpoints 2 and 4 are there, and only 2 is from before.
FAST = "{name: fast, metric: actor/lr, above: 6.0e-5, for_steps: 2, then: [rollback]}"
# As in recipe.yaml: made-up responses are far from the learner's in the first step as in any.
FAR = "{name: first-step-difference, metric: training/rollout_probs_diff_mean, above: 1.0}"
SETTINGS = ("schedule.warmup_steps=8", f"monitor.alarms=[{FAST}, {FAR}]")
STEPS = 7


def test_undone_updates_leave_no_trace(runs):
    """Against a run that was ended at the checkpoint, and went on with half the rate as if after a rollback."""
    runs.train("undone", *SETTINGS, f"num_steps={STEPS}")
    runs.train("halved", *SETTINGS, "num_steps=2")
    event = {"alarms": ["fast"], "at": 5, "to": 2, "time": 0.0}
    (runs.root / "halved" / "rollbacks.json").write_text(json.dumps([event]))
    runs.train("halved", *SETTINGS, f"num_steps={STEPS}")
    rows = runs.rows("undone")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows == runs.rows("halved")
    assert runs.tensors("undone") == runs.tensors("halved") != {}
    assert [row["lr_sched/extra_halvings"] for row in rows[:STEPS]] == [0] * 2 + [1] * (STEPS - 2)
    log = runs.log("undone")
    assert "rollback 1 of 2 for fast: steps 2 to 4 are undone; rate 2.5e-05" in log
    assert "abandoned_step_00000004" in runs.checkpoints("undone")
    assert "alarms went off, first at: fast (step 4)" in log
    (noted,) = json.loads((runs.root / "undone" / "rollbacks.json").read_text())
    assert {**noted, "time": 0.0} == event


def test_a_run_that_is_killed_on_its_way_back_goes_on_at_half_the_rate(runs):
    kill = {"at": "megatron_rl.run.start:continue_from", "do": "kill"}
    runs.train("killed_back", *SETTINGS, f"num_steps={STEPS}", faults=[kill], expect=-signal.SIGKILL)
    runs.train("killed_back", *SETTINGS, f"num_steps={STEPS}")
    assert "continues from step 2" in runs.log("killed_back")
    assert runs.rows("killed_back") == runs.rows("undone")


def test_the_run_ends_where_going_back_does_not_help(runs):
    """Responses are as long at any rate; the first alarm comes before there is a checkpoint."""
    longer = "{name: longer, metric: response_length/mean, above: %s, then: [rollback]}"
    ended = runs.train("spent", f"monitor.alarms=[{longer % 9.0}, {FAR}]", "monitor.max_rollbacks=1", expect=3)
    assert runs.log("spent").count("rollback 1 of 1 for longer") == 1
    assert "alarm longer at step" in ended.last_line
    assert ended.last_line.endswith("(monitor.max_rollbacks: 1)")
    early = f"monitor.alarms=[{longer % 0.0}, {FAR}]"
    runs.train("early", early, "num_steps=2")
    assert "no rollback for longer: no checkpoint is from before step 0" in runs.log("early")
