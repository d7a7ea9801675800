"""Generation: what turns prompts into groups of responses.

The loop knows `Generator` alone. vLLM is imported only by the modules that start it, because the import takes seconds.
"""

from megatron_rl.rollout.generator import Generator, LegCounts, RolloutError, Sampling

__all__ = ["Generator", "LegCounts", "RolloutError", "Sampling"]
