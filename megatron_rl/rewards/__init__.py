"""Verifiable rewards. Importing this package imports neither torch nor NumPy: worker processes do it, too."""

from megatron_rl.rewards.custom import check_function
from megatron_rl.rewards.math_task import math_reward
from megatron_rl.rewards.rewarder import Rewarder, check_reward
from megatron_rl.rewards.shaping import overlong_penalty

__all__ = ["Rewarder", "check_function", "check_reward", "math_reward", "overlong_penalty"]
