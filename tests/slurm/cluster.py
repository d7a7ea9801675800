"""A throw-away Slurm on this host: one controller, two nodes on loopback addresses, all of its state in one folder."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.support.patience import PATIENCE_S

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
# Names that are addresses: `scontrol show hostnames` then gives what ranks can connect to, without /etc/hosts.
NODES = ("127.0.0.11", "127.0.0.12")
GPUS_PER_NODE = 2
PORTS = range(12_000, 19_000, 200)  # the first of each part of 200, all below the ephemeral range

# cred_expire: a requeued job waits for its credentials to expire, two minutes by default.
# preempt_send_user_signal and REQUEUE: what a site with a preemptable partition has.
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SrunPortRange={first}-{last}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/pid/slurmctld
SlurmdPidFile={folder}/pid/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
SlurmdTimeout=120
KillWait=5
MinJobAge=3600
ReturnToService=2
GresTypes=gpu
NodeName={nodes} NodeHostname={nodes} NodeAddr={nodes} Port=[{node_first}-{node_last}] CPUs=4 RealMemory=16000 \
Gres=gpu:{gpus}
PartitionName=batch Nodes=ALL Default=YES MaxTime=1-0 PriorityTier=1 PreemptMode=REQUEUE GraceTime=600
PartitionName=urgent Nodes=ALL MaxTime=1-0 PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class SlurmError(RuntimeError):
    """The cluster did not do what it was asked; the message has its words."""


def reserve_ports() -> tuple[int, socket.socket]:
    """The first of 200 ports, and a socket that keeps them from other clusters of these tests until it is closed.

    A cluster whose test run was killed lives on and keeps its own.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with ExitStack() as stack:
            reservation, *probes = (stack.enter_context(socket.socket()) for _ in range(2 + len(NODES)))
            try:
                reservation.bind(("", port + 9))  # below the ports of srun
                for used, probe in enumerate(probes, port):  # the controller's, and one a node
                    probe.bind(("", used))
            except OSError:
                continue
            return port, reservation.dup()
    raise SlurmError("ports 12000 to 18999: each part of 200 has one in use; stop the clusters that killed runs left")


class Cluster:
    """Start it with ``with``. Commands run in its environment; jobs are looked at through `job`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port, self._reservation = reserve_ports()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "MRL_"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        for name in ("state", "log", "pid", "dev", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        nodes = ",".join(NODES)
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        values = {"folder": folder, "user": user, "port": port, "first": port + 10, "last": port + 190, "nodes": nodes}
        values |= {"node_first": port + 1, "node_last": port + len(NODES), "gpus": GPUS_PER_NODE}
        (folder / "slurm.conf").write_text(CONFIG.format(**values))
        for gpu in range(GPUS_PER_NODE):  # a GPU must be a character device of its own name
            (folder / "dev" / f"gpu{gpu}").symlink_to("/dev/null")
        (folder / "gres.conf").write_text(f"NodeName={nodes} Name=gpu File={folder}/dev/gpu[0-{GPUS_PER_NODE - 1}]\n")

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = {name: self.folder / f"munge.{name}" for name in ("sock", "seed")}
        self.run(
            "munged",
            "--force",  # its folder is private to this user
            f"--key-file={key}",
            f"--socket={munge['sock']}",
            f"--seed-file={munge['seed']}",
            f"--pid-file={self.folder}/pid/munged",
            f"--log-file={self.folder}/log/munged.log",
        )
        self.run("slurmctld")
        for node in NODES:
            self.run("slurmd", "-N", node)
        idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        wait_for(lambda: self._says(*idle) == str(len(NODES)), "idle nodes", self._logs)
        self.run("srun", f"-N{len(NODES)}", "true")  # "idle" alone does not prove that a node takes work

    def _logs(self) -> str:
        logs = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in logs)

    def _says(self, *command: str) -> str:
        return self.run(*command, check=False).strip()

    def end_jobs(self) -> None:
        """Leave no job behind: the nodes are the next test's."""
        if not self._says("squeue", "-h"):
            return
        self.run("scancel", "--signal=KILL", "--full", "--user", str(os.getuid()), check=False)
        self.run("scancel", "--user", str(os.getuid()), check=False)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._says("squeue", "-h"):
            time.sleep(0.1)

    def _stop(self) -> None:
        if (self.folder / "pid" / "slurmctld").exists():
            self.end_jobs()
        for pid_file in sorted((self.folder / "pid").iterdir()):
            try:
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
            except (ValueError, ProcessLookupError):
                continue
        self._reservation.close()

    def run(self, *command: str | Path, check: bool = True, **options) -> str:
        """Standard output of a command in the cluster's environment. Raises `SlurmError` where it fails."""
        environment = self.environment | options.pop("env", {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, **options)
        if check and done.returncode:
            raise SlurmError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: Path, *arguments: str, cwd: Path, options: tuple[str, ...] = (), **env: str) -> Job:
        out = self.run("sbatch", "--parsable", *options, str(script), *arguments, cwd=cwd, env=env)
        return Job(self, out.strip().splitlines()[-1], cwd)


class Job:
    def __init__(self, cluster: Cluster, number: str, cwd: Path) -> None:
        self.cluster, self.number, self.cwd = cluster, number, cwd

    def field(self, name: str) -> str:
        """A field of `scontrol show job`, such as JobState, ExitCode, Restarts."""
        show = ("scontrol", "show", "job", self.number)
        record = self.cluster.run(*show, check=False) or self.cluster.run(*show)  # a busy controller may hang up
        return next(word.partition("=")[2] for word in record.split() if word.startswith(f"{name}="))

    @property
    def log(self) -> str:
        """What the batch script said, all attempts."""
        file = self.cwd / f"{self.field('JobName')}-{self.number}.log"
        return file.read_text() if file.exists() else ""

    def wait(self) -> str:
        """The state in which the job ended for good."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_for(lambda: self.field("JobState") in ended, f"job {self.number} to end", lambda: self.log)
        return self.field("JobState")

    def wait_for_log(self, text: str) -> None:
        """Until the batch script said ``text``."""

        def said() -> bool:
            if text in self.log:
                return True
            if self.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
                raise SlurmError(f"job {self.number} ended without {text!r}:\n{self.log}")
            return False

        wait_for(said, f"{text!r} in the log of job {self.number}", lambda: self.log)


def wait_for(condition: Callable[[], bool], what: str, detail: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SlurmError(f"waited {PATIENCE_S} s for {what}\n{detail()}")
        time.sleep(0.2)
