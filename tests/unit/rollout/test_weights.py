"""Checksums of stored weights notice every change, on every device."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.rollout import weights
from megatron_rl.rollout.weights import device_checksum

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """Steele, Lea, Flood (2014), in Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100])
@pytest.mark.parametrize("words", [1, 3, 1 << 23])
def test_the_sum_is_that_of_the_definition(monkeypatch, length, words):
    monkeypatch.setattr(weights, "_WORDS", words)
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    raw = bytes(data.tolist()) + bytes(-length % 8)
    numbers = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    assert device_checksum(data) == sum(splitmix(w ^ splitmix(i)) for i, w in enumerate(numbers, 1)) & MASK


def test_every_bit_and_every_exchange_counts():
    data = torch.arange(40, dtype=torch.uint8)
    seen = {device_checksum(data)}
    for place in range(40):
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            seen.add(device_checksum(changed))
    assert len(seen) == 1 + 40 * 8
    words = data.view(5, 8)
    for a in range(5):
        for b in range(a):
            order = list(range(5))
            order[a], order[b] = b, a
            seen.add(device_checksum(words[order].reshape(-1)))
    assert len(seen) == 1 + 40 * 8 + 10
