"""The old name of `megatron-rl mismatch`, which it starts. It goes with the next release."""

import _moved

_moved.start("mismatch")
