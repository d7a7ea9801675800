"""Unit costs from measurements of steps of several sizes, for `tools.bench.scale`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from megatron_rl.instruments.plan.memory import OF_A_PASS, drivers

WHATS = ("seconds", "received", "peak")


@dataclass(frozen=True)
class Setting:
    """A step: ``sequences`` of the whole job, each of ``length`` tokens with its prompt."""

    ranks: int
    sequences: int
    length: int
    routes: bool


@dataclass
class Cost:
    """Of one stage on one rank. Processor seconds, bytes received from others, bytes of memory above the start."""

    seconds: float = 0.0
    received: float = 0.0
    peak: float = 0.0


Found = dict[Setting, dict[str, Cost]]


def fit(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Non-negative coefficients of least relative squares: of all subsets of columns the best that is."""
    if not values.max(initial=0.0):
        return np.zeros(rows.shape[1])
    weight = 1 / np.maximum(values, values.max() / 1000)  # a thousandth of the largest is noise
    a, b = rows * weight[:, None], values * weight
    best, best_error = np.zeros(rows.shape[1]), np.inf
    for size in range(1, rows.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(rows.shape[1]), size)):
            solution = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            error = float(((a[:, columns] @ solution - b) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(rows.shape[1]), error
                best[columns] = solution
    return best


def unit_costs(measured: Found, route_bytes: int, tensor: int) -> dict[str, dict[str, list[float]]]:
    """What `plan.own_code` keeps: stage → seconds, received, peak → cost of each driver.

    ``route_bytes``: of a token. ``tensor``: ranks of a replica.
    """
    stages = next(iter(measured.values()))
    units: dict[str, dict[str, list[float]]] = {}
    for stage in stages:
        its = [setting for setting in measured if stage in measured[setting]]
        rows = np.array([_drivers(stage, setting, route_bytes, tensor) for setting in its])
        values = {what: np.array([getattr(measured[setting][stage], what) for setting in its]) for what in WHATS}
        values["seconds"] /= 2 if stage in OF_A_PASS else 1  # here: a pass for old log-probs and one of the update
        units[stage] = {what: [float(f"{x:.3g}") for x in fit(rows, values[what])] for what in WHATS}
    return units


def _drivers(stage: str, s: Setting, route_bytes: int, tensor: int) -> tuple[float, ...]:
    tokens = s.sequences * s.length
    return drivers(stage, tokens, tokens * route_bytes * s.routes, s.sequences, s.ranks, s.ranks // tensor)


def line(sockets: dict[int, int]) -> list[float]:
    """[constant, per rank] of the sockets of a rank."""
    ranks = np.array([[1.0, n] for n in sockets])
    return [round(float(x), 2) for x in np.linalg.lstsq(ranks, np.array(list(sockets.values())), rcond=None)[0]]
