"""The old name of `megatron-rl softmax-study`, which it starts. It goes with the next release."""

import _moved

_moved.start("softmax-study")
