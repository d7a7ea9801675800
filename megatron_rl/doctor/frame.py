"""Runs checks, each in processes of its own that end with it.

One process of one check is `python -m megatron_rl.doctor.frame NAME SETTING OUTCOME`.

Every process calls the check and leaves its outcome in a file. Whatever it raises is a failure, and ends it with status
1; then the other ranks are ended, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_rl.doctor.checks import Check, Outcome, Result, Setting, failed, find, not_run
from megatron_rl.errors import EXIT_DONE, EXIT_FAULT, Fault, InputError
from megatron_rl.process.fp32_products import set_environment
from megatron_rl.process.host import write_whole
from megatron_rl.shipped import shipped

LOG_CHARACTERS = 4000
GRACE_S = 3.0  # for ranks that lost a peer, until they are ended: the first to fail has then printed its error
END_S = 5.0  # for a process to end that was killed
_POLL_S = 0.02
# A process that is no rank must not take itself for one of the job that `doctor` was started in.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def run_checks(
    checks: Sequence[Check],
    setting: Setting,
    seconds: float,
    say: Callable[[Result], None] = lambda result: None,
    begin: Callable[[list[Result], Check], None] = lambda results, check: None,
) -> list[Result]:
    """Every check, one after the other. ``seconds`` are dealt to them by their budgets.

    A check also has what those before it left. ``begin`` is called before each with the results so far, ``say`` after
    it with its own.
    """
    end, total, results = time.monotonic(), sum(check.budget_s for check in checks), []
    for check in checks:
        end += seconds * check.budget_s / total
        begin(results, check)
        results.append(run_check(check, setting, end - time.monotonic()))
        say(results[-1])
    return results


def run_check(check: Check, setting: Setting, limit: float) -> Result:
    """One check, which has ``limit`` seconds."""
    start, log = time.monotonic(), ""
    if check.gpu_only and setting.device == "cpu":
        outcome = not_run(check.gpu_only)
    else:
        with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as folder:
            outcome, log = _in_processes(check, replace(setting, scratch=folder, wait_s=limit / 6), Path(folder), limit)
    return Result(check, outcome, time.monotonic() - start, log)


def _in_processes(check: Check, setting: Setting, folder: Path, limit: float) -> tuple[Outcome, str]:
    """The outcome, and the end of the log where it is a failure."""
    setting.write(folder / "setting.json")
    command = [sys.executable, "-m", "megatron_rl.doctor.frame", check.name]
    command += [str(folder / "setting.json"), str(folder / "outcome.json")]
    _store, address = _meeting(check, setting)  # the store lives as long as its name
    environments = [environment | check.environment for environment in _environments(check, setting, address)]
    logs = [folder / f"log-{i}" for i in range(len(environments))]
    processes: list[subprocess.Popen] = []
    try:
        for environment, log in zip(environments, logs, strict=True):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        first = _wait(processes, limit)
    finally:
        for process in processes:
            _end(process)
    if first is None:
        outcome = _read(_written(folder, environments[0]))
    else:
        outcome = _died(processes[first].returncode, first, len(processes), limit, check)
        if (path := _written(folder, environments[first])).is_file():  # it raised, and says what
            written = _read(path)
            outcome = replace(written, reason=f"rank {first}: {written.reason}") if len(processes) > 1 else written
    log = logs[first or 0]
    says = outcome.status == "fail" and log.is_file()
    return outcome, log.read_text(errors="replace")[-LOG_CHARACTERS:].strip() if says else ""


def _meeting(check: Check, setting: Setting) -> tuple[object, dict[str, str]]:
    """The store where ranks of this node meet, and its address; nothing without them, or without torch: then they tell
    that it is not installed."""
    if check.ranks == "one" or setting.in_job or importlib.util.find_spec("torch") is None:
        return None, {}
    from megatron_rl.process.ranks import store_for_ranks  # imports torch, before which ranks set variables

    return store_for_ranks()


def _environments(check: Check, setting: Setting, address: dict[str, str]) -> list[dict[str, str]]:
    """Return the environment variables of each process of the check on this node."""
    base = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    base.setdefault("OMP_NUM_THREADS", "1")
    if check.ranks == "one":
        return [base]
    if setting.in_job:
        own = {name: os.environ[name] for name in _OF_A_RANK if name in os.environ}
        port = int(own["MASTER_PORT"]) + check.port
        return [base | own | {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}]
    size = str(setting.ranks)
    return [
        base | address | {"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for i in range(setting.ranks)
    ]


def _wait(processes: list[subprocess.Popen], limit: float) -> int | None:
    """Until all have ended well (None), one has not, or the time is over: its number."""
    deadline = time.monotonic() + limit
    while True:
        codes = [process.poll() for process in processes]
        if bad := [i for i, code in enumerate(codes) if code not in (None, 0)]:
            grace = time.monotonic() + GRACE_S
            while any(process.poll() is None for process in processes) and time.monotonic() < grace:
                time.sleep(_POLL_S)
            return bad[0]
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen) -> None:
    """End a process with everything that it started."""
    still_runs = process.poll() is None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if still_runs:
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a driver or a disk cannot be ended
            process.wait(END_S)
        process.returncode = None  # it did not end by itself


def _written(folder: Path, environment: dict[str, str]) -> Path:
    return outcome_path(folder / "outcome.json", int(environment.get("RANK", 0)))


def _read(path: Path) -> Outcome:
    if path.is_file():
        return Outcome(**json.loads(path.read_text()))
    return failed("the check ended without an outcome", "The log has what it printed.")


def _died(code: int | None, process: int, count: int, limit: float, check: Check) -> Outcome:
    who = f"process {process} of {count} " if count > 1 else "it "
    if code is None:
        return failed(
            f"{who}had not ended after {limit:.0f} s (its budget: {check.budget_s:g} s)",
            f"Give it all the minutes: megatron-rl doctor --only {check.name}. If that does not end, it hangs: the log "
            "ends where it waits; between ranks try NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME with the interface that "
            "the nodes share.",
        )
    if code < 0:
        name = signal.Signals(-code).name
        hint = (
            " SIGKILL is usually the host's memory (dmesg says so); SIGBUS a full /dev/shm." if code in (-9, -7) else ""
        )
        return failed(f"{who}was ended by {name}", f"The log has the stack of a crash.{hint}")
    return failed(f"{who}left with status {code}", "The log has what it printed last.")


def main(name: str, setting_file: str, outcome_file: str) -> int:
    faulthandler.enable()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_environment()
    for module in (r"torch\.", r"megatron\."):
        warnings.filterwarnings("ignore", module=module)
    outcome, raised = attempt(name, Setting.read(Path(setting_file)))
    path = outcome_path(Path(outcome_file), int(os.environ.get("RANK", 0)))
    write_whole(path, json.dumps(asdict(outcome)))
    if not raised and "torch.distributed" in sys.modules:
        from megatron_rl.process.ranks import any_rank

        any_rank(False)  # over gloo: one that leaves first takes connections down that its peers still read from
    sys.stdout.flush()
    sys.stderr.flush()
    # Engines leave threads and groups behind whose end may hang; what they could say is in the file.
    os._exit(EXIT_FAULT if raised else EXIT_DONE)


def outcome_path(path: Path, rank: int) -> Path:
    """Return the path of a rank's outcome; ``path`` is that of rank 0."""
    return path.with_name(f"{path.name}.{rank}") if rank else path


def attempt(name: str, setting: Setting) -> tuple[Outcome, bool]:
    """What the check says, or what it raised as a failure, and whether it raised; the stack goes to its log."""
    try:
        return find(name).load()(setting), False
    except (InputError, Fault) as error:
        traceback.print_exc()
        return failed(str(error), "The message names the place; the log has the stack."), True
    except ModuleNotFoundError as error:
        traceback.print_exc()
        files = shipped("requirements.txt"), shipped("requirements-cpu.txt")
        fix = "pip install -r {} ({} without a GPU), as its head says".format(*files)
        return failed(f"the package {error.name} is not installed in {sys.executable}", fix), True
    except Exception as error:  # noqa: BLE001 - a check that breaks has failed, whatever broke it
        traceback.print_exc()
        return failed(f"{type(error).__name__}: {error}", "The log has the stack."), True


if __name__ == "__main__":
    main(*sys.argv[1:])
