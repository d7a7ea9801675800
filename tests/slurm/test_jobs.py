"""The batch scripts on a real Slurm of two nodes, with real runs of the tiny recipe where a run is what matters.

Start-up is the cost, so one job is interrupted in every way there is instead of one job per way. That one is slow: a
job whose Python is a stand-in that does not train stands for it. Real runs generate with the learner, which starts in
half the time of vLLM; the smoke run and the evaluation have vLLM and all of `check`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, Job, wait_for

pytestmark = pytest.mark.slurm
RECIPE = "my checkout/recipes/tiny/grpo.yaml"
QUICK_START = "rollout.engine=exact"


def rank_process(run: Path, rank: int) -> int | None:
    """Process id of a rank's Python, found by its command line and environment."""
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_ours = b"megatron_rl" in command and b"train" in command and f"name={run.name}".encode() in command
        if is_ours and command[0].endswith(b"python") and f"RANK={rank}".encode() in environment:
            return int(process.name)
    return None


def wait_for_attempt(job: Job, number: int) -> None:
    job.wait_for_log(f"attempt {number},")
    wait_for(lambda: job.log.partition(f"attempt {number},")[2].count("started 2 ranks") > 0, "ranks", lambda: job.log)


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def stand_in(site, run: Path, trains: str) -> dict[str, str]:
    """The environment of a job whose Python takes the recipe of ``run`` for good and does ``trains`` instead of
    training, a piece of bash; for everything else it is Python."""
    check = f'*megatron_rl\\ check*) echo "run  3 steps, 3 updates, into {run}" ;;'
    train = f"*megatron_rl\\ train*)\n{trains}\n;;"
    python = site.program("python", f'run="{run}"\ncase "$*" in {check} {train} *) exec "$REAL_PYTHON" "$@" ;; esac\n')
    return {"MRL_PYTHON": str(python), "REAL_PYTHON": site.environment()["MRL_PYTHON"]}


def test_a_job_survives_preemption_a_lost_rank_and_a_lost_node(site):
    """Four attempts at a stand-in: it stops when it is asked to, dies, waits for its node to be lost, and is done."""
    run = site.runs / "stand-in"
    stops = 'until [ -e "$run/STOP" ]; do sleep 0.1; done'
    restarts = (
        f'case ${{SLURM_RESTART_COUNT:-0}} in 0) {stops} ;; 1) exit 7 ;; 2) sleep 600 ;; *) echo 3 >"$run/DONE" ;; esac'
    )
    job = site.submit("train.sbatch", RECIPE, *site.settings(run.name), **stand_in(site, run, restarts))

    wait_for_attempt(job, 0)
    urgent = site.program("urgent.sbatch", "true\n")
    options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=urgent.log")
    preemptor = site.cluster.submit(urgent, cwd=site.folder, options=options)
    job.wait_for_log("stopped before the limit: requeueing, continues from none")
    assert preemptor.wait() == "COMPLETED"
    job.wait_for_log("a rank failed: requeueing, continues from none")

    wait_for_attempt(job, 2)
    site.cluster.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    wait_for(lambda: job.field("Restarts") == "3", "Slurm to requeue the job", lambda: job.log)
    site.cluster.run("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME", check=False)  # or it came back

    assert job.wait() == "COMPLETED", job.log
    assert f"complete: {run}" in job.log
    assert [path.name for path in site.attempts(run.name)] == [f"{job.number}-{n}" for n in range(4)]


def test_ranks_of_a_cancelled_job_end_and_it_stays_cancelled(site):
    run = site.runs / "left"
    waits = 'echo $$ >"$run/pid-$SLURM_NODEID"\nexec sleep 600'
    job = site.submit("train.sbatch", RECIPE, *site.settings(run.name), **stand_in(site, run, waits))
    pids = [run / f"pid-{node}" for node in range(2)]
    wait_for(lambda: all(path.is_file() and path.read_text() for path in pids), "the ranks", lambda: job.log)
    site.cluster.run("scancel", job.number)
    assert job.wait() == "CANCELLED", job.log
    wait_for(lambda: not any(Path("/proc", path.read_text().strip()).exists() for path in pids), "the ranks to end")
    assert job.field("Restarts") == "0"
    assert not (run / "DONE").exists()


@pytest.mark.slow
def test_a_run_survives_preemption_a_lost_rank_and_a_lost_node(site):
    """Four attempts, one run: every step is done once, and each attempt goes on where the one before had saved."""
    run = site.runs / "survivor"
    layout = ("learner.parallel.tensor=2", "learner.parallel.expert=2", QUICK_START)  # one model, over both nodes
    job = site.submit("train.sbatch", RECIPE, *site.settings("survivor", "num_steps=3", *layout))

    wait_for_attempt(job, 0)
    urgent = site.program("urgent.sbatch", "true\n")
    options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=urgent.log")
    preemptor = site.cluster.submit(urgent, cwd=site.folder, options=options)
    job.wait_for_log("stopped before the limit: requeueing, continues from step_00000001")
    assert steps(run) == [0]
    assert preemptor.wait() == "COMPLETED"

    wait_for_attempt(job, 1)
    wait_for(lambda: rank_process(run, 1) is not None, "rank 1")
    os.kill(rank_process(run, 1), signal.SIGKILL)
    job.wait_for_log("a rank failed: requeueing, continues from step_00000001")
    wait_for(lambda: rank_process(run, 0) is None, "the peer to end")

    wait_for_attempt(job, 2)
    site.cluster.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    wait_for(lambda: job.field("Restarts") == "3", "Slurm to requeue the job", lambda: job.log)
    site.cluster.run("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME", check=False)  # or it came back

    assert job.wait() == "COMPLETED", job.log
    assert job.field("Restarts") == "3"
    assert steps(run) == [0, 1, 2]
    assert (run / "DONE").read_text() == "3\n"
    assert not (run / "STOP").exists()
    attempts = site.attempts("survivor")
    assert [path.name for path in attempts] == [f"{job.number}-{n}" for n in range(4)]
    assert "stopped on request after step 0" in (attempts[0] / "rank-000.log").read_text()
    assert "continues from step 1" in (attempts[3] / "rank-000.log").read_text()
    assert (run / "slurm" / "latest").resolve() == attempts[3]

    # A job of the same run that was queued behind it, by the script that checks before it submits.
    submit = [site.repo / "slurm" / "submit.sh", "--nodes=2", site.repo / "slurm" / "train.sbatch", RECIPE]
    said = site.cluster.run(
        *submit, *site.settings("survivor", "num_steps=3", *layout), cwd=site.folder, env=site.environment()
    )
    second = Job(site.cluster, said.split()[-1], site.folder)
    assert second.field("JobName") == "survivor"
    assert second.wait() == "COMPLETED"
    assert "nothing to do" in second.log
    assert len(site.attempts("survivor")) == 4


@pytest.mark.slow
def test_smoke_in_a_container_then_evaluation(site):
    """`--smoke`: two steps under a name of its own. The stand-in for apptainer runs its command without a container."""
    site.program("apptainer", 'printf "%s\\n" "$*" >>"$(dirname "$0")/calls"\nshift 7\nexec "$@"\n')
    image = site.folder / "image.sif"
    image.touch()
    job = site.submit(
        "train.sbatch",
        RECIPE,
        "--smoke",
        *site.settings("big"),
        MRL_PYTHON=sys.executable,
        MRL_CONTAINER=str(image),
        MRL_MOUNTS="/data:/data",
        MRL_NETWORK_MIB="1",
    )
    assert job.wait() == "COMPLETED", job.log
    run = site.runs / f"big-smoke-{job.number}"
    assert steps(run) == [0, 1]
    assert "preflight: 2 nodes ok" in job.log
    assert re.search(
        r"preflight: network: slowest link \d+\.\d+ GiB/s, all_reduce of 1 MiB over 2 nodes \d+\.\d+ GiB/s\n", job.log
    )
    calls = (site.programs / "calls").read_text().splitlines()
    assert len(calls) == 1 + 2 + 2 + 2  # check once, preflight and its network per node, training per rank
    for call in calls:
        assert call.startswith(
            f"exec --nv --bind {site.repo}:{site.repo},{site.folder}:{site.folder},/data:/data --pwd "
        )

    output = site.folder / "figures of step 2.json"
    evaluation = site.submit(
        "eval.sbatch",
        RECIPE,
        "--checkpoint",
        str(run / "checkpoints" / "step_00000002"),
        "--output",
        str(output),
        *site.settings("big", "validation.limit=8"),
    )
    assert evaluation.wait() == "COMPLETED", evaluation.log
    figures = json.loads(output.read_text())
    assert figures["checkpoint"].endswith("step_00000002")
    assert figures["val/validation/num_problems"] == 8
    assert figures["val/validation/avg@1"] * 8 in range(9)


@pytest.mark.slow
def test_an_alarm_ends_the_job_for_good_but_a_step_that_takes_too_long_does_not(site):
    """The controller does not answer the first request to requeue."""
    silent = 'asked=$(dirname "$0")/asked\n[ -e "$asked" ] || { touch "$asked" && exit 1; }'
    site.ahead_of("scontrol", f'if [ "$1" = requeue ]; then\n{silent}\nfi\n')
    alarm = "monitor.alarms=[{name: always, metric: actor/grad_norm, above: -1.0, then: [stop]}]"
    job = site.submit("train.sbatch", RECIPE, *site.settings("alarmed", alarm, QUICK_START), MRL_STOP_SECONDS="0")
    wait_for_attempt(job, 0)
    site.cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # no step is done yet, and no time is left
    job.wait_for_log("the step at hand takes too long")
    job.wait_for_log("ended before the limit, without a save: requeueing, continues from none")
    assert job.wait() == "FAILED", job.log
    assert job.field("ExitCode") == "3:0", job.log
    assert job.field("Restarts") == "1"
    assert (site.programs / "asked").exists()
    assert steps(site.runs / "alarmed") == [0]
    assert (site.runs / "alarmed" / "checkpoints" / "step_00000001").is_dir()


@pytest.mark.slow
def test_a_job_that_is_cancelled_while_it_requeues_itself_stays_cancelled(site):
    """Ranks of a cancelled job can end before the job's script is signalled: it takes them for lost ones."""
    running = "scontrol show job $SLURM_JOB_ID | grep -q JobState=RUNNING"
    cancelled = f"trap '' TERM\nscancel $SLURM_JOB_ID\nwhile {running}; do sleep 0.1; done"
    site.ahead_of("scontrol", f'if [ "$1" = requeue ]; then\n{cancelled}\nfi\n')
    without_ranks = site.program("python", f'[[ "$*" == *" train "* ]] && exit 1\nexec "{site.python}" "$@"\n')
    job = site.submit("train.sbatch", RECIPE, *site.settings("undecided"), MRL_PYTHON=str(without_ranks))
    job.wait_for_log("a rank failed: requeueing")
    assert job.wait() == "CANCELLED", job.log
    assert job.field("Restarts") == "0"


def test_a_bad_recipe_is_refused_by_the_job_and_before_it(site):
    """The job's `check` runs in the container too: the stand-in for pyxis takes its options off srun's."""
    keep = 'for a; do if [[ $a == *container* ]]; then echo "$a" >>"$(dirname "$0")/flags"; else keep+=("$a"); fi; done'
    site.ahead_of("srun", f'keep=()\n{keep}\nset -- "${{keep[@]}}"\n')
    settings = site.settings("bad", "learner.parallel.tensor=3")
    job = site.submit("train.sbatch", RECIPE, *settings, MRL_CONTAINER="registry/image:1")
    assert job.wait() == "FAILED", job.log
    assert job.field("ExitCode") == "2:0"
    assert job.field("Restarts") == "0"
    assert "learner.parallel.tensor: 3 does not divide the number of attention heads" in job.log
    assert not (site.runs / "bad").exists()
    mounts = f"--container-mounts={site.repo}:{site.repo},{site.folder}:{site.folder}"
    flags = ["--container-image=registry/image:1", mounts, f"--container-workdir={site.folder}"]
    assert (site.programs / "flags").read_text().splitlines() == [*flags, "--no-container-mount-home"]

    queued = site.cluster.run("squeue", "-h", "--states=all", "-o", "%i")
    command = [site.repo / "slurm" / "submit.sh", "--nodes=2", site.repo / "slurm" / "train.sbatch", RECIPE, *settings]
    environment = site.cluster.environment | site.environment()
    done = subprocess.run(command, cwd=site.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "learner.parallel.tensor" in done.stderr
    assert site.cluster.run("squeue", "-h", "--states=all", "-o", "%i") == queued


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((), {}, "the recipe (a YAML file) comes first"),
        ((RECIPE, "--sett", "a=b"), {}, "unknown argument --sett"),
        ((RECIPE,), {"MRL_SITE": "/no/such/site.sh"}, "MRL_SITE=/no/such/site.sh: no such file"),
        ((RECIPE,), {"MRL_RANKS_PER_NODE": ""}, "submit with --gpus-per-node=2"),
    ],
    ids=["no recipe", "unknown argument", "no site file", "GPUs not asked for"],
)
def test_what_is_missing_is_said(site, arguments, environment, message):
    job = site.submit("train.sbatch", *arguments, **environment)
    assert job.wait() == "FAILED"
    assert message in job.log
    assert job.field("Restarts") == "0"


def test_preflight_names_the_bad_node(site):
    """A node whose driver lists one GPU fewer than Slurm gave. Neither node of this cluster has a real one."""
    query = 'case "$*" in *compute-apps*) exit 0 ;; esac\necho 0\n'
    site.program("nvidia-smi", query + f"[ $SLURMD_NODENAME = {NODES[1]} ] || echo 0\n")
    python = site.program("python", 'case "$*" in *device_count*) echo 2 ;; *) exec "$REAL_PYTHON" "$@" ;; esac\n')
    environment = {"MRL_PYTHON": str(python), "REAL_PYTHON": site.environment()["MRL_PYTHON"], "MRL_RANKS_PER_NODE": ""}
    options = ("--nodes=2", "--gpus-per-node=2")
    job = site.submit("train.sbatch", RECIPE, *site.settings("sick"), options=options, **environment)
    assert job.wait() == "FAILED", job.log
    assert "layout  4 ranks" in job.log
    assert f"preflight: {NODES[1]}: 1 GPUs, Slurm says 2" in job.log
    assert f"--exclude={NODES[1]}\n" in job.log
    assert job.field("Restarts") == "0"
    assert not list((site.runs / "sick").glob("slurm/*/rank-*"))


@pytest.mark.slow
def test_preflight_names_a_node_that_the_network_does_not_reach(site):
    cut_off = f'case "$*" in *network.py*) [ $SLURMD_NODENAME != {NODES[1]} ] || exit 1 ;; esac\n'
    python = site.program("python", cut_off + 'exec "$REAL_PYTHON" "$@"\n')
    environment = {"MRL_PYTHON": str(python), "REAL_PYTHON": site.environment()["MRL_PYTHON"]}
    environment |= {"MRL_NETWORK_MIB": "1", "MRL_NETWORK_SECONDS": "3"}
    job = site.submit("train.sbatch", RECIPE, *site.settings("apart"), **environment)
    assert job.wait() == "FAILED", job.log
    assert f"preflight: network: {NODES[1]}: does not reach the first node" in job.log
    assert f"--exclude={NODES[1]}\n" in job.log
    assert not list((site.runs / "apart").glob("slurm/*/rank-*"))


@pytest.mark.slow
def test_restarts_without_progress_are_few(site):
    """A program that dies at once is started again as often as allowed, and no more."""
    python = site.program("python", 'case "$*" in *megatron_rl\\ train*) exit 7 ;; esac\nexec "$REAL_PYTHON" "$@"\n')
    environment = {"MRL_PYTHON": str(python), "REAL_PYTHON": site.environment()["MRL_PYTHON"], "MRL_MAX_RESTARTS": "1"}
    job = site.submit("train.sbatch", RECIPE, *site.settings("dying"), **environment)
    assert job.wait() == "FAILED", job.log
    assert job.field("Restarts") == "1"
    assert "no checkpoint since none in 2 attempts" in job.log


def test_a_new_run_begins_from_the_checkpoint_that_is_named_until_it_has_one_of_its_own(site):
    """Without training: the program in the place of Python leaves a checkpoint in its first attempt, and then dies."""
    run = site.runs / "arm"
    own = f'"{run}/checkpoints/step_00000007"'
    dies = f"mkdir -p {own} && touch {own}/trainer.json\nexit 7"
    environment = stand_in(site, run, dies) | {"MRL_MAX_RESTARTS": "0"}
    job = site.submit(
        "train.sbatch", RECIPE, "--begin-from", "/of/another/step_00000006", *site.settings("arm"), **environment
    )
    assert job.wait() == "FAILED", job.log
    commands = [path.read_text().splitlines()[0] for path in sorted(run.glob("slurm/*-*/about.txt"))]
    assert [line.endswith(" --resume /of/another/step_00000006") for line in commands] == [True, False], job.log
    assert not any("--begin-from" in line for line in commands)


def test_two_jobs_never_share_a_run(site):
    sleep = site.program("sleep.sbatch", "sleep 600\n")
    owner = site.cluster.submit(sleep, cwd=site.folder, options=("--output=sleep.log",))
    wait_for(lambda: owner.field("JobState") == "RUNNING", "the other job")
    folder = site.runs / "shared" / "slurm"
    folder.mkdir(parents=True)
    (folder / "owner").write_text(f"{owner.number}\n")
    job = site.submit("train.sbatch", RECIPE, *site.settings("shared"), options=("--nodes=1",))
    assert job.wait() == "FAILED"
    assert f"job {owner.number} is running {folder.parent}" in job.log
    site.cluster.run("scancel", owner.number)
