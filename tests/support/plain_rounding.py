"""Rounding of weights block by block in numpy, from the definitions of the types; nothing of the package or of torch's
own float8 in it."""

from collections.abc import Mapping

import numpy as np
import torch

# e4m3fn: sign, four bits of exponent with bias 7, three of mantissa; exponent 0 is subnormal, all ones is no number.
E4M3 = np.array([(8 + m if e else m) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:-1])
INT_MAX = {"int8": 127, "int4": 7}
Block = tuple[int | None, int | None]


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest e4m3fn number, of two the one with an even mantissa. ``x`` within ±448."""
    size = np.abs(x.astype(np.float64))
    above = np.searchsorted(E4M3, size).clip(max=len(E4M3) - 1)
    below = (above - 1).clip(min=0)
    down, up = size - E4M3[below], E4M3[above] - size
    index = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return np.copysign(E4M3[index], x)


def plain_rounded(weight: torch.Tensor, kind: str, block: Block) -> torch.Tensor:
    """``weight`` [n, m] through ``kind`` and back, in its own dtype."""
    values, f32 = weight.float().numpy(), np.float32
    result = np.empty_like(values)
    rows, columns = block[0] or values.shape[0], block[1] or values.shape[1]
    for i in range(0, values.shape[0], rows):
        for j in range(0, values.shape[1], columns):
            part = values[i : i + rows, j : j + columns]
            largest = np.abs(part).max()
            if kind != "fp8":
                scale = largest / f32(INT_MAX[kind]) or f32(1)
                codes = np.rint(part / scale)  # to even
            elif block == (1, None):
                scale = max(largest / f32(448), f32(1) / (f32(448) * f32(512)))
                codes = to_e4m3(np.clip(part / scale, -448, 448))
            elif block == (None, None):
                scale = largest / f32(448) or f32(1)
                codes = to_e4m3(np.clip(part * (f32(1) / scale), -448, 448))
            else:
                scale = max(largest, f32(1e-4)) / f32(448)
                codes = to_e4m3(np.clip(part * (f32(1) / scale), -448, 448))
            result[i : i + rows, j : j + columns] = codes.astype(f32) * scale
    return torch.from_numpy(result).to(weight.dtype)


_ALONE = tuple(f".{name}.weight" for name in ("o_proj", "down_proj", "query_key_value", "dense"))


def rounded_checkpoint(weights: Mapping[str, torch.Tensor], kind: str, block: Block) -> dict[str, torch.Tensor]:
    """A checkpoint with rounded weights: query, key and value as one matrix, gate and up as one, but those of experts
    that are chosen each by itself."""
    rounded = dict(weights)
    for name, tensor in weights.items():
        is_chosen = ".experts." in name
        if name.endswith(".q_proj.weight") or (name.endswith(".gate_proj.weight") and not is_chosen):
            first, *others = ("q", "k", "v") if name.endswith(".q_proj.weight") else ("gate", "up")
            names = [name, *(name.replace(f".{first}_proj.", f".{part}_proj.") for part in others)]
            together = plain_rounded(torch.cat([weights[n] for n in names]), kind, block)
            rounded |= dict(zip(names, together.split([len(weights[n]) for n in names]), strict=True))
        elif name.endswith(_ALONE) or (is_chosen and name.endswith("_proj.weight")):
            rounded[name] = plain_rounded(tensor, kind, block)
    return rounded
