"""The old name of `megatron-rl sanity-verdict`, which it starts. It goes with the next release."""

import _moved

_moved.start("sanity-verdict")
