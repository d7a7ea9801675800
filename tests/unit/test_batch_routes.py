"""Routes that the engine hands over pass the checks of a batch; rows without a record are left to the router."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.batch import build_batch
from megatron_rl.config import ObjectiveConfig
from megatron_rl.config.sections import BatchConfig
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.requests import Request, make_rollout
from megatron_rl.routing import RouteError, RouteShape, pack_routes
from megatron_rl.types import Group, Prompt
from tests.support.tiny import MODEL

SHAPE = RouteShape(num_experts=8, topk=2, layers=(0, 1, 2, 3))


def engine_answer(routes: np.ndarray):
    """A rollout of 3 prompt and 4 response tokens, as the engine's answer is unpacked, and its group."""
    prompt = Prompt(id="train:7", tokens=[1, 40, 41], answer="")
    rollout = make_rollout(
        Request(0, prompt, 2, seed=0),
        [50, 51, 52, 2],
        [-1.0] * 4,
        "stop",
        0,
        routes=routes,
        architecture=read_architecture(MODEL),
    )
    return rollout, Group(prompt, [rollout])


def test_what_the_engine_hands_over_passes_the_learners_checks():
    routes = np.random.default_rng(0).random((6, 4, 8)).argsort(-1)[..., :2]
    _, group = engine_answer(routes)
    (sequence,) = build_batch(0, [group], BatchConfig(), ObjectiveConfig()).sequences
    packed = pack_routes([sequence], 0, SHAPE)
    assert (packed.take([(0, 7)], range(4)).experts[:-1] == routes).all()
    sequence.id = "train:7/3"  # the routes of another sample of the same prompt
    with pytest.raises(RouteError, match="sequence train:7/3: routes do not belong"):
        pack_routes([sequence], 0, SHAPE)


def test_rows_that_the_engine_did_not_record_are_left_to_the_router():
    routes = np.random.default_rng(0).random((6, 4, 8)).argsort(-1)[..., :2]
    routes[2, 1] = -1
    _, group = engine_answer(routes)
    (sequence,) = build_batch(0, [group], BatchConfig(), ObjectiveConfig()).sequences
    packed = pack_routes([sequence], 0, SHAPE).take([(0, 7)], range(4))
    packed.settle()
    ids, counted = packed.on(torch.device("cpu"))
    assert packed.num_missing == 1
    assert packed.num_due == 24
    assert ids[1][2].tolist() == [-1, -1]
    assert counted.sum() == 23
    routes[2, 1] = [-1, 3]
    with pytest.raises(RolloutError, match="token 2, layer 1: route to expert -1 of 8"):
        engine_answer(routes)
