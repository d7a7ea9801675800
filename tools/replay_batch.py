"""The old name of `megatron-rl replay`, which it starts. It goes with the next release."""

import _moved

_moved.start("replay")
