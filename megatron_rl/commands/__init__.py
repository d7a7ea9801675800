"""The commands of `megatron-rl`, one module each."""
