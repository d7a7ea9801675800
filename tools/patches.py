"""The old name of `megatron-rl patch`, which it starts. It goes with the next release."""

import _moved

_moved.start("patch")
