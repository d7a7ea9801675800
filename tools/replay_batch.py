"""An old name of `megatron-rl batch replay`, which it starts."""

import _moved

_moved.start("batch replay")
