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
    ``certificates``: the folder for those of parity; empty: none are written.
    """

    device: str  # "cpu" or "cuda"
    ranks: int
    shared: str
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    scratch: str = ""
    certificates: str = ""
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
    """A check of the doctor: ``function`` (`module.function` of this package), which fails after ``seconds``.

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
    Check("packages", "Are the installed versions those that were tested?", "machine.versions", 30),
    Check("patches", "Is Megatron-Core patched?", "machine.patches", 60),
    Check("driver", "Does every GPU compute, under this driver and this torch?", "machine.driver", 120),
    Check(
        "gpu-memory",
        "Is the memory of the GPUs free?",
        "machine.gpu_memory",
        60,
        gpu_only="no GPU",
    ),
    Check("shared-memory", "Is /dev/shm large enough?", "machine.shared_memory", 30),
    Check("open-files", "May a process open enough files and sockets?", "machine.open_files", 30),
    Check("host-memory", "Does the host have the memory that a run needs?", "machine.host_memory", 60),
    Check("shared-folder", "Can the folder of runs be written, and is its clock ours?", "machine.shared_folder", 60),
    Check(
        "nodes",
        "Do all nodes see the folder of runs, and have one time?",
        "machine.nodes_together",
        120,
        ranks="job",
        port=20,
    ),
    Check(
        "collectives",
        "Do neighbouring ranks and all ranks exchange the right values, and how fast?",
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
    Check("fp32", "Is fp32 what multiplies fp32 matrices, and not TF32?", "learner.products", 120),
    Check(
        "attention",
        "Which attention does TransformerEngine take for packed rows?",
        "learner.attention",
        60,
        gpu_only="no GPU: the learner takes torch's attention",
        environment={"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"},  # its reasons, in the log of a failure
    ),
    Check(
        "experts",
        "Does the gradient norm count every expert under tensor and expert parallelism?",
        "learner.experts",
        120,
        ranks="node",
    ),
    Check(
        "context",
        "Do ranks that share each sequence find the gradient of whole sequences?",
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
        "Has the engine the stream and kernels that a run relies on, and does it leave nothing behind?",
        "engine.built",
        180,
        ranks="node",
    ),
    Check("mismatch", "Do both engines compute the same, up to rounding, in each type?", "engine.mismatch", 240),
    Check("parity", "Does every operator of both engines compute what the checkpoint says?", "engine.parity", 300),
    Check("refit", "Does the engine get the learner's weights?", "engine.refit", 180, ranks="node"),
    Check(
        "memory",
        "Does each phase of a step take what `plan` expects?",
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
