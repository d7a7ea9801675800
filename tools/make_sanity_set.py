"""The old name of `megatron-rl sanity-set`, which it starts. It goes with the next release."""

import _moved

_moved.start("sanity-set")
