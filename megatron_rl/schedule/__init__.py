"""Learning-rate schedules: arithmetic on step numbers and response lengths, without torch or Megatron.

Megatron's scheduler class is extended with this logic in `megatron_rl.learner.optimizer`.
"""

from megatron_rl.schedule.learning_rate import (
    LearningRateSchedule,
    LengthDecay,
    SurgeDetector,
    length_decay_lr,
    rate_factor,
)

__all__ = ["LearningRateSchedule", "LengthDecay", "SurgeDetector", "length_decay_lr", "rate_factor"]
