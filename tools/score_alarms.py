"""The old name of `megatron-rl score-alarms`, which it starts. It goes with the next release."""

import _moved

_moved.start("score-alarms")
