"""Verifiable rewards. The package imports neither torch nor NumPy, because worker processes import it too."""

from megatron_rl.process.user_functions import check_function
from megatron_rl.rewards.math_task import math_reward
from megatron_rl.rewards.rewarder import Rewarder, check_reward, overlong_penalty

__all__ = ["Rewarder", "check_function", "check_reward", "math_reward", "overlong_penalty"]
