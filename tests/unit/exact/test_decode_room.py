"""Room for keys and values: what a device leaves, and what is said where it is too little."""

import pytest
import torch

from megatron_rl.errors import InputError
from megatron_rl.exact.decode import CacheShape, num_cache_pages, rows_and_steps

SHAPE = CacheShape(num_layers=48, kv_heads=4, width=128, element=2)  # Qwen3-30B-A3B
GIB = 1 << 30
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FORTY_GIB = 40 * GIB // SHAPE.page_bytes


def test_a_page_has_keys_and_values_of_every_layer():
    assert SHAPE.page_bytes == 32 * 98304  # 96 KiB a token


@pytest.fixture
def gpu(monkeypatch):
    """80 GiB, 24 of them free, and 6 of the learner's that PyTorch keeps unused."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 46 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 40 * GIB)


def test_pages_are_what_the_share_of_a_gpu_leaves(gpu):
    assert num_cache_pages(SHAPE, 10**6, 10240, CUDA, None, 0.75) == 10 * GIB // SHAPE.page_bytes
    assert num_cache_pages(SHAPE, 1000, 10240, CUDA, None, 0.75) == 1000, "no more than are wanted"
    assert num_cache_pages(SHAPE, 10**6, 10240, CUDA, 40.0, 0.75) == FORTY_GIB


def test_too_little_room_names_key_and_fix(gpu):
    message = r"rollout.kv_cache_gib: null, room for \d+ pages of 32 tokens; the longest prompt .* 10240 tokens, .* 322"
    with pytest.raises(InputError, match=message + r".* to 0.944 or more, raise rollout.gpu_memory_utilization"):
        num_cache_pages(SHAPE, 10**6, 10240, CUDA, None, 0.63)
    with pytest.raises(InputError, match=r"rollout.kv_cache_gib: 0.5, .* to 0.944 or more, or lower rollout.max_resp"):
        num_cache_pages(SHAPE, 10**6, 10240, CPU, 0.5, 0.63)
    assert num_cache_pages(SHAPE, 10**6, 10240, CPU, 0.944, 0.63) >= 322


def test_rows_and_steps():
    assert rows_and_steps(CUDA) == (64, 16)
    assert rows_and_steps(CPU) == (16, 1)
