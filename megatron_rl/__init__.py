"""megatron_rl: stable reinforcement learning of Mixture-of-Experts language models on Megatron-Core, with vLLM."""

__version__ = "0.1.0"
