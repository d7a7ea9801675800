"""The one error that ends a command with a message."""

from __future__ import annotations

from megatron_rl.errors import InputError


class PatchError(InputError):
    """A tree, a patch or a pin that is not as it must be; the message says what to do."""
