"""The error of a wrong route."""

from __future__ import annotations

from megatron_rl.errors import Fault


class RouteError(Fault):
    """Routes do not belong to their tokens. They are never trained on; the message names sequence, layer and token."""
