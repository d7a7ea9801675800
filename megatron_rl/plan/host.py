"""Memory of one node's host."""

from __future__ import annotations

from megatron_rl.plan.generation import route_bytes
from megatron_rl.plan.hardware import GIB, PROCESS_GIB
from megatron_rl.plan.memory import MemoryPlan, Phase
from megatron_rl.plan.workload import Workload


def host_phase(work: Workload, plan: MemoryPlan) -> Phase:
    """What lies in the host memory of one node while the engine generates, of at most what the node has."""
    offload, ranks = work.recipe.learner.offload, work.gpus_per_node
    routes = route_bytes(work.recipe, work.architecture, work.trained_tokens)
    items = (
        ("processes", ranks * PROCESS_GIB * GIB),
        ("Adam's states, page-locked", ranks * plan.learner.states * offload.optimizer),
        ("weights, page-locked", ranks * plan.learner.weights * offload.weights),
        ("routes", ranks * routes),
    )
    return Phase("host memory", tuple(item for item in items if item[1]), work.host_gib * GIB)
