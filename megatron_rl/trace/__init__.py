"""`megatron-rl trace`: the real learner of a recipe, built at full size as one rank of its job, on any machine.

Tensors are fake (shapes, dtypes and devices without values) and so are the other ranks (collectives return at once).
`fake_rank` and `uniform` say what is put in the place of what, `recorder` what is counted.
"""

from megatron_rl.trace.comparison import TOLERANCE, Comparison, compare_static, differences
from megatron_rl.trace.learner import FORMATS, RankTrace, ranks_that_differ, trace_rank
from megatron_rl.trace.report import as_json, render
from megatron_rl.trace.update import trace_update, why_untraced

__all__ = [
    "FORMATS",
    "TOLERANCE",
    "Comparison",
    "RankTrace",
    "as_json",
    "compare_static",
    "differences",
    "ranks_that_differ",
    "render",
    "trace_rank",
    "trace_update",
    "why_untraced",
]
