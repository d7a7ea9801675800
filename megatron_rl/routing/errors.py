"""What is wrong with a route."""

from __future__ import annotations

from megatron_rl.errors import Fault


class RouteError(Fault):
    """Routes that are not those of the tokens they stand beside. Never trained on; names sequence, layer and token."""
