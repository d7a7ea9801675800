"""The `exact` section: generation by the learner's own forward pass (`rollout.engine: exact`)."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from megatron_rl.config.base import Section


class ExactConfig(Section):
    noise_std: NonNegativeFloat = 0.0
    """Dose of mismatch: standard deviation of the Gaussian noise added to the sampling logits, drawn from
    (rollout.seed, step, prompt id, sample number, position). mu is the probability after the noise, so that mu and po
    differ by it and by nothing else; the gate then compares what was computed before the noise. Validation samples
    without it: it measures the policy, not the dose. Our instrument, not a paper's."""
    kv_cache: bool = True
    """Keep keys and values of earlier tokens; the probabilities are the same either way. On CUDA always false:
    attention kernels that are invariant with a cache are not at hand there."""
