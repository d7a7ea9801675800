"""Worker processes: limits hold, and what breaks a worker costs one task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_rl.errors import InputError
from megatron_rl.process.user_functions import check_function
from megatron_rl.rewards import pool as pool_module
from megatron_rl.rewards.pool import Outcome, WorkerPool
from tests.support.patience import PATIENCE_S

REWARDS = """
import os, signal, sys, time

def judge(response, answer):
    print("to the log, not into the frames")
    if response == "raise":
        raise KeyError("nope")
    if response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "spin":
        while True:
            pass
    if response == "sleep":
        time.sleep(600)
    if response == "swallow":
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass
    if response == "eat":
        return len(bytes(3 << 30))  # untouched zeros: costs address space, no time
    if response == "nan":
        return float("nan")
    if response == "pid":
        return os.getppid()
    return response == answer

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5 if extra_info["half"] else 1.0, "acc": data_source}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def pool(file):
    names = [f"{file}:judge", f"{file}:verl"]
    with WorkerPool(2, timeout_s=0.4, memory_limit_mib=512, functions=names) as pool:
        yield pool


@pytest.fixture
def judge(pool, file):
    def run(*responses):
        tasks = [{"kind": f"{file}:judge", "solution_str": text, "ground_truth": "yes"} for text in responses]
        return pool.run(tasks)

    return run


def test_results_come_in_the_order_of_the_tasks(judge):
    responses = ["yes" if i % 3 else "no" for i in range(50)]
    assert [outcome.value for outcome in judge(*responses)] == [float(text == "yes") for text in responses]


@pytest.mark.parametrize(
    ("response", "failure"),
    [("spin", "limit"), ("sleep", "limit"), ("swallow", "limit"), ("eat", "limit"), ("segfault", "crash"),
     ("raise", "error"), ("nan", "error")],
)  # fmt: skip
def test_a_failing_task_costs_itself_only(judge, response, failure):
    outcomes = judge("yes", response, "yes", "no", "yes")
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert [outcome.failure for outcome in outcomes] == ["", failure, "", "", ""]


def test_a_killed_child_is_replaced_without_a_new_process(pool, judge):
    before = pool.pids
    assert [outcome.failure for outcome in judge(*["segfault"] * 6)] == ["crash"] * 6
    assert pool.pids == before
    assert pool.num_restarts == 0


def test_a_killed_worker_process_is_replaced(pool, judge):
    os.killpg(pool.pids[0], signal.SIGKILL)
    outcomes = judge(*["yes"] * 20)
    assert sum(outcome.value for outcome in outcomes) >= 19  # the task sent just before the end was noticed may be lost
    assert pool.num_restarts >= 1
    assert [outcome.value for outcome in judge("yes", "yes")] == [1.0, 1.0]


def test_a_lost_worker_is_replaced_before_its_outcome_is_told(file, monkeypatch):
    """So that the caller finds the pool whole, however long the start of a process takes."""
    task = {"kind": f"{file}:judge", "solution_str": "sleep", "ground_truth": "yes"}
    with WorkerPool(1, timeout_s=0.2, memory_limit_mib=512, functions=[f"{file}:judge"]) as pool:
        (future,) = pool.submit([task])
        start, at_the_start = pool._start, []

        def slowly(share):
            at_the_start.append(future.done())
            return start(share)

        monkeypatch.setattr(pool, "_start", slowly)
        while not future.running():
            time.sleep(0.01)
        os.killpg(pool.pids[0], signal.SIGKILL)
        assert future.result(PATIENCE_S).failure == "crash"
        assert (at_the_start, pool.num_restarts) == ([False], 1)


@pytest.mark.parametrize(
    ("candidate", "gold"),
    [
        ("10^{10^{10}}", r"\sqrt{7}"),
        ("9^{9^{9^9}}", r"\sqrt{2}"),
        ("((10!)!)!", "7!"),
        (r"\binom{10^9}{5\cdot 10^8}", r"\binom{4}{2}"),
    ],
)
def test_a_number_too_large_to_write_down_is_a_wrong_answer_and_no_failure(pool, candidate, gold):
    task = {"kind": "math", "candidate": candidate, "gold": gold}
    outcomes = pool.run([task, {"kind": "math", "candidate": r"\sqrt{8}", "gold": r"2\sqrt{2}"}])
    assert [(outcome.value, outcome.failure) for outcome in outcomes] == [(0.0, ""), (1.0, "")]


def test_verls_signature_and_a_result_with_a_score(pool, file):
    task = {"kind": f"{file}:verl", "data_source": "d", "solution_str": "", "ground_truth": ""}
    outcomes = pool.run([task | {"extra_info": {"half": half}} for half in (True, False)])
    assert [outcome.value for outcome in outcomes] == [0.5, 1.0]


def test_no_tasks_no_outcomes(pool):
    assert pool.run([]) == []


def test_a_worker_is_light(pool, judge):
    judge("yes")
    for pid in pool.pids:
        libraries = [library.path for library in psutil.Process(pid).memory_maps()]
        # vLLM on a CPU has its process, and what that starts, preload libgomp.
        assert not [path for path in libraries if "torch" in path and "libgomp" not in path]
        assert psutil.Process(pid).memory_info().rss < 150 << 20


def test_a_function_that_cannot_be_loaded_is_reported_with_its_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module_here\ndef judge(response, answer): return 1\n")
    name = f"{path}:judge"
    pool = WorkerPool(1, timeout_s=1, memory_limit_mib=256, algebra=False, functions=[name])
    with pool, pytest.raises(InputError, match="no_such_module_here"):
        pool.run([{"kind": name, "solution_str": "", "ground_truth": ""}])


def test_workers_end_with_close_and_with_their_owner():
    pool = WorkerPool(1, timeout_s=1, memory_limit_mib=256)
    pool.run([{"kind": "math", "candidate": "x", "gold": "y"}])
    worker = psutil.Process(pool.pids[0])
    family = [worker, *worker.children()]
    pool.close()
    pool.close()
    assert len(family) == 2
    psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)

    owner = (
        "import os\nfrom megatron_rl.rewards.pool import WorkerPool\n"
        "pool = WorkerPool(1, timeout_s=1, memory_limit_mib=256)\n"
        "pool.run([{'kind': 'math', 'candidate': 'x', 'gold': 'y'}])\n"
        "print(pool.pids[0], flush=True)\nos.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    printed = subprocess.run([sys.executable, "-c", owner], stdout=subprocess.PIPE, env=environment)
    orphan = int(printed.stdout)
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(orphan) and psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker outlived the process that started it"
        time.sleep(0.05)


ORDINARY = """
from __future__ import annotations

import asyncio, multiprocessing, os, pickle, subprocess, sys
from dataclasses import dataclass

from my_helper import VALUE


@dataclass
class Answer:
    text: str
    more: list[int] | None = None


def double(x):
    return 2 * x


def by_value(response, answer):
    return pickle.loads(pickle.dumps(Answer("a", [VALUE]))).more[0]


def by_process(response, answer):
    with multiprocessing.get_context(response).Pool(1) as workers:
        return workers.map(double, [21])[0]


async def by_await(response, answer):
    await asyncio.sleep(0)
    return 4.0


def starts(response, answer):
    code = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    if response == "waits":
        subprocess.run(["sleep", answer])
    subprocess.run([sys.executable, "-c", code, answer])
    while True:
        pass


def eats(response, answer):
    subprocess.Popen(["sleep", answer], start_new_session=True)
    return len(bytes(3 << 30))


def scribbles(response, answer):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, eval(response))
        except OSError:
            pass
    return 1.0
"""


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordinary")
    (folder / "my_helper.py").write_text("VALUE = 3.0\n")
    (folder / "ordinary_rewards.py").write_text(ORDINARY)
    return str(folder / "ordinary_rewards.py")


@pytest.fixture(scope="module")
def other_pool(ordinary):
    names = [f"{ordinary}:{name}" for name in ("by_value", "by_process", "by_await", "starts", "eats", "scribbles")]
    with WorkerPool(1, timeout_s=1.0, memory_limit_mib=512, algebra=False, functions=names) as pool:
        yield pool


@pytest.mark.parametrize(
    ("function", "response", "value"),
    [("by_value", "", 3.0), ("by_process", "fork", 42.0), ("by_process", "spawn", 42.0), ("by_await", "", 4.0)],
)
def test_a_file_of_rewards_loads_like_a_module(other_pool, ordinary, function, response, value):
    check_function(f"{ordinary}:{function}", "reward")
    task = {"kind": f"{ordinary}:{function}", "solution_str": response, "ground_truth": ""}
    assert other_pool.run([task, task]) == [Outcome(value)] * 2


@pytest.mark.parametrize(
    ("function", "response"), [("starts", "waits"), ("starts", "leaves its parents"), ("eats", "")]
)
def test_what_a_task_started_ends_with_its_limit(other_pool, ordinary, function, response):
    mark = f"600.{os.getpid()}"
    task = {"kind": f"{ordinary}:{function}", "solution_str": response, "ground_truth": mark}
    assert other_pool.run([task])[0].failure == "limit"
    # The answer to another task comes after what the first one left was ended.
    other_pool.run([{"kind": f"{ordinary}:by_await", "solution_str": "", "ground_truth": ""}])
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


@pytest.mark.parametrize(
    "written",
    [
        rb"b'garbage that is no frame'",
        rb"b'\x08\x00\x00\x00not json'",
        rb"b'\xff\xff\xff\x7f'",
        rb"b'\x02\x00\x00\x00[]'",
        rb"b'\x10\x00\x00\x00{}'",
    ],
)
def test_a_reward_that_writes_into_the_pipe_costs_itself(other_pool, ordinary, written):
    task = {"kind": f"{ordinary}:scribbles", "solution_str": written.decode(), "ground_truth": ""}
    (outcome,) = other_pool.run([task])
    assert outcome.failure == "crash"
    assert other_pool.run([{"kind": f"{ordinary}:by_await", "solution_str": "", "ground_truth": ""}])[0].value == 4.0


@pytest.mark.parametrize(
    "message",
    [{"value": "1"}, {"value": True}, {"value": None}, {"value": float("nan")}, {"error": 3}, {"failure": ["limit"]}],
)
def test_an_answer_of_another_type_is_a_crash(message):
    assert pool_module._outcome(message) == Outcome(failure="crash")


def test_a_file_may_import_from_its_own_package(tmp_path):
    folder = tmp_path / "my_rewards" / "inner"
    folder.mkdir(parents=True)
    for path, text in [("../__init__.py", ""), ("__init__.py", "HALF = 0.5\n"), ("../whole.py", "WHOLE = 1.0\n")]:
        (folder / path).write_text(text)
    file = folder / "judge.py"
    file.write_text(
        "from . import HALF\nfrom ..whole import WHOLE\ndef f(response, answer):\n    return HALF + WHOLE\n"
    )
    name = f"{file}:f"
    with WorkerPool(1, timeout_s=5, memory_limit_mib=256, algebra=False, functions=[name]) as pool:
        assert pool.run([{"kind": name, "solution_str": "", "ground_truth": ""}]) == [Outcome(1.5)]
