"""What can be said of the scripts without a cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY

FOLDER = REPOSITORY / "slurm"
BATCH = sorted(FOLDER.glob("*.sbatch"))
SCRIPTS = sorted([*BATCH, *FOLDER.rglob("*.sh")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_bash_can_read_it(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_field_of_a_job_is_not_taken_from_its_name(tmp_path):
    """As `scontrol show job` writes it, of a job whose name and comment hold other fields."""
    record = """JobId=7 JobName=x EndTime=1999-01-01 JobState=DONE
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   StartTime=2026-01-01T00:00:00 EndTime=2026-01-02T00:00:00 Deadline=N/A
   Comment=StartTime=1 EndTime=2
"""
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\n{record}END\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = f"home=x SLURM_JOB_ID=7; source {FOLDER}/lib/job.sh; job_field EndTime; job_field JobState"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["2026-01-02T00:00:00", "RUNNING"], done.stderr


@pytest.fixture(scope="module")
def network():
    """The program that measures the network, as a module."""
    spec = importlib.util.spec_from_file_location("network", FOLDER / "lib" / "network.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("speeds", "floor", "bad"),
    [
        ((10, 9, 11, 10), 0, set()),
        ((10, 1, 1, 10), 0, {"c"}),  # c's two links; its neighbours have a good one each
        ((10, 1, 10, 10), 0, set()),  # one slow link, no slow node
        ((10, 0, 0, 10), 0, {"c"}),
        ((10, 0, 10, 10), 0, {"b", "c"}),  # either end
        ((10, 9, 11, 10), 20, {"a", "b", "c", "d"}),
    ],
)
def test_a_node_is_judged_by_its_better_link(network, speeds, floor, bad):
    nodes = ["a", "b", "c", "d"]
    links = dict(zip([(0, 1), (1, 2), (2, 3), (3, 0)], map(float, speeds), strict=True))
    assert set(network.judge(links, nodes, floor)) == bad


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_the_header_leaves_to_the_user_what_is_the_users(script):
    """Size, time, account and partition belong on the command line; a message must not hang on another run's log."""
    options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.MULTILINE)
    assert not {"account", "partition", "qos", "time", "nodes", "gpus-per-node", "gres", "mail-user"} & set(options)
    assert {"exclusive", "mem", "requeue", "open-mode", "output"} <= set(options)


def test_every_variable_is_documented():
    programs = [*SCRIPTS, *FOLDER.rglob("*.py")]
    used = {name for script in programs for name in re.findall(r"\bMRL_[A-Z_]+", script.read_text())}
    documented = set(re.findall(r"\bMRL_[A-Z_]+", (FOLDER / "README.md").read_text()))
    assert used == documented


def test_site_samples_load_in_strict_mode():
    for sample in sorted((FOLDER / "env").iterdir()):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", f"source '{sample}'"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), Path(sample).name


def test_the_submitting_script_has_a_help():
    done = subprocess.run([REPOSITORY / "slurm" / "submit.sh", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("slurm/submit.sh [SBATCH OPTIONS]")
    assert "#" not in done.stdout


# What Slurm's programs do here: both nodes are this machine, and a step runs its command once.
SRUN = """while [[ $1 == --* ]]; do shift; done
SLURMD_NODENAME=first SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_NODEID=0 exec "$@"
"""
SCONTROL = 'printf "first\\nsecond\\n"\n'
# In the place of Python: hangs where HANGS is among its arguments, says what it was asked for otherwise.
PYTHON = 'case " $* " in *" $HANGS "*) exec sleep 1000 ;; esac\nprintf "asked: %s\\n" "$*"\n'


@pytest.mark.parametrize("hangs", ["--ranks", "--job"], ids=["on a node", "between ranks"])
def test_a_doctor_that_hangs_is_ended_and_the_page_is_made(hangs, tmp_path):
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MRL_PYTHON": str(tmp_path / "python"), "HANGS": hangs}
    environment |= {"MRL_HOME": str(REPOSITORY), "MRL_DOCTOR_SECONDS": "4", "MRL_RANKS_PER_NODE": "1"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first,second", "SLURM_CPUS_ON_NODE": "2"}
    done = subprocess.run(
        [FOLDER / "doctor.sbatch"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("the nodes' own checks were ended after 3 s" in done.stdout) == (hangs == "--ranks")
    status = 0 if hangs == "--ranks" else 128 + signal.SIGTERM  # of the one rank that `srun` starts here
    assert f"ranks ended: failed (exit statuses: {status} of 2)" in done.stdout, done.stdout
    (page,) = [line for line in done.stdout.splitlines() if line.startswith("asked: ") and "--merge" in line]
    assert "--expect first,second,between nodes" in page


@pytest.fixture
def submit(tmp_path):
    """`submit.sh` with a stand-in for sbatch: gives the exit status, what was said and what sbatch was given."""
    check = 'case "$*" in "-m megatron_rl check "*) set -- "$@" --no-transformers ;; esac'
    programs = {"sbatch": f'printf "%s\\n" "$*" >>{tmp_path}/given; echo "Submitted batch job 7"', "scontrol": ":"}
    programs["python"] = f'{check}\nexec {sys.executable} "$@"'
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def call(*words, **more):
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        environment = os.environ | {
            "PATH": path,
            "MRL_PYTHON": str(tmp_path / "python"),
            "OMP_NUM_THREADS": "1",
            **more,
        }
        command = [str(FOLDER / "submit.sh"), *words]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        given = tmp_path / "given"
        return done.returncode, done.stdout + done.stderr, given.read_text() if given.exists() else ""

    return call


TRAIN, TINY = str(FOLDER / "train.sbatch"), "recipes/tiny/grpo.yaml"
TENSOR = ["--set", "learner.parallel.tensor=2", "--set", "learner.parallel.expert=1"]
FP8 = "rollout.quantization={weights: fp8, block: [16, 16]}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes=1", TRAIN, TINY, "--smokee"], "unknown argument --smokee"),
        (["--nodes=1", TRAIN, TINY, "smoke"], "unknown argument smoke"),
        (["--nodes=1", TRAIN, TINY, "--checkpoint", "."], "unknown argument --checkpoint"),
        (["--nodes=1", TRAIN, TINY, "--set"], "--set: a value comes after it"),
        (["--nodes=1", TRAIN, TINY, "--begin-from", "none"], "--begin-from none: no such folder"),
        ([str(FOLDER / "eval.sbatch"), TINY], "--checkpoint (not given): no such folder"),
        ([str(FOLDER / "none.sbatch"), TINY], "none.sbatch: no such file"),
        (["--nodes=1", "--gpus-per-node=3", TRAIN, TINY, *TENSOR], "does not divide the number of ranks (3)"),
        (["-N", "1", "--gpus-per-node", "h100:3", TRAIN, TINY, *TENSOR], "does not divide the number of ranks (3)"),
        (["-N3", "--gres=gpu:h100:1", TRAIN, TINY, *TENSOR], "does not divide the number of ranks (3)"),
        (["--nodes=1", "--gpus-per-node=x", TRAIN, TINY], "x ranks per node"),
        (["--nodes=1", str(FOLDER / "train_servers.sbatch"), TINY], "none is left to learn"),
        (["--nodes=1", "--gpus-per-node=1", TRAIN, TINY, "--set", FP8], "on CUDA  this recipe cannot run"),
    ],
)
def test_what_a_job_would_refuse_is_refused_before_the_queue(submit, words, said):
    more = {"MRL_RANKS_PER_NODE": "1"} if "train_servers" in str(words) else {}
    status, text, given = submit(*words, **more)
    assert (status, said in text, given) == (2, True, ""), text


def test_a_good_recipe_is_submitted_as_it_was_typed(submit):
    status, text, given = submit("--nodes=1", "--gpus-per-node=4", TRAIN, TINY, *TENSOR, "--smoke")
    assert status == 0, text
    assert given.split("--dependency=singleton ")[1] == (
        f"--nodes=1 --gpus-per-node=4 {TRAIN} {TINY} {' '.join(TENSOR)} --smoke\n"
    )
