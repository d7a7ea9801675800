"""Runs a study: each run is a separate process, a few at a time; interrupted runs are continued.

Before the first run the study's fixed parts are registered. Later changes of file or commit are refused.
The record is ``root/registered.json``: the decisive parts of the study file with their SHA-256, and the commit. Words,
labels and drawings may change freely.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_rl
from megatron_rl.config import Recipe
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.instruments.lab.jobs import FINISHED, Job, LoadedStudy, State, differing_keys, exit_file, state_of
from megatron_rl.instruments.lab.study import IDENTITY_KEYS, Study
from megatron_rl.monitor.run_directory import RunDirectory, code_of, git_state, name_of_code
from megatron_rl.shipped import checkout

FILE = "registered.json"


@dataclass
class Registration:
    """The fixed parts of a study when its first run began."""

    study: dict[str, Any]  # `Study.commitment`
    sha256: str
    code: str  # `code_version`

    @classmethod
    def of(cls, values: dict[str, Any]) -> Registration:
        """Return the registration in a file's ``values``. Raises `ValueError` if the study was amended later."""
        if values.get("amendments"):
            raise ValueError("the study was amended after its first run; commit acd25ad reads such runs")
        return cls(values["study"], values["sha256"], values["code"])

    def save(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_text(json.dumps(vars(self), indent=1) + "\n")

    def history(self, study: Study) -> Iterator[str]:
        """Yield sentences for the report on when the study was fixed and changed."""
        yield f"Fixed before the runs: study {self.sha256[:12]}, code {self.code}."
        if keys := changed_keys(self.study, study.commitment()):
            yield f"**The study file was changed after the runs began: {', '.join(keys)}.**"


def changed_keys(before: Any, after: Any, at: str = "") -> list[str]:
    """Return the dotted keys, down to two levels, in which two commitments differ."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict) and at.count(".") < 2:
        return [
            key
            for name in sorted(before.keys() | after.keys())
            for key in changed_keys(before.get(name), after.get(name), f"{at}.{name}" if at else name)
        ]
    return [at]


def code_version() -> str:
    """Return the version or commit, with "+changes" if tracked files differ."""
    state = git_state(Path(megatron_rl.__file__).parent)
    if state is None:
        return megatron_rl.__version__
    return name_of_code(state)


def read_registration(root: Path) -> Registration | None:
    file = root / FILE
    if not file.is_file():
        return None
    try:
        return Registration.of(json.loads(file.read_text()))
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error


def register(loaded: LoadedStudy, root: Path, other_code: bool = False) -> Registration:
    """Write the study's fixed parts to disk before the first run; afterwards compare study and code with them.

    Raises `InputError` if a decisive part changed, or if the code changed and ``other_code`` is false.
    """
    commitment, code = loaded.study.commitment(), code_version()
    registration = read_registration(root)
    if registration is None:
        digest = hashlib.sha256(json.dumps(commitment, sort_keys=True).encode()).hexdigest()
        registration = Registration(commitment, digest, code)
        registration.save(root)
        return registration
    if keys := changed_keys(registration.study, commitment):
        raise InputError(
            f"study {loaded.path}: {', '.join(keys)} changed since the first run of {root} ({FILE} there); restore "
            "them, or give another folder with --out, which --reuse fills with the runs that are the same"
        )
    if code != registration.code and not other_code:
        raise InputError(
            f"{root}: the runs there were begun with code {registration.code}, this is {code}; check that commit out, "
            "give another folder with --out, or run with --other-code: the report then names the code of each run"
        )
    return registration


REUSED = "REUSED"  # file in a run's folder that names the run that it was copied from
PACKED = "PACKED"  # file in a run's folder that `archive` made: the digest of all its metrics
POLL_SECONDS = 0.5
STOP_SECONDS = 60  # time for a stopped run to finish its step and write a checkpoint


@dataclass
class Process:
    """A running process of a run."""

    job: Job
    handle: subprocess.Popen
    started: float
    asked_to_stop: bool = False


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Lock the folder of runs. Raises `InputError` if another process has the lock."""
    with (root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{root}: another `lab run` works here; wait for it, or give another --out") from None
        yield


def _code_of(directory: RunDirectory) -> str | None:
    return code_of(json.loads(directory.environment.read_text())) if directory.environment.is_file() else None


class StudyRunner:
    """Runs the missing runs of a study, `num_parallel` processes at a time.

    A run's folder is ``root/<arm>-seed<n>``, its output ``root/<arm>-seed<n>.log``, its exit status
    ``root/<arm>-seed<n>.exit.json``.
    """

    def __init__(
        self,
        study: LoadedStudy,
        root: Path,
        num_parallel: int,
        command: Callable[[Job], list[str]] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepare a runner. ``command``: returns the command of a run; default: ``-m megatron_rl train``."""
        self.study, self.root, self.num_parallel, self.say = study, root, num_parallel, say
        self.command = command or self._train
        self.running: list[Process] = []
        self.stopping = False

    def _train(self, job: Job) -> list[str]:
        return [sys.executable, "-m", "megatron_rl", "train", str(self.study.base), *job.settings, "--resume", "auto"]

    def state(self, job: Job) -> State:
        """Return the state of ``job`` on disk."""
        return state_of(self.root / job.name)

    def refuse_other_recipes(self, jobs: Sequence[Job]) -> None:
        """Raise `InputError` if a run on disk has another recipe than the study now has."""
        problems = []
        for job in jobs:
            file = RunDirectory(self.root / job.name).recipe
            if file.is_file():
                keys = differing_keys(Recipe.model_validate(parse(file.read_text())[0]), self.study.recipe(job))
                if keys:
                    problems.append(f"{file.parent}: was run with another {', '.join(keys)}")
        if problems:
            raise InputError(
                f"study {self.study.path}: the folder of runs does not fit it\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + "\n  delete these runs to repeat them, or give another folder with --out"
            )

    def reuse(self, jobs: Sequence[Job], folders: Sequence[Path], code: str | None = None) -> None:
        """Copy the records of finished runs below ``folders`` with the recipe of a missing job, except the name.

        Runs of the same code on a CPU are deterministic, so the results are the same. ``code``: the required
        `code_version`; None: any. `REUSED` records the origin of a run with another name.
        """
        recipes = {
            file.parent: Recipe.model_validate(parse(file.read_text())[0])
            for folder in folders
            for file in sorted(folder.glob("*/recipe.resolved.yaml"))
            if state_of(file.parent) in FINISHED and code in (None, _code_of(RunDirectory(file.parent)))
        }
        for job in jobs:
            if self.state(job) in FINISHED:
                continue
            own_recipe = self.study.recipe(job)
            for source, recipe in recipes.items():
                if not differing_keys(recipe, own_recipe, ignored=IDENTITY_KEYS):
                    shutil.copytree(
                        source,
                        self.root / job.name,
                        ignore=shutil.ignore_patterns("checkpoints", "batches", "plots", "tensorboard"),
                        dirs_exist_ok=True,
                    )
                    if (noted := exit_file(source)).is_file():
                        shutil.copy(noted, self._exit_file(job))
                    packed = json.loads((source / PACKED).read_text()) if (source / PACKED).is_file() else {}
                    origin = f"{packed['file']}, {source.name}" if packed else f"{source}"
                    if packed.get("study") != self.study.study.name or source.name != job.name:  # else it is this run
                        (self.root / job.name / REUSED).write_text(f"{origin}\n")
                    self.say(f"{job}: reused {origin}")
                    break

    def run(self, jobs: Sequence[Job], progress_seconds: float = 30.0) -> dict[str, State]:
        """Run all unfinished jobs and return the state of every job; a failing run does not stop the others."""
        self.refuse_other_recipes(jobs)
        self.root.mkdir(parents=True, exist_ok=True)
        with only_one(self.root):
            self._run(jobs, progress_seconds)
        return {job.name: self.state(job) for job in jobs}

    def _run(self, jobs: Sequence[Job], progress_seconds: float) -> None:
        waiting = [job for job in jobs if self.state(job) not in FINISHED]
        self.say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} already finished; {self.num_parallel} at a time")
        last_said = time.monotonic()
        try:
            while self.running or (waiting and not self.stopping):
                while waiting and not self.stopping and len(self.running) < self.num_parallel:
                    self._start(waiting.pop(0))
                if self.stopping:
                    self._ask_to_stop()
                time.sleep(POLL_SECONDS)
                self._collect(len(waiting))
                if time.monotonic() - last_said > progress_seconds:
                    last_said = time.monotonic()
                    self.say("  " + ", ".join(f"{p.job} {self._progress(p.job)}" for p in self.running))
        finally:
            self._end_all()

    def stop(self) -> None:
        """Start no more runs and let running ones save and end; safe in a signal handler."""
        self.stopping = True

    def _ask_to_stop(self) -> None:
        for process in self.running:
            if not process.asked_to_stop:  # only once: a second signal could interrupt a run that is saving
                process.handle.terminate()
                process.asked_to_stop = True

    def _start(self, job: Job) -> None:
        self._exit_file(job).unlink(missing_ok=True)
        with (self.root / f"{job.name}.log").open("ab") as log:
            handle = subprocess.Popen(
                self.command(job),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches the runner, which stops its runs in order
            )
        self.running.append(Process(job, handle, time.monotonic()))
        self.say(f"start {job}")

    def _collect(self, num_waiting: int) -> None:
        for process in [p for p in self.running if p.handle.poll() is not None]:
            self.running.remove(process)
            self._note_end(process)
            seconds = time.monotonic() - process.started
            left = num_waiting + len(self.running)
            self.say(f"{self.state(process.job)} {process.job} after {seconds:.0f} s; {left} to go{self._why(process)}")

    def _note_end(self, process: Process) -> None:
        record = {"status": process.handle.returncode, "seconds": round(time.monotonic() - process.started, 1)}
        self._exit_file(process.job).write_text(json.dumps(record) + "\n")

    def _why(self, process: Process) -> str:
        if process.handle.returncode == EXIT_DONE:
            return ""
        lines = (self.root / f"{process.job}.log").read_text(errors="replace").strip().splitlines()
        return f" (exit status {process.handle.returncode}: {lines[-1] if lines else 'no output'})"

    def _end_all(self) -> None:
        """End all running processes, for any end of the loop."""
        self._ask_to_stop()
        for process in self.running:
            try:
                process.handle.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.handle.kill()
                process.handle.wait()
            self._note_end(process)
        self.running.clear()

    def _progress(self, job: Job) -> str:
        file = RunDirectory(self.root / job.name).metrics
        num_steps = self.study.recipe(job).num_steps
        done = sum(1 for line in file.open() if line.endswith("\n")) if file.is_file() else 0
        return f"{min(self.study.begin + done, num_steps)}/{num_steps}"

    def _exit_file(self, job: Job) -> Path:
        return exit_file(self.root / job.name)


# Studies on a Slurm cluster: every run is a job of slurm/train.sbatch.


def job_name(runner: StudyRunner, job: Job) -> str:
    """Return the name of the Slurm job, which includes the study: arms of two studies may have the same name."""
    return f"{runner.study.study.name}-{job.name}"


def submit(runner: StudyRunner, jobs: Sequence[Job], options: Sequence[str]) -> dict[str, str]:
    """Submit runs that are neither finished nor in the queue; return the state of each run, or "in the queue".

    ``options`` are sbatch's: nodes, GPUs, time, account. Raises `InputError` if slurm/submit.sh refuses a run, or
    without Slurm.
    """
    repository = checkout()
    if repository is None:
        raise InputError("--slurm: the scripts are in slurm/ of a checkout; this is the installed package")
    runner.refuse_other_recipes(jobs)
    runner.root.mkdir(parents=True, exist_ok=True)
    queued, states = set(_output(["squeue", "--me", "--noheader", "--format=%j"]).splitlines()), {}
    for job in jobs:
        state = runner.state(job)
        if job_name(runner, job) in queued or state in FINISHED:
            states[job.name] = state if state in FINISHED else "in the queue"
            continue
        output = _output(_command(repository, runner, job, options))
        states[job.name] = "in the queue"
        runner.say(f"{job}: {output.strip().splitlines()[-1]}")
    return states


def _command(repository: Path, runner: StudyRunner, job: Job, options: Sequence[str]) -> list[str]:
    submit, script = (str(repository / "slurm" / name) for name in ("submit.sh", "train.sbatch"))
    named = [f"--job-name={job_name(runner, job)}", *options]
    return [submit, *named, script, str(runner.study.base.resolve()), *job.settings]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise InputError(f"--slurm: {command[0]}: no such program here; run this on a login node") from None
    if done.returncode:
        raise InputError(f"{' '.join(command[:3])} … ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
