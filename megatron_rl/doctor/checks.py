"""The checks: what each answers, and how it is run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.doctor.outcome import Outcome
from megatron_rl.doctor.setting import Setting

RanksOf = Literal["one", "node", "job"]


@dataclass(frozen=True)
class Check:
    """``function``: `module.function` of this package. ``seconds``: when the check is ended and counts as failed.

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
    Check("packages", "Are the installed versions those that were tested?", "packages.versions", 30),
    Check("patches", "Is Megatron-Core patched?", "packages.patches", 60),
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
        "nodes", "Do all nodes see the folder of runs, and have one time?", "nodes.together", 120, ranks="job", port=20
    ),
    Check(
        "collectives",
        "Do neighbouring ranks and all ranks exchange the right values, and how fast?",
        "collectives.collectives",
        180,
        ranks="job",
        port=21,
    ),
    Check(
        "binding",
        "Does every rank have a GPU of its own?",
        "binding.binding",
        120,
        ranks="job",
        gpu_only="no GPU for a rank to have",
        port=22,
    ),
    Check("fp32", "Is fp32 what multiplies fp32 matrices, and not TF32?", "fp32.products", 120),
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
        "built_engine.built",
        180,
        ranks="node",
    ),
    Check("mismatch", "Do both engines compute the same, up to rounding, in each type?", "engine.mismatch", 240),
    Check("refit", "Does the engine get the learner's weights?", "engine.refit", 180, ranks="node"),
    Check(
        "memory",
        "Does each phase of a step take what `plan` expects?",
        "memory.memory",
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
