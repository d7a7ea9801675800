"""What is minimised: advantages · policy terms · corrections · aggregation · instruments, as pure functions.

No collectives and no state: a learner splits a mini-batch as it likes, passes the global denominators in, and adds
up losses and metric statistics. How to add your own: docs/add-an-objective.md.
"""

from megatron_rl.objective.advantages import ADVANTAGES, compute_advantages, group_filter_metrics, informative_groups
from megatron_rl.objective.aggregation import AGGREGATIONS, MetricStats, compute_denominators
from megatron_rl.objective.compute import ObjectiveResult, compute_objective
from megatron_rl.objective.corrections import CORRECTIONS
from megatron_rl.objective.inputs import Denominators, Head, NoiseKey, ObjectiveInputs, Teacher, TeacherSet
from megatron_rl.objective.metrics import finalize_metrics
from megatron_rl.objective.policy_terms import POLICY_TERMS

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "POLICY_TERMS",
    "Denominators",
    "Head",
    "MetricStats",
    "NoiseKey",
    "ObjectiveInputs",
    "ObjectiveResult",
    "Teacher",
    "TeacherSet",
    "compute_advantages",
    "compute_denominators",
    "compute_objective",
    "finalize_metrics",
    "group_filter_metrics",
    "informative_groups",
]
