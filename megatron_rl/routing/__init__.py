"""Router replay apart from the engines: payload, checksums, slices per layout, telemetry (algorithms.md §8)."""

from megatron_rl.routing.layout import (
    LayerTelemetry,
    PackedRoutes,
    RouteSlice,
    pack_routes,
    packed_keys,
    router_metrics,
)
from megatron_rl.routing.payload import (
    RouteError,
    RouteShape,
    checksums_from_row,
    joined_checksums,
    missing_id,
    route_checksums,
)

__all__ = [
    "LayerTelemetry",
    "PackedRoutes",
    "RouteError",
    "RouteShape",
    "RouteSlice",
    "checksums_from_row",
    "joined_checksums",
    "missing_id",
    "pack_routes",
    "packed_keys",
    "route_checksums",
    "router_metrics",
]
