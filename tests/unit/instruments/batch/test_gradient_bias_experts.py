"""Loads, flips and shares of the mismatch by expert, by hand."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.instruments.batch.gradient_bias import ExpertReport, _add
from megatron_rl.routing import RouteShape
from megatron_rl.types import Rollout
from tests.support.groups import whole_sequence
from tests.support.rounding import rounded

SHAPE = RouteShape(num_experts=4, topk=2, layers=(1, 3))


def empty() -> ExpertReport:
    counts = (np.zeros((2, 4), np.int64) for _ in range(4))
    return ExpertReport(SHAPE.layers, *counts, np.zeros((2, 4)), 0.0, 0)


def sequence(num_response: int = 2, prompt: int = 2) -> Rollout:
    return whole_sequence(
        id="a/0",
        tokens=np.arange(prompt + num_response),
        prompt_length=prompt,
        inference_logprobs=np.log(np.full(num_response, 0.5, np.float32)),
        loss_mask=np.ones(num_response, dtype=bool),
        advantage=1.0,
        reward=1.0,
        policy_versions=np.zeros(num_response, np.int32),
    )


def routes(*tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.uint8)


ENGINE = routes([[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]])  # P + R - 1 = 3 tokens, 2 layers, top-2
# Token 1, which samples the first response token: layer 0 has expert 2 for 1. The order within a row means nothing.
LEARNER = routes([[1, 0], [3, 2]], [[0, 2], [2, 3]], [[0, 1], [2, 3]])


def test_loads_flips_and_shares():
    report = empty()
    log_po = np.log([1.0, 0.75]).astype(np.float32)  # rho 2 and 1.5: squares 1 and 0.25
    _add(report, sequence(), ENGINE, LEARNER, log_po, SHAPE)
    assert report.engine_load.tolist() == [[3, 3, 0, 0], [0, 0, 3, 3]]
    assert report.learner_load.tolist() == [[3, 2, 1, 0], [0, 0, 3, 3]]
    assert report.gained.tolist() == [[0, 0, 1, 0], [0] * 4]
    assert report.lost.tolist() == [[0, 1, 0, 0], [0] * 4]
    assert report.total_deviation == rounded(1.25, dtype=torch.float32)
    assert report.rho_share == rounded(np.array([[0, 0.4, 0.4, 0], [0] * 4]), dtype=torch.float32)
    assert report.share_without_flip == rounded(0.2, dtype=torch.float32)
    assert (report.num_trained, report.num_flipped) == (2, 1)
    first = report.rows(1)[0]
    assert (first["layer"], first["expert"]) in {(1, 1), (1, 2)}  # numbers of the model's layers
    assert first["rho_share"] == rounded(0.4, dtype=torch.float32)


def test_masked_tokens_and_missing_routes_do_not_count():
    report = empty()
    masked = sequence()
    masked.sampled, masked.num_sampled = np.array([False, True]), 1
    engine = ENGINE.copy()
    engine[1] = 255
    _add(report, masked, engine, LEARNER, np.log([1.0, 0.75]).astype(np.float32), SHAPE)
    assert report.gained.sum() == report.lost.sum() == 0
    assert report.engine_load.sum() == report.learner_load.sum() == 2 * 2 * 2
    assert report.total_deviation == rounded(0.25, dtype=torch.float32)
    assert report.share_without_flip == 1.0
    assert (report.num_trained, report.num_flipped) == (1, 0)


def test_engines_that_agree_have_nothing_to_share():
    report = empty()
    _add(report, sequence(), ENGINE, ENGINE, np.log(np.full(2, 0.5, np.float32)), SHAPE)
    assert report.total_deviation == 0.0
    assert report.rho_share.sum() == report.share_without_flip == 0.0
