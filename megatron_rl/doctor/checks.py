"""What the doctor checks: the list of checks, their setting, and what a check found."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron_rl.config import Recipe


TINY = "recipes/tiny/grpo.yaml"
CPU_RANKS = 2


@dataclass(frozen=True)
class Setting:
    """Passed to every process of a check as a file.

    ``ranks``: processes of a check between ranks, the node's GPUs or `CPU_RANKS`. ``shared``: a folder that all nodes
    should see. ``recipe``: what is to be run here; None: nothing in particular. ``scratch``: this check's own folder.
    ``wait_s``: for a peer, a part of the check's time.
    """

    device: str  # "cpu" or "cuda"
    ranks: int
    shared: str
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    scratch: str = ""
    wait_s: float = 10.0
    in_job: bool = False  # the ranks are those of a job over several nodes, one process of each at hand

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Setting:
        return Setting(**json.loads(path.read_text()))


def tiny(setting: Setting, *overrides: str) -> Recipe:
    """The tiny recipe that ships with the package, on this setting's device, with overrides of its keys."""
    from megatron_rl.config import load_recipe

    own = (f"runtime.device={setting.device}", f"run_root={setting.scratch}/runs", "name=doctor")
    return load_recipe(TINY, [*own, *overrides])


def planned(setting: Setting) -> Recipe | None:
    """The recipe that the command named, if it did."""
    if not setting.recipe:
        return None
    from megatron_rl.config import load_recipe

    return load_recipe(setting.recipe, setting.overrides)


Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True)
class Outcome:
    """Result of a check. ``reason``: what was seen, or why it was not run. ``fix``: what is likely to help if it
    failed.

    ``figures``: what was measured; JSON-able, name → value or name → (name → value).
    """

    status: Status
    reason: str
    fix: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def passed(reason: str, **figures: Any) -> Outcome:
    return Outcome("pass", reason, figures=figures)


def failed(reason: str, fix: str, **figures: Any) -> Outcome:
    return Outcome("fail", reason, fix, figures)


def not_run(reason: str) -> Outcome:
    return Outcome("not run", reason)


@dataclass(frozen=True)
class Result:
    """The outcome of one check on one node. ``log``: the end of what it printed, where it failed."""

    check: Check
    outcome: Outcome
    seconds: float
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        check, times = self.check, {"seconds": round(self.seconds, 2), "budget_s": self.check.budget_s}
        entries = {"name": check.name, "question": check.question, **asdict(self.outcome), **times}
        return entries | ({"log": self.log} if self.log else {})


RanksOf = Literal["one", "node", "job"]


@dataclass(frozen=True)
class Check:
    """A check of the doctor: ``function`` (MODULE.FUNCTION of this package).

    ``budget_s``: its part of ten minutes, see `frame.run_checks`. ``ranks``: one process, one for each rank of the
    node, or of the job where there is one (else of the node). ``gpu_only``: why the check has nothing to look at
    without a GPU; empty: it runs without one. ``environment``: variables of its processes. ``port``: where the ranks of
    a job meet, counted from the job's own port: ranks are not at the same check at the same time.
    """

    name: str
    budget_s: float
    question: str
    function: str
    ranks: RanksOf = "one"
    gpu_only: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0

    def load(self) -> Callable[[Setting], Outcome]:
        module, _, name = self.function.rpartition(".")
        return getattr(importlib.import_module(f"megatron_rl.doctor.{module}"), name)


# Budgets by arithmetic from an H200 (docs/gpu.md): an engine took 93 s to start, half a minute of it for 51 sizes of
# graphs, each captured twice. With seven sizes that is 65 s; 25 s where vLLM is imported already is a guess.
QUICK_S = 20  # the largest budget under --quick
CHECKS = (
    Check("packages", 5, "Are the installed versions those of requirements.txt (or -cpu.txt)?", "machine.versions"),
    Check("patches", 5, "Is every patch to Megatron-Core applied?", "machine.patches"),
    Check("driver", 15, "Are GPUs whole, of one kind, without ECC errors, and multiply exactly?", "machine.driver"),
    Check("gpu-memory", 5, "Does no other process hold GPU memory?", "machine.gpu_memory", gpu_only="no GPU"),
    Check("shared-memory", 5, "Has /dev/shm 1 GiB free for each rank?", "machine.shared_memory"),
    Check("open-files", 5, "May a process open 8192 files and sockets?", "machine.open_files"),
    Check(
        "host-memory",
        5,
        "Has the host what `plan` says (without RECIPE, 8 GiB a rank; 2 on CPUs)?",
        "machine.host_memory",
    ),
    Check(
        "shared-folder",
        5,
        "Can the folder of runs be written, has it 10 GiB free, and is its clock within 5 s of ours?",
        "machine.shared_folder",
    ),
    Check("compilers", 5, "Can caches of compilers be written?", "machine.compilers"),
    Check("nodes", 20, "Do all see the folder of runs, and have InfiniBand?", "machine.nodes_together", "job", port=20),
    Check(
        "collectives",
        20,
        "Do ranks exchange the right values, and has every link at least half the median bandwidth of its kind?",
        "rates.collectives",
        "job",
        port=21,
    ),
    Check(
        "binding", 10, "Does every rank have a GPU of its own?", "machine.binding", "job", gpu_only="no GPU", port=22
    ),
    Check("fp32", 15, "Does each library multiply fp32 matrices in full, and not as TF32?", "learner.products"),
    Check(
        "attention",
        10,
        "Does TransformerEngine take fused attention or flash-attn for the heads of RECIPE (else of Qwen3-30B-A3B)?",
        "learner.attention",
        gpu_only="no GPU: the learner takes torch's attention",
        environment={"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"},  # its reasons, in the log of a failure
    ),
    Check(
        "experts",
        25,
        "Is the gradient norm under tensor and expert parallelism that of data parallelism, to 1e-5 in fp32?",
        "learner.experts",
        "node",
    ),
    Check(
        "context",
        25,
        "Is the gradient under `learner.parallel.context: 2` that of whole sequences (in bf16 to 4 ulp)?",
        "learner.context",
        "node",
    ),
    Check(
        "checkpoint",
        25,
        "Does a run that is saved and loaded go on as one that is not?",
        "learner.checkpoint",
        "node",
        # As far as kernels can be had that add in a fixed order.
        environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    Check(
        "engine",
        80,
        "Has vLLM, with CUDA graphs and recorded routes, the learner's stream and log-probs, and known kernels?",
        "engine.built",
        "node",
    ),
    Check("mismatch", 95, "Is vLLM at most 8 times as far from the fp32 learner as the learner is?", "engine.mismatch"),
    Check("parity", 70, "Is every operator within its bound (RECIPE's first layers, too)?", "engine.parity"),
    Check("refit", 70, "Do vLLM's own weights change no bit, and log-probs follow new ones?", "engine.refit", "node"),
    Check("memory", 80, "Does each phase of a step take at most what `plan` says?", "engine.memory", gpu_only="no GPU"),
)


RATES = Check("rates", 180, "How fast are products, attention and copies, at the recipe's shapes?", "rates.rates")
"""Only for `--measure`: it finds no fault."""


def find(name: str) -> Check:
    return next(check for check in (*CHECKS, RATES) if check.name == name)
