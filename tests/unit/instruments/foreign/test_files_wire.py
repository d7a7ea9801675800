"""Framed records: what a reader of `.wandb` files joins."""

from __future__ import annotations

import struct
import zlib

from megatron_rl.instruments.foreign.read import read_run


def test_fragments_of_a_wandb_file_are_joined(tmp_path):
    """A record that is longer than a block of 32 KiB is in several fragments, and a short rest of a block is filled."""

    def message(number: int, data: bytes) -> bytes:
        length, size = b"", len(data)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    def history(step: int, text: bytes) -> bytes:
        reward = message(1, b"reward") + b"\x82\x01\x04" + b"0.25"  # field 16: JSON, as clients up to 0.20 write
        signal = message(1, b"frac_reward_zero_std") + b"\x31" + struct.pack("<d", 0.5)  # field 6, as later ones do
        other = message(1, b"note") + message(7, text)
        return message(2, message(1, reward) + message(1, signal) + message(1, other) + message(2, bytes([8, step])))

    data = bytearray(b":W&B" + bytes(3))
    for step, size in ((1, 10), (2, 40_000), (3, None), (4, 10)):
        if size is None:  # it ends 3 bytes before its block does
            size = next(n for n in range(32768) if (len(data) + 7 + len(history(step, bytes(n)))) % 32768 == 32765)
        left = history(step, b"x" * size)
        first = True
        while left:
            room = 32768 - len(data) % 32768
            if room < 7:
                data += bytes(room)
                continue
            part, left = left[: room - 7], left[room - 7 :]
            kind = 1 if first and not left else 2 if first else 3 if left else 4
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
    (tmp_path / "run-1.wandb").write_bytes(data)
    run = read_run(tmp_path)
    assert [(r["step"], r["critic/rewards/mean"], r["groups/no_signal_frac"]) for r in run.records] == [
        (step, 0.25, 0.5) for step in (1, 2, 3, 4)
    ]
