"""Router replay apart from the engines: payload, checksums, slices per layout, telemetry (algorithms.md §8)."""

from megatron_rl.routing.checksum import RouteError, joined_checksums, route_checksums
from megatron_rl.routing.layout import PackedRoutes, RouteSlice, pack_routes, packed_keys
from megatron_rl.routing.payload import RouteShape, missing_id
from megatron_rl.routing.telemetry import LayerTelemetry, router_metrics

__all__ = [
    "LayerTelemetry",
    "PackedRoutes",
    "RouteError",
    "RouteShape",
    "RouteSlice",
    "joined_checksums",
    "missing_id",
    "pack_routes",
    "packed_keys",
    "route_checksums",
    "router_metrics",
]
