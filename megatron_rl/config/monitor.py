"""The `monitor` section: what is watched and written, and which rules act on it.

Every run has rules beside those of its recipe: levels at which a run is dead or dying. `docs/schedule-and-alarms.md`
says on which runs they were set, and how they did on others.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from megatron_rl.config.base import OffCount, Section
from megatron_rl.config.objective import ObjectiveConfig


class WandbSinkConfig(Section):
    """Weights & Biases (package `wandb`). The key comes from `wandb login` or WANDB_API_KEY, never from a recipe."""

    project: str = "megatron_rl"
    """The service's project; made where it is not there."""
    entity: str | None = None
    """Team or user; null: the key's own."""
    group: str | None = None
    """Runs with the same group are drawn as one, as seeds of one arm."""
    mode: Literal["online", "offline"] = "online"
    """offline: everything stays in RUN/wandb until `wandb sync`."""


class SinksConfig(Section):
    wandb: WandbSinkConfig | None = None
    """Weights & Biases. null: not used; `{}` takes the defaults: `--set monitor.sinks.wandb={}`."""


Action = Literal["warn", "decay_lr", "save", "record_batch", "rollback", "stop"]
Statistic = Literal[
    "value", "mean", "ratio", "of_best", "of_start", "slope", "log_slope", "log_slope_lower", "not_finite"
]


class AlarmRule(Section):
    """`statistic` of `metric` above (or below) a bound in `for_steps` observations in a row: do what `then` says."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the rule; the metric alarm/<name> is 1 in steps in which it goes off and 0 in the others."""
    metric: str
    """A metric by its name in metrics.jsonl. Steps without it do not count."""
    statistic: Statistic = "value"
    """value: the metric. mean: its mean over the window. of_best: that mean over the highest one so far, both above 0,
    or above the lowest value so far where that is less (with a margin for noise). of_start: the median of the window
    over the median of the run's first window. ratio: the metric over the median of the window before it. slope:
    least-squares slope over the window, per step. log_slope: the same of the metric's natural logarithm (0.01 = 1% a
    step). log_slope_lower: the lower end of that slope's 95% confidence interval. not_finite: 1 for NaN or infinity,
    else 0."""
    window: PositiveInt = 20
    """Observations that a statistic other than value and not_finite looks at; until there are as many, it says
    nothing."""
    above: float | None = None
    """The rule's condition holds while the statistic is greater than this."""
    below: float | None = None
    """The rule's condition holds while the statistic is smaller than this."""
    for_steps: PositiveInt = 1
    """Consecutive observations for which the condition must hold."""
    then: list[Action] = Field(["warn"], min_length=1)
    """warn: say so. decay_lr: halve the learning rate (not below min_lr). save: write a checkpoint. record_batch:
    write the step's batch to batches/. rollback: go back to the newest checkpoint from before the rule's condition
    began to hold, and halve the learning rate; what came after is undone. At most `max_rollbacks` times, then it is
    stop. stop: save and end the run with exit status 3."""

    @model_validator(mode="after")
    def _one_bound(self) -> AlarmRule:
        if self.statistic == "not_finite":
            if self.above is not None or self.below is not None:
                raise ValueError("above/below: statistic not_finite needs no bound; remove it")
        elif (self.above is None) == (self.below is None):
            raise ValueError(f"rule {self.name!r}: give exactly one of above and below")
        if "rollback" in self.then and "stop" in self.then:
            raise ValueError(f"rule {self.name!r}: then has rollback and stop; stop would end the run first: use one")
        if self.statistic in ("slope", "log_slope", "log_slope_lower") and self.window < 3:
            raise ValueError(f"window: {self.window} observations have no slope with a confidence; use at least 3")
        return self


class SamplesConfig(Section):
    """Responses that are written as text: samples.jsonl, `megatron-rl run samples RUN`."""

    every: OffCount = 10
    """Steps between them; null or 0: none."""
    number: PositiveInt = 4
    """Responses of such a step: the best and the worst rewarded, the longest, then the first ones. Of longer text
    than 4000 characters the middle is left out, and of more than 64 MiB in samples.jsonl the older half."""


class MonitorConfig(Section):
    tensorboard: bool = True
    """Write TensorBoard event files."""
    sinks: SinksConfig = SinksConfig()
    """Services that get the same metrics."""
    terminal: Literal["auto", "live", "plain", "off"] = "auto"
    """off: nothing is printed. The other values mean the same: one line per step. log.txt has the lines in every
    case."""
    samples: SamplesConfig = SamplesConfig()
    """Which sampled texts are written, and how much of them."""
    plots: bool = True
    """Draw plots/curves.png at the end of the run."""
    gradient_noise: bool = True
    """Measure in every update what noise/gns, noise/update_rms and noise/relative_update need. One pass over the
    gradients, one over Adam's moments; phase `noise`. The noise scale also needs two data-parallel ranks, or two
    microbatches without a pipeline."""
    growth_window: int = Field(50, ge=3)
    """Steps over which mismatch/growth, the slope of log mismatch/rho_std, is fitted."""
    levels: bool = True
    """Warn of what is certainly wrong, beside the rules of `alarms`: no signal, no gradient, reward far below its best,
    mismatch above what the dtypes explain, and others. A rule of the same name in `alarms` takes the place of one."""
    max_rollbacks: PositiveInt = 2
    """How often alarms with `rollback` take the run back; at the next one it is saved and ends with exit status 3."""
    alarms: list[AlarmRule] = []
    """Rules that act; see `megatron-rl run score-alarms` for what they would have done in past runs."""

    @model_validator(mode="after")
    def _unique_names(self) -> MonitorConfig:
        names = [rule.name for rule in self.alarms]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"alarms: more than one rule is named {', '.join(twice)}")
        return self


# Most that mismatch/rho_std may be, by the coarser type of the two sides. The largest values of the first five steps of
# the lab's runs are 2e-6, 0.015, 0.031, 0.16 and 0.70 for fp32, fp16, bf16, fp8 and int4. A sharper policy has more,
# so the bounds leave a factor of 3 to 10, and more in fp32, where one token may tell. tf32 rounds like fp16, and int8
# like fp8.
RHO_BOUNDS = {"fp32": 1e-3, "tf32": 0.1, "fp16": 0.1, "bf16": 0.3, "fp8": 0.5, "int8": 0.5, "int4": 2.0}

LEVELS = (
    AlarmRule(name="no-signal", metric="groups/no_signal_frac", above=0.999, for_steps=5),
    AlarmRule(name="no-gradient", metric="actor/grad_norm", below=1e-12, for_steps=5),
    AlarmRule(name="no-rate", metric="actor/lr", statistic="of_best", window=1, below=1e-6, for_steps=5),
    AlarmRule(name="gradient-jump", metric="actor/grad_norm", statistic="of_start", window=5, above=30.0),
    AlarmRule(name="reward-drop", metric="critic/rewards/mean", statistic="of_best", window=10, below=0.7),
    AlarmRule(name="reward-break", metric="critic/rewards/mean", statistic="of_best", window=3, below=0.5),
    AlarmRule(name="held-out-drop", metric="val/reward/mean", statistic="of_best", window=2, below=0.75),
    AlarmRule(name="mismatch-surge", metric="mismatch/rho_std", statistic="of_start", window=10, above=8.0),
    AlarmRule(name="update-size", metric="noise/relative_update", statistic="mean", window=3, above=0.003),
    AlarmRule(name="policy-jump", metric="actor/ppo_kl", above=0.1, for_steps=3),
    AlarmRule(name="policy-drift", metric="actor/ppo_kl", statistic="mean", window=10, above=0.03),
    AlarmRule(name="truncated", metric="response_length/clip_ratio", statistic="mean", window=10, above=0.5),
    AlarmRule(name="length-surge", metric="response_length/mean", statistic="ratio", window=20, above=2.0, for_steps=3),
    AlarmRule(name="entropy-floor", metric="actor/entropy", below=0.005, for_steps=5),
    AlarmRule(name="entropy-surge", metric="actor/entropy", statistic="of_start", window=5, above=2.5),
    AlarmRule(name="overflows", metric="actor/update_skipped", statistic="mean", window=10, above=0.5),
)

# Rules that warn of a risk before any harm is done: they say nothing of when the trouble began.
RISKS = frozenset({"update-size", "policy-drift"})


def level_rules(recipe: Mapping[str, Any]) -> list[AlarmRule]:
    """`LEVELS`, and `mismatch-contract` of the recipe's types; none where `monitor.levels` is false.

    ``recipe``: as plain values; keys that are absent count as unknown. The mismatch of a dose (`exact.noise`), of
    another policy (`precision.allow_asymmetric`), of old weights and of updates (`mismatch_has_updates`) has no bound.
    Adapters, which begin at zero, have no `update-size`. With kept sets the entropy is that of the kept tokens, often a
    single one: no `entropy-floor`.
    """
    if not _get(recipe, "monitor", "levels", default=True):
        return []
    left_out = {"update-size"} if _get(recipe, "learner", "lora") is not None else set()
    left_out |= {"entropy-floor"} if _get(recipe, "rollout", "kept_sets") else set()
    levels = [rule for rule in LEVELS if rule.name not in left_out]
    bound = _rho_bound(recipe)
    if bound is None:
        return levels
    return [*levels, AlarmRule(name="mismatch-contract", metric="mismatch/rho_std", above=bound, for_steps=5)]


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
    if None in types or any(excused) or mismatch_has_updates(recipe):
        return None
    return max(RHO_BOUNDS[name] for name in types)


def mismatch_has_updates(recipe: Mapping[str, Any]) -> bool:
    """Return whether mu is compared with pi after earlier updates of the batch, because there is no pass for po.

    ``recipe``: as plain values.
    """
    updates, objective = _get(recipe, "batch", "minibatches", default=1), _get(recipe, "objective")
    if not isinstance(objective, Mapping) or not isinstance(updates, int) or updates < 2:
        return False
    if _get(recipe, "routing", "replay") == "r2" or _get(recipe, "teacher", "student") == "recompute":
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return not ObjectiveConfig.model_validate(objective).needs_old_logprobs(updates)
    except ValidationError:  # of another version
        return False


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in RHO_BOUNDS


def _get(recipe: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    value: Any = recipe
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value
