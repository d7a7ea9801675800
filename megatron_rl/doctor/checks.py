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
    """

    device: str  # "cpu" or "cuda"
    ranks: int
    shared: str
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    scratch: str = ""
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

    name: str
    question: str
    outcome: Outcome
    seconds: float
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        entries = {"name": self.name, "question": self.question, **asdict(self.outcome)}
        return entries | {"seconds": round(self.seconds, 2)} | ({"log": self.log} if self.log else {})


RanksOf = Literal["one", "node", "job"]


@dataclass(frozen=True)
class Check:
    """A check of the doctor: ``function`` (MODULE.FUNCTION of this package), which fails after ``seconds``.

    ``ranks``: one process, one for each rank of the node, or of the job where there is one (else of the node).
    ``gpu_only``: why the check has nothing to look at without a GPU; empty: it runs without one. ``environment``:
    variables of its processes. ``port``: where the ranks of a job meet, counted from the job's own port: ranks are not
    at the same check at the same time.
    """

    name: str
    question: str
    function: str
    seconds: float
    ranks: RanksOf = "one"
    gpu_only: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0

    def load(self) -> Callable[[Setting], Outcome]:
        module, _, name = self.function.rpartition(".")
        return getattr(importlib.import_module(f"megatron_rl.doctor.{module}"), name)


CHECKS = (
    Check(
        "packages",
        "Are the installed versions those of requirements.txt (CPU: requirements-cpu.txt)?",
        "machine.versions",
        30,
    ),
    Check("patches", "Is every patch to Megatron-Core applied?", "machine.patches", 60),
    Check(
        "driver",
        "Does every GPU multiply bf16 matrices exactly, without uncorrected ECC errors?",
        "machine.driver",
        120,
    ),
    Check(
        "gpu-memory",
        "Does no other process hold GPU memory?",
        "machine.gpu_memory",
        60,
        gpu_only="no GPU",
    ),
    Check("shared-memory", "Has /dev/shm 1 GiB free for each rank?", "machine.shared_memory", 30),
    Check("open-files", "May a process open 8192 files and sockets?", "machine.open_files", 30),
    Check(
        "host-memory",
        "Does the host have the memory that `plan` says (without RECIPE, 8 GiB a rank; 2 on CPUs)?",
        "machine.host_memory",
        60,
    ),
    Check(
        "shared-folder",
        "Can the folder of runs be written, has it 10 GiB free, and is its clock within 5 s of ours?",
        "machine.shared_folder",
        60,
    ),
    Check(
        "nodes",
        "Do all nodes see the folder of runs, with clocks within 5 s?",
        "machine.nodes_together",
        120,
        ranks="job",
        port=20,
    ),
    Check(
        "collectives",
        "Do ranks exchange the right values, and has every link at least half the median bandwidth of its kind?",
        "rates.collectives",
        180,
        ranks="job",
        port=21,
    ),
    Check(
        "binding",
        "Does every rank have a GPU of its own?",
        "machine.binding",
        120,
        ranks="job",
        gpu_only="no GPU for a rank to have",
        port=22,
    ),
    Check("fp32", "Does each library multiply fp32 matrices in full, and not as TF32?", "learner.products", 120),
    Check(
        "attention",
        "Does TransformerEngine take fused attention or flash-attn for the heads of RECIPE (else of Qwen3-30B-A3B)?",
        "learner.attention",
        60,
        gpu_only="no GPU: the learner takes torch's attention",
        environment={"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"},  # its reasons, in the log of a failure
    ),
    Check(
        "experts",
        "Is the gradient norm under tensor and expert parallelism that of data parallelism, to 1e-5 in fp32?",
        "learner.experts",
        120,
        ranks="node",
    ),
    Check(
        "context",
        "Is the gradient under `learner.parallel.context: 2` that of whole sequences (in bf16 to 4 ulp)?",
        "learner.context",
        120,
        ranks="node",
    ),
    Check(
        "checkpoint",
        "Does a run that is saved and loaded go on as one that is not?",
        "learner.checkpoint",
        120,
        ranks="node",
        # As far as kernels can be had that add in a fixed order.
        environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    Check(
        "engine",
        "Has vLLM the learner's stream and the kernels for RECIPE's types, and does closing it leave no tensor?",
        "engine.built",
        180,
        ranks="node",
    ),
    Check(
        "mismatch",
        "Is the engine at most 8 times as far from the fp32 learner as the learner is, in each type?",
        "engine.mismatch",
        240,
    ),
    Check(
        "parity",
        "Is every operator of both engines within its bound, on the tiny model and RECIPE's first layers?",
        "engine.parity",
        300,
    ),
    Check(
        "refit",
        "Does vLLM's own checkpoint, sent as an update, change no bit, and do log-probs follow new weights?",
        "engine.refit",
        180,
        ranks="node",
    ),
    Check(
        "memory",
        "Does each phase of a step take at most the memory that `plan` expects?",
        "engine.memory",
        180,
        gpu_only="no GPU whose memory could be measured",
    ),
    *(
        Check(
            f"runner-v{version}",
            f"Does vLLM's model runner {version} work, with CUDA graphs and recorded routes?",
            "engine.runner",
            180,
            gpu_only="no GPU: vLLM's model runner for CPUs has no second version",
            environment={"VLLM_USE_V2_MODEL_RUNNER": str(version - 1)},
        )
        for version in (2, 1)
    ),
)


RATES = Check("rates", "How fast are products, attention and copies, at the recipe's shapes?", "rates.rates", 180)
"""Only for `--measure`: it finds no fault."""


def find(name: str) -> Check:
    return next(check for check in (*CHECKS, RATES) if check.name == name)
