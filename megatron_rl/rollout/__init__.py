"""Generation: what turns prompts into groups of responses.

`Generator` is what the loop knows. The engine itself is imported from `megatron_rl.rollout.vllm_engine`, and only
there, because importing vLLM takes seconds.
"""

from megatron_rl.rollout.generator import Generator, RolloutError, Sampling

__all__ = ["Generator", "RolloutError", "Sampling"]
