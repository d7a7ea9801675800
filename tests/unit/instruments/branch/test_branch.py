"""Branches without engines: the checkpoint, the arms, refusals, resuming, and verdicts on planted curves."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from scipy import stats

from megatron_rl.__main__ import main
from megatron_rl.checkpoint.manifest import TRAINER_FILE, checkpoint_name, hash_files, write_manifest
from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.branch.arms import CONTROL, NAMES, arms_of, own_arm
from megatron_rl.instruments.branch.plan import AFTERWARDS, Branch, common_keys, onset_of, plan_branch
from megatron_rl.instruments.branch.verdict import judge, page
from megatron_rl.instruments.lab import runner as runner_module
from megatron_rl.instruments.lab.runner import StudyRunner
from megatron_rl.instruments.plan import GPUS, make_plan, make_workload
from megatron_rl.instruments.why import Change, Finding, Sign, find
from megatron_rl.model.known_models import shape_of
from megatron_rl.monitor.run_directory import JsonlSink, RunDirectory
from megatron_rl.run.identity import keep_recipe, recipe_changes
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY, tiny_recipe

ONSET, STEPS = 20, 40
SICK = {"batch": {"minibatches": 4}, "learner": {"optimizer": {"lr": 3e-3}}}


def rows(steps: int = STEPS, healthy: bool = False) -> list[dict[str, float]]:
    """A run with updates that are too large, whose reward falls from 0.6 to 0.1 at `ONSET`, or does not."""
    usual = {"actor/grad_norm": 0.5, "mismatch/rho_std": 1e-6, "actor/ppo_kl": 0.0, "actor/entropy": 0.3}
    usual |= {"noise/relative_update": 5e-4 if healthy else 4e-3, "perf/time/step": 36.0}
    reward = [0.6 if healthy or step < ONSET else 0.1 for step in range(steps)]
    return [
        {"step": step, "critic/rewards/mean": value, "critic/score/mean": value} | usual
        for step, value in enumerate(reward)
    ]


def checkpoint(folder: Path, step: int, complete: bool = True) -> Path:
    path = folder / "checkpoints" / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / TRAINER_FILE).write_text(json.dumps({"learner": {"step": step}}))
    if complete:
        write_manifest(path, hash_files(path, [TRAINER_FILE]))
    return path


def write(folder: Path, records: list[dict[str, float]], recipe) -> Path:
    directory = RunDirectory(folder).create()
    keep_recipe(directory, recipe, 0)
    sink = JsonlSink(directory.metrics)
    for record in records:
        sink.write(record["step"], {name: value for name, value in record.items() if name != "step"})
    return folder


def make_run(folder: Path, records=None, checkpoints=(10, 20, 30), **keys) -> Path:
    """A run's folder with checkpoints after ``checkpoints`` steps."""
    write(folder, records or rows(), tiny_recipe(name="sick", num_steps=STEPS, **(SICK | keys)))
    for step in checkpoints:
        checkpoint(folder, step)
    return folder


@pytest.fixture
def sick(tmp_path) -> Path:
    return make_run(tmp_path / "sick")


# -- where it starts


def test_it_starts_at_the_newest_complete_checkpoint_up_to_the_onset(tmp_path):
    folder = make_run(tmp_path / "sick", checkpoints=(5, 10, 30))
    checkpoint(folder, 15, complete=False)
    branch = plan_branch(folder)
    assert (branch.begin, branch.checkpoint.name) == (10, "step_00000010")
    sign = min(sign.step for sign in find("sick", rows(), {}).signs)
    assert ONSET <= branch.onset <= sign <= ONSET + 5
    assert branch.steps == sign - 10 + AFTERWARDS
    assert plan_branch(folder, from_step=5).begin == 5
    assert plan_branch(folder, from_step=0).checkpoint is None


def finding(signs: list[int], changes: list[int]) -> Finding:
    found = [Change("actor/entropy", step, 1.0, 2.0, 0.001) for step in changes]
    return Finding("run", 90, None, tuple(Sign("reward-drop", step, "") for step in signs), tuple(found), ())


@pytest.mark.parametrize(
    ("signs", "changes", "onset"),
    [
        ([80, 85], [70], (70, 80)),
        ([80], [12, 75], (75, 80)),  # what changed long before was learning
        ([80], [], (80, 80)),
        ([80], [84], (80, 80)),
        ([], [12], None),
    ],
)
def test_the_onset_is_the_first_sign_or_a_change_shortly_before_it(signs, changes, onset):
    assert onset_of(finding(signs, changes)) == onset


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


def test_the_recipe_is_the_one_that_was_in_force_at_the_checkpoint(tmp_path):
    folder = make_run(tmp_path / "sick")
    later = tiny_recipe(name="sick", num_steps=STEPS, **(SICK | {"learner": {"optimizer": {"lr": 7e-3}}}))
    keep_recipe(RunDirectory(folder), later, 20)
    assert plan_branch(folder, from_step=10).recipe_of_run.learner.optimizer.lr == 3e-3
    assert plan_branch(folder, from_step=20).recipe_of_run.learner.optimizer.lr == 7e-3


# -- the arms

APPLY = {
    "third-rate": {},
    "one-update": {"batch": {"minibatches": 4}},
    "usual-clip": {"objective": {"policy_term": {"name": "ppo_clip", "clip_high": 5.0}}},
    "no-staleness": {"rollout": {"engine": "vllm_server", "max_staleness": 1}},
    "unrounded": {"rollout": {"quantization": {"weights": "int4", "block": [1, 64]}}},
    "no-dose": {"rollout": {"engine": "exact"}, "exact": {"noise": {"kind": "logits", "std": 0.1}}},
    "bf16": {"rollout": {"dtype": "fp16"}, "learner": {"dtype": "fp16"}},
    "fp32": {"rollout": {"dtype": "bf16"}, "learner": {"dtype": "bf16"}},
    "r3": {},
    "exact-engine": {"rollout": {"quantization": {"weights": "int8"}}},
    "tis": {},
    "overlong-penalty": {},
    "usual-temperature": {"rollout": {"temperature": 0.5}},
    "other-data-order": {},
}
IDLE = {
    "one-update": ({}, "batch.minibatches is 1"),
    "usual-clip": ({"objective": {"policy_term": {"name": "gspo"}}}, "objective.policy_term is gspo"),
    "no-staleness": ({}, "rollout.max_staleness is 0"),
    "unrounded": ({}, "rollout.quantization.weights is None"),
    "no-dose": ({}, "exact.noise is None"),
    "bf16": ({}, "nothing is fp16"),
    "fp32": ({}, "learner.dtype is 'fp32'"),
    "r3": ({"routing": {"replay": "r3"}}, "routing.replay is 'r3'"),
    "exact-engine": ({"rollout": {"engine": "exact"}}, "rollout.engine is 'exact'"),
    "tis": ({"objective": {"correction": [{"mode": "mis"}]}}, "objective.correction has mis already"),
    "overlong-penalty": ({"reward": {"overlong": {"buffer": 4}}}, "reward.overlong is set already"),
    "usual-temperature": ({}, "rollout.temperature is 1.0"),
    "other-data-order": ({"data": {"shuffle": False}}, "data.shuffle is false"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_an_arm_changes_its_own_keys_and_no_other_that_a_resumed_run_may_not_change(name, tmp_path):
    sections = SICK | APPLY[name]
    folder = write(tmp_path / "sick", rows(), tiny_recipe(name="sick", num_steps=STEPS, **sections))
    branch = plan_branch(folder, from_step=0, wanted=[name], seeds=2)
    assert [arm.name for arm in branch.arms] == [name]
    parent = branch.recipe_of_run.model_dump(mode="json")
    for job in branch.jobs(tmp_path):
        _, others = recipe_changes(parent, branch.recipe(job).model_dump(mode="json"))
        seeds = {"seed", "rollout.seed"} if job.seed else set()
        own = set() if job.arm == CONTROL else set(branch.arms[0].keys)
        changed = {change.key for change in others} - seeds
        covered = {
            key for key in own if any(key == c or c.startswith(key + ".") or key.startswith(c + ".") for c in changed)
        }
        assert covered == own
        assert all(any(c == key or c.startswith(key + ".") or key.startswith(c + ".") for key in own) for c in changed)
        assert seeds <= {change.key for change in others}


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_an_arm_that_would_do_nothing_is_left_out_with_the_reason(name):
    sections, reason = IDLE[name]
    arms, left_out = arms_of(tiny_recipe(**sections), [], [name])
    assert arms == []
    assert left_out[0].name == name
    assert reason in left_out[0].reason


def test_every_kind_of_arm_is_tried_here():
    assert set(APPLY) == set(NAMES)
    assert set(IDLE) == set(NAMES) - {"third-rate"}  # which is another rate always


def test_the_arms_are_those_of_the_suspects_in_their_order_and_the_commonest():
    recipe = tiny_recipe(**(SICK | {"rollout": {"temperature": 0.5}}))
    arms, left_out = arms_of(recipe, ["temperature", "reward", "staleness"], None)
    assert [arm.name for arm in arms] == ["usual-temperature", "tis", "third-rate", "one-update"]
    assert [item.name for item in left_out] == ["no-staleness", "reward"]
    assert "--arm reward KEY=VALUE" in left_out[1].reason
    every, _ = arms_of(recipe, [], None)
    assert len(every) > len(arms)
    with pytest.raises(InputError, match=r"--arms: 'half-rate' does not exist; allowed are all, third-rate"):
        arms_of(recipe, [], ["half-rate"])


def test_an_arm_that_the_recipe_forbids_is_left_out_with_its_message(tmp_path):
    folder = make_run(tmp_path / "sick", routing={"telemetry": True})
    branch = plan_branch(folder, wanted=["exact-engine", "third-rate"])
    assert [arm.name for arm in branch.arms] == ["third-rate"]
    assert [item.name for item in branch.left_out] == ["exact-engine"]
    assert branch.left_out[0].reason.startswith("routing.telemetry: true needs another engine's routes")
    assert "(set:" not in branch.left_out[0].reason


def test_an_arm_of_ones_own(sick):
    arm = own_arm("half", ["learner.optimizer.lr=1.5e-3", "batch.minibatches=2"])
    branch = plan_branch(sick, wanted=["third-rate"], own=[arm])
    job = next(job for job in branch.jobs(sick) if job.arm == "half")
    recipe = branch.recipe(job)
    assert (recipe.learner.optimizer.lr, recipe.batch.minibatches) == (1.5e-3, 2)
    for name, settings, message in (
        ("tis", ["a=1"], "the name of another arm"),
        ("mine", [], "changes nothing"),
        ("mine", ["data.seed=3"], "a key that a branch does not set by itself"),
        ("mine", ["lr"], "expected KEY=VALUE"),
    ):
        with pytest.raises(InputError, match=message):
            own_arm(name, settings)
    with pytest.raises(InputError, match=r"--arm wrong: .*learner\.optimizer\.lr"):
        plan_branch(sick, own=[own_arm("wrong", ["learner.optimizer.lr=-1"])])


def test_a_schedule_that_ends_with_the_run_keeps_its_end(tmp_path):
    linear = tiny_recipe(num_steps=STEPS, schedule={"style": "linear"}, **SICK)
    assert common_keys(linear, 10, 20)["schedule.decay_steps"] == 4 * STEPS
    assert "schedule.decay_steps" not in common_keys(tiny_recipe(num_steps=STEPS), 10, 20)
    growing = tiny_recipe(num_steps=STEPS, schedule={"weight_decay_end": 0.1})
    with pytest.raises(InputError, match=r"schedule.weight_decay_end: 0.1 .* give --steps 30"):
        common_keys(growing, 10, 20)
    assert common_keys(growing, 10, 30)["num_steps"] == STEPS


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
PLANTED = {
    CONTROL: (0.10, 0.12, 0.08, 0.11),
    "third-rate": (0.60, 0.61, 0.59, 0.60),
    "one-update": (0.11, 0.10, 0.10, 0.11),
}


def finish(branch: Branch, root: Path, planted=PLANTED, only=None) -> None:
    """Finished runs whose outcome is the planted value of their arm and seed."""
    for job in branch.jobs(root):
        if only is not None and job.name not in only:
            continue
        value = planted[job.arm][job.seed]
        records = rows()[branch.begin : branch.begin + branch.steps]
        if job.arm != CONTROL or job.seed:
            records = [record | {"critic/score/mean": value} for record in records]
        write(root / job.name, records, branch.recipe(job))
        (root / job.name / "DONE").write_text(f"{STEPS}")


def test_the_arm_that_brings_the_reward_back_is_named_and_the_others_are_not(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path)
    judgement = judge(branch, tmp_path)
    verdicts = {judged.arm.name: judged.verdict for judged in judgement.arms}
    assert verdicts == {"third-rate": "brings it back", "one-update": "does not"}
    cure = judgement.cures[0]
    differences = [arm - control for arm, control in zip(PLANTED["third-rate"], PLANTED[CONTROL], strict=True)]
    mean = sum(differences) / 4
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3)
    assert cure.effect.mean == rounded(mean)
    assert cure.effect.upper == rounded(mean + stats.t.ppf(0.975, 3) * deviation / 2)
    assert cure.p_holm == min(1.0, 2 * cure.p)  # the smaller of two
    control = sum(PLANTED[CONTROL]) / 4
    assert cure.restored == rounded(mean / (0.6 - control))
    text = page(judgement)
    assert "Verdict: third-rate (learner.optimizer.lr 0.003 → 0.001) brings critic/score/mean back" in text
    assert "repeats 20 steps of the run, bit for bit" in text
    told = json.loads(json.dumps(judgement.as_json()))
    assert told["arms"][0]["keys"] == {"learner.optimizer.lr": [0.003, 0.001]}
    assert told["control"]["repeated_steps"] == 20


def test_two_seeds_that_disagree_decide_nothing(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS, seeds=2)
    finish(branch, tmp_path, PLANTED | {"third-rate": (0.60, 0.20)})
    judgement = judge(branch, tmp_path)
    assert judgement.cures == []
    assert judgement.sentence.startswith("undecided: third-rate")


def test_arms_that_all_do_nothing_leave_the_cause_open(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path, PLANTED | {"third-rate": PLANTED["one-update"]})
    assert judge(branch, tmp_path).sentence.startswith("none of these arms brings critic/score/mean back")


def test_a_control_that_does_not_repeat_the_run_is_told(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path)
    sink = JsonlSink(tmp_path / "control-seed0" / "metrics.jsonl")
    sink.resume_at(15)
    for record in rows()[15:30]:
        sink.write(record["step"], {k: v for k, v in record.items() if k != "step"} | {"actor/entropy": 0.25})
    text = page(judge(branch, tmp_path))
    assert "differs from the run: step 15: actor/entropy is 0.3 in the first run and 0.25 in the second" in text


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
    arguments = ["run", "branch", str(sick), "--dry-run", "--json", "--gpu", "h100", "--nodes", "1", "--arms", *ARMS]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["gpu_hours"]) == {CONTROL, *ARMS}
    assert told["runs"] == 12


def test_the_gpu_hours_of_a_30b_recipe_are_those_of_its_steps(tmp_path, capsys):
    """The model is not there, its shape is known. GPU-hours: GPUs · steps · seconds a step / 3600 · seeds, by arm."""
    recipe = load_recipe(REPOSITORY / "recipes/objective_hacking/grpo-qwen3-30b-a3b-4n8g-tp4ep8-clip0.28.yaml")
    folder = write(tmp_path / "big", rows(), recipe)
    checkpoint(folder, 10)
    arguments = ["run", "branch", str(folder), "--from", "10", "--steps", "30", "--arms", "one-update", "--dry-run"]
    assert main([*arguments, "--gpu", "h100", "--json"]) == 0
    hours = json.loads(capsys.readouterr().out)["gpu_hours"]
    architecture, _ = shape_of(recipe.model.path)
    step_seconds = make_plan(make_workload(recipe, architecture, GPUS["h100-80"])).time.total
    assert set(hours) == {CONTROL, "one-update"}
    assert hours[CONTROL] == rounded(30 * step_seconds / 3600 * 32 * 4)


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
        (["--seeds", "0"], "--seeds 0: expected at least 1"),
        (["--from", "-1"], "--from -1: expected at least 0"),
        (["--gpu", "h100"], "--gpu: is for the estimate of --dry-run"),
        (["--arm", "x", "batch.minibatches=2", "--arm", "x", "batch.minibatches=1"], "--arm x: given twice"),
    ],
)
def test_options_that_cannot_be_are_refused(sick, arguments, message, capsys):
    assert main(["run", "branch", str(sick), *arguments]) == 2
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
