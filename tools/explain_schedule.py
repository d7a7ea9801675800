"""The old name of `megatron-rl explain-schedule`, which it starts. It goes with the next release."""

import _moved

_moved.start("explain-schedule")
