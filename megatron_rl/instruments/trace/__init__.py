"""`megatron-rl recipe trace`: the real learner of a recipe, built at full size as one rank of its job, on any machine.

Tensors are fake (shapes, dtypes and devices without values), and so are other ranks (collectives return at once).
`fake_rank` lists the substitutions and counts.
"""

from megatron_rl.instruments.trace.learner import (
    FORMATS,
    TOLERANCE,
    Comparison,
    RankTrace,
    as_json,
    compare_static,
    differences,
    ranks_that_differ,
    render,
    trace_rank,
    trace_update,
    why_untraced,
)

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
