"""What changed in a run, when its metrics left their healthy stretch, and which causes fit."""

from megatron_rl.instruments.why.onset import find

__all__ = ["find"]
