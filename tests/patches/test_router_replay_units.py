"""Patched replay of routes in megatron.core, which needs neither ranks nor a model."""

import pytest
import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction


@pytest.fixture
def router():
    """A router of layer 5, not in the global list afterwards."""
    replay = RouterReplay()
    replay.layer_number = 5
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    yield replay
    RouterReplay.global_router_replay_instances.remove(replay)


def topk(scores, k, *groups):
    return torch.topk(scores, k, dim=1)


SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3], [0.2, 0.3, 0.1, 0.4]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_replay_takes_any_integer_type(router, dtype):
    indices = torch.tensor([[0, 2], [3, 1], [1, 0]], dtype=dtype)
    router.set_target_indices(indices)
    probs, chosen = router.get_replay_topk(SCORES, 2, default_compute_topk=topk)
    assert chosen.tolist() == indices.tolist()
    assert torch.equal(probs, SCORES.gather(1, indices.long()))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (None, "no indices to replay"),
        ([[0.0, 2.0], [3.0, 1.0], [1.0, 0.0]], "torch.float32, expected integers"),
        ([[True, False], [True, False], [False, True]], "torch.bool, expected integers"),
        ([[0, 2], [3, 1]], r"shape \(2, 2\), but the router has 3 tokens and selects 2"),
        ([[0, 2, 1], [3, 1, 0], [1, 0, 2]], r"shape \(3, 3\)"),
        ([[0, 2], [3, 3], [1, 0]], r"token 1 is given the experts \[3, 3\]"),
        ([[0, 2], [3, 1], [1, 4]], r"token 2 is given the experts \[1, 4\].* 0 to 3"),
        ([[0, -1], [3, 1], [1, 0]], r"token 0 is given the experts \[0, -1\]"),
        ([[-2, -2], [3, 1], [1, 0]], r"token 0 is given the experts \[-2, -2\]"),
    ],
)
def test_replay_refuses_wrong_indices(router, indices, message):
    router.target_topk_idx = None if indices is None else torch.tensor(indices)
    with pytest.raises(ValueError, match=f"layer 5.*{message}"):
        router.get_replay_topk(SCORES, 2, default_compute_topk=topk)


def test_the_queue_of_upstream_still_works(router):
    first, second = torch.tensor([[0, 2], [3, 1], [1, 0]]), torch.tensor([[1, 2], [3, 0], [1, 3]])
    RouterReplay.set_replay_data([first], [router])
    RouterReplay.set_replay_data([second], [router])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD, [router])
    for expected in (first, second):
        assert torch.equal(router.get_replay_topk(SCORES, 2, default_compute_topk=topk)[1], expected)
    with pytest.raises(ValueError, match="no indices to replay"):
        router.get_replay_topk(SCORES, 2, default_compute_topk=topk)


def test_static_methods_without_instances_mean_all_of_the_process(router):
    other = RouterReplay()
    try:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        assert other.router_replay_action == router.router_replay_action == RouterReplayAction.RECORD
        RouterReplay.clear_global_router_replay_action([other])
        assert (other.router_replay_action, router.router_replay_action) == (None, RouterReplayAction.RECORD)
    finally:
        RouterReplay.global_router_replay_instances.remove(other)


@pytest.mark.parametrize("action_in_backward", [*RouterReplayAction, None])
def test_recomputation_selects_what_the_forward_pass_selected(router, action_in_backward, monkeypatch):
    from megatron.core.tensor_parallel import random

    # The states of random numbers need process groups, and nothing here is random.
    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *states: None)
    seen = []

    def select(scores):
        probs, chosen = router.get_replay_topk(scores, 2, default_compute_topk=topk)
        seen.append(chosen)
        return probs

    first, second = torch.tensor([[0, 2], [3, 1], [1, 0]]), torch.tensor([[1, 2], [3, 0], [1, 3]])
    scores = SCORES.clone().requires_grad_()
    router.set_target_indices(first)
    output = checkpoint(select, False, scores)
    router.set_target_indices(second)
    router.router_replay_action = action_in_backward
    output.sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[1], first)
    assert torch.equal(scores.grad, torch.zeros(3, 4).scatter(1, first, 1.0))


def test_recomputation_of_a_pass_that_replayed_nothing_replays_nothing(router, monkeypatch):
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *states: None)
    scores = SCORES.clone().requires_grad_()
    router.router_replay_action = None
    output = checkpoint(lambda s: router.get_replay_topk(s, 2, default_compute_topk=topk)[0], False, scores)
    router.set_target_indices(torch.tensor([[0, 3], [1, 2], [2, 0]]))
    router.router_replay_action = RouterReplayAction.REPLAY_FORWARD
    output.sum().backward()
    assert torch.equal(scores.grad, torch.zeros(3, 4).scatter(1, SCORES.topk(2, dim=1).indices, 1.0))
