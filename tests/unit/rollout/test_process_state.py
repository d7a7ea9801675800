"""What starting an engine in a rank's own process leaves alone."""

import torch

from megatron_rl.rollout import process_state


def test_starting_an_engine_touches_no_gpu_but_its_own(monkeypatch):
    """Random states are put back afterwards: those of all GPUs would start CUDA on each of them."""
    forked, fork_rng = [], torch.random.fork_rng

    def noted(devices=None, *args, **kwargs):
        forked.append(devices)
        return fork_rng([], *args, **kwargs)

    monkeypatch.setattr(torch.random, "fork_rng", noted)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for initialized in (True, False):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda answer=initialized: answer)
        with process_state.contained(3):
            pass
    assert forked == [[3], []]
