"""An old name of `megatron-rl patch`, which it starts."""

import _moved

_moved.start("patch")
