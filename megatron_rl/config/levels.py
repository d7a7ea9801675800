"""Rules that every run has beside those of its recipe: levels at which a run is dead or dying.

`docs/schedule-and-alarms.md` says on which runs they were set, and how they did on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.monitor import AlarmRule

# Most that mismatch/rho_std may be, by the coarser type of the two sides. The largest values of the first five steps of
# the lab's runs are 2e-6, 0.015, 0.031, 0.16 and 0.70 for fp32, fp16, bf16, fp8 and int4. A sharper policy has more,
# so the bounds leave a factor of 3 to 10, and more in fp32, where one token may tell. tf32 rounds like fp16, and int8
# like fp8.
RHO_BOUNDS = {"fp32": 1e-3, "tf32": 0.1, "fp16": 0.1, "bf16": 0.3, "fp8": 0.5, "int8": 0.5, "int4": 2.0}

LEVELS = (
    AlarmRule(name="no-signal", metric="groups/no_signal_frac", above=0.999, for_steps=5),
    AlarmRule(name="no-gradient", metric="actor/grad_norm", below=1e-12, for_steps=5),
    AlarmRule(name="reward-drop", metric="critic/rewards/mean", statistic="of_best", window=10, below=0.7),
    AlarmRule(name="held-out-drop", metric="val/reward/mean", statistic="of_best", window=2, below=0.75),
    AlarmRule(name="mismatch-surge", metric="mismatch/rho_std", statistic="of_start", window=10, above=8.0),
    AlarmRule(name="policy-jump", metric="actor/ppo_kl", above=0.1, for_steps=3),
    AlarmRule(name="truncated", metric="response_length/clip_ratio", statistic="mean", window=10, above=0.5),
    AlarmRule(name="length-surge", metric="response_length/mean", statistic="ratio", window=20, above=2.0, for_steps=3),
    AlarmRule(name="entropy-floor", metric="actor/entropy", below=0.005, for_steps=5),
    AlarmRule(name="entropy-surge", metric="actor/entropy", statistic="of_start", window=5, above=2.5),
    AlarmRule(name="overflows", metric="actor/update_skipped", statistic="mean", window=10, above=0.5),
)


def level_rules(recipe: Mapping[str, Any]) -> list[AlarmRule]:
    """`LEVELS`, and `mismatch-contract` of the recipe's types; none where `monitor.levels` is false.

    ``recipe``: as plain values; keys that are absent count as unknown. The mismatch of a dose (`exact.noise`), of
    another policy (`precision.allow_asymmetric`) and of old weights has no bound.
    """
    if not _get(recipe, "monitor", "levels", default=True):
        return []
    bound = _rho_bound(recipe)
    if bound is None:
        return list(LEVELS)
    return [*LEVELS, AlarmRule(name="mismatch-contract", metric="mismatch/rho_std", above=bound, for_steps=5)]


def _rho_bound(recipe: Mapping[str, Any]) -> float | None:
    quantization = _get(recipe, "rollout", "quantization") or {}
    rounded = quantization.values() if isinstance(quantization, Mapping) else (quantization,)
    types = {_get(recipe, "learner", "dtype"), _get(recipe, "rollout", "dtype"), *filter(_is_type, rounded)}
    excused = (
        _get(recipe, "exact", "noise"),
        _get(recipe, "exact", "noise_std"),
        _get(recipe, "precision", "allow_asymmetric"),
        _get(recipe, "rollout", "max_staleness"),
    )
    if None in types or any(excused):
        return None
    return max(RHO_BOUNDS[name] for name in types)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in RHO_BOUNDS


def _get(recipe: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    value: Any = recipe
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value
