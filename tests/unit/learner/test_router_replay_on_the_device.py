"""The check of routes where they are read."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.config.learner import RoutingConfig
from megatron_rl.learner.packing import build_microbatch
from megatron_rl.learner.router_replay import RouterReplayer
from megatron_rl.routing import RouteError, RouteShape, missing_id, pack_routes
from megatron_rl.routing.layout import CheckedRoutes
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import stored_rollouts

SHAPE = RouteShape(8, 2, (0, 1, 2, 3))


def damaged(malformed: str):
    """A rank's slice in which one row names an expert twice, and what checks it."""
    batch = stored_rollouts(0, 3)
    routes = random_routes(batch)
    routes[1][4, 2] = [5, 5]
    with_routes(batch, routes)
    config = RoutingConfig(replay="r3", malformed=malformed)
    packed = pack_routes(batch.sequences, 0, SHAPE)
    total = sum(s.whole_length for s in batch.sequences)
    replayer = SimpleNamespace(config=config, shape=SHAPE, layers=[0, 2], device=torch.device("cpu"))
    return replayer, packed.take([(2, total)], [0, 2]), batch.sequences


def test_a_malformed_row_is_an_error_that_names_sequence_layer_and_token():
    replayer, routes, _ = damaged("error")
    message = r"sequence train:1/0, layer 2, token 4: experts \[5, 5\]; expected 2 different .* 1 in the microbatch"
    with pytest.raises(RouteError, match=message):
        RouterReplayer._check_rows(replayer, routes)


def test_a_row_of_the_same_step_is_sliced_once_unless_its_routes_are_others(monkeypatch):
    monkeypatch.setattr("megatron_rl.learner.router_replay._sequence_parallel", lambda: (1, 0))
    batch = stored_rollouts(0, 3)
    with_routes(batch, random_routes(batch))
    microbatch = build_microbatch(batch, [0, 1, 2], multiple_of=1, pad_token=0, device=torch.device("cpu"))
    routers = [SimpleNamespace(layer_number=layer + 1) for layer in SHAPE.layers]
    replayer = SimpleNamespace(config=RoutingConfig(replay="r3"), shape=SHAPE, layers=[*SHAPE.layers], routers=routers)
    replayer.device, replayer._check_rows = torch.device("cpu"), partial(RouterReplayer._check_rows, replayer)
    replayer._own_keys = partial(RouterReplayer._own_keys, replayer)
    replayer._known, replayer._slices = CheckedRoutes(), {}
    first = RouterReplayer.slice(replayer, batch.sequences, microbatch)
    assert RouterReplayer.slice(replayer, batch.sequences, microbatch) is first
    with_routes(batch, random_routes(batch, seed=1))
    other = RouterReplayer.slice(replayer, batch.sequences, microbatch)
    assert other.experts[0].tolist() == batch.sequences[0].routed_experts[0].tolist() != first.experts[0].tolist()
    assert RouterReplayer.slice(replayer, batch.sequences, microbatch) is other


def test_or_it_is_left_to_the_router():
    replayer, routes, sequences = damaged("fallback")
    before, row = routes.experts.copy(), sequences[0].whole_length - 2 + 4
    RouterReplayer._check_rows(replayer, routes)
    routes.settle()
    assert routes.num_missing == 1
    assert (routes.experts[row, 1] == missing_id(SHAPE.dtype)).all()
    changed = np.argwhere((routes.experts != before).any(-1)).tolist()
    assert changed == [[row, 1]]
    ids, counted = routes.on(torch.device("cpu"))
    assert ids[1][row].tolist() == [-1, -1]
    assert not counted[row, 1]
