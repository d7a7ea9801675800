"""The old name of `megatron-rl prepare-data`, which it starts. It goes with the next release."""

import _moved

_moved.start("prepare-data")
