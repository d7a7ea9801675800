"""Memory of one node's host."""

from __future__ import annotations

from megatron_rl.plan.checkpoint import checkpoint_cost
from megatron_rl.plan.hardware import GIB, PROCESS_GIB
from megatron_rl.plan.memory import MemoryPlan, Phase
from megatron_rl.plan.own_code import own_code
from megatron_rl.plan.workload import Workload


def host_phase(work: Workload, plan: MemoryPlan) -> Phase:
    """What lies in the host memory of one node at its peak, of at most what the node has."""
    offload, ranks = work.recipe.learner.offload, work.gpus_per_node
    items = (
        ("processes", ranks * PROCESS_GIB * GIB),
        ("Adam's states, page-locked", ranks * plan.learner.states * offload.optimizer),
        ("weights, page-locked", ranks * plan.learner.weights * offload.weights),
        ("weights of earlier updates", ranks * plan.learner.weights * work.earlier_weights),
        ("a checkpoint on its way", ranks * checkpoint_cost(work).host),
        ("responses, routes, packed rows", own_code(work).host_node),
    )
    return Phase("host memory", tuple(item for item in items if item[1]), work.host_gib * GIB)
