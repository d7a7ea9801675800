"""Names of metrics in the logs of other projects, each beside the one of ours that means the same.

A table was read from the source of one version. A metric of theirs that only resembles one of ours is not in it: it
keeps its own name, and the rules that need ours are said to see nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

LEAST_VARIANCE = 1e-6  # verl's means are float32 numbers near 1: a smaller variance of rho is their rounding


@dataclass(frozen=True)
class Name:
    """``theirs``: as the project writes it, with ``<…>`` for a part that varies and ``k`` for a number.

    Of several metrics that fit (data sets, agents) the mean is taken.
    """

    ours: str
    theirs: str
    note: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """``theirs`` as a regular expression of the whole name. TensorBoard writes "_" for "@", MLflow "_at_"."""
        text = re.escape(self.theirs).replace("\\ ", " ")
        for part, expression in _PARTS.items():
            text = text.replace(part, expression)
        return re.compile(text)


_AT = "(?:@|_at_|_)"
_PARTS = {
    "@k": rf"{_AT}\d+",
    "<agent>": "[^/]+",
    "<data set>": "[^/]+",
    "<data source>": ".+",  # may be "openai/gsm8k"
    "<environment>": ".+",
}


@dataclass(frozen=True)
class Project:
    """One project's table. ``marks``: names that only its logs have."""

    name: str
    version: str
    commit: str
    date: str
    names: tuple[Name, ...]
    marks: tuple[str, ...]
    first_step: int = 1
    updates: str = ""  # metrics that begin so are counted in updates, all others in batches of rollouts
    leave_out: str = ""  # an expression of names that a pattern would fit by mistake
    derived: Mapping[str, Callable[[Mapping[str, float]], float | None]] = field(default_factory=dict)

    def ours(self, theirs: str) -> list[str]:
        """Which of our metrics ``theirs`` is."""
        if self.leave_out and re.fullmatch(self.leave_out, theirs):
            return []
        return [name.ours for name in self.names if name.pattern.fullmatch(theirs)]


def _rho_std(row: Mapping[str, float]) -> float | None:
    """The standard deviation of rho = po/mu, from verl's means over tokens.

    chi2_token is E rho² - 1, k3_kl is E (rho - 1 - log rho) and kl is -E log rho, so that E rho = 1 + k3_kl - kl.
    """
    chi2, k3, kl = (row.get(f"rollout_corr/{name}") for name in ("chi2_token", "k3_kl", "kl"))
    if chi2 is None or k3 is None or kl is None or not all(map(math.isfinite, (chi2, k3, kl))):
        return None
    return math.sqrt(max(chi2 + 1 - (1 + k3 - kl) ** 2, LEAST_VARIANCE))


def _no_signal(row: Mapping[str, float]) -> float | None:
    """Groups of prime-rl in which no or every response is right, of rewards 0 and 1."""
    shares = [value for name, value in row.items() if re.fullmatch(r"train/agg/all/[^/]+/solved_some", name)]
    return 1 - sum(shares) / len(shares) if shares else None


def _same(*names: str) -> tuple[Name, ...]:
    return tuple(Name(name, name) for name in names)


_SLIME = (
    Name("critic/rewards/mean", "rollout/raw_reward"),
    Name("val/reward/mean", "eval/<data set>"),
    Name("response_length/mean", "rollout/response_len/mean"),
    Name("response_length/max", "rollout/response_len/max"),
    Name("response_length/min", "rollout/response_len/min"),
    Name("response_length/clip_ratio", "rollout/truncated_ratio"),
    Name("actor/entropy", "train/entropy_loss", "by sample or token, as the loss is"),
    Name("actor/ppo_kl", "train/ppo_kl"),
    Name("actor/pg_clipfrac", "train/pg_clipfrac"),
    Name("actor/pg_loss", "train/pg_loss"),
    Name("actor/grad_norm", "train/grad_norm"),
    Name("actor/lr", "train/lr-pg_0"),
    Name("perf/time/step", "perf/step_time"),
)
_TRL = (  # trainer_state.json and MLflow; with "train/" before them in TensorBoard and W&B
    Name("critic/rewards/mean", "reward"),
    Name("response_length/mean", "completions/mean_length"),
    Name("response_length/max", "completions/max_length"),
    Name("response_length/min", "completions/min_length"),
    Name("response_length/clip_ratio", "completions/clipped_ratio"),
    Name("groups/no_signal_frac", "frac_reward_zero_std"),
    Name("actor/entropy", "entropy"),
    Name("actor/pg_clipfrac", "clip_ratio/region_mean"),
    Name("actor/grad_norm", "grad_norm"),
    Name("actor/lr", "learning_rate"),
    Name("perf/time/step", "step_time"),
)
_NO_REWARD = rf"eval/(?:step|lag_steps|skipped_.*|.*_seconds|.*-(?:truncated_ratio|none_reward_ratio|pass{_AT}\d+))"

PROJECTS = (
    Project(
        name="verl",
        version="0.10.0.dev",
        commit="1dda039b9c63",
        date="2026-08-22",
        names=(
            *_same("critic/rewards/mean", "critic/rewards/max", "critic/rewards/min", "critic/score/mean"),
            Name("val/reward/mean", "val-core/<data source>/reward/mean@k"),
            Name("val/reward/mean", "val-core/<data source>/acc/mean@k"),
            *_same("response_length/mean", "response_length/max", "response_length/min"),
            Name(
                "response_length/clip_ratio", "response_length/clip_ratio", "responses as long as the longest allowed"
            ),
            *_same(
                "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_loss", "actor/grad_norm", "actor/lr"
            ),
            *_same("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token", "rollout_corr/chi2_seq"),
            *_same("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
            Name("perf/time/step", "timing_s/step"),
        ),
        marks=("timing_s/step", "perf/time_per_step", "timing_s/gen", "critic/score/mean", "actor/pg_loss"),
        derived={"mismatch/rho_std": _rho_std},
    ),
    Project(
        name="slime",
        version="0.3.1",
        commit="624b824a898a",
        date="2026-08-21",
        names=_SLIME,
        marks=("rollout/raw_reward", "rollout/response_len/mean", "train/entropy_loss", "train/pg_clipfrac"),
        first_step=0,
        updates="train/",
        leave_out=_NO_REWARD,
    ),
    Project(
        name="miles",
        version="0.1.0",
        commit="31f1ca961a94",
        date="2026-08-21",
        names=(*_SLIME, Name("rollout_corr/k3_kl", "train/train_rollout_kl")),
        marks=("train/train_rollout_kl", "train/ess_ratio"),
        first_step=0,
        updates="train/",
        leave_out=_NO_REWARD,
    ),
    Project(
        name="NeMo-RL",
        version="0.6.0",
        commit="7ea279abfbeb",
        date="2026-08-22",
        names=(
            Name("critic/rewards/mean", "train/reward"),
            Name("val/reward/mean", "validation/accuracy"),
            Name("response_length/mean", "train/mean_gen_tokens_per_sample"),
            Name("response_length/clip_ratio", "train/truncation_rate"),
            Name("actor/entropy", "train/approx_entropy", "estimated from the sampled tokens"),
            Name("actor/grad_norm", "train/grad_norm"),
            Name("actor/lr", "train/lr"),
            Name("rollout_corr/k3_kl", "train/gen_kl_error", "with reference_policy_kl_type k3, the default"),
            Name("perf/time/step", "timing/train/total_step_time"),
        ),
        marks=(
            "train/token_mult_prob_error",
            "train/gen_kl_error",
            "timing/train/total_step_time",
            "train/probs_ratio",
        ),
    ),
    Project(
        name="prime-rl",
        version="0.8.1.dev67",
        commit="559b44772e47",
        date="2026-08-21",
        names=(
            Name("critic/rewards/mean", "train/agg/all/<agent>/reward/mean"),
            Name("val/reward/mean", "eval/<environment>/all/<agent>/avg@k"),
            Name("response_length/mean", "train/agg/all/<agent>/num_output_tokens/mean"),
            Name("response_length/max", "train/agg/all/<agent>/num_output_tokens/max"),
            Name("response_length/min", "train/agg/all/<agent>/num_output_tokens/min"),
            Name("response_length/clip_ratio", "train/agg/all/<agent>/is_truncated/mean"),
            Name("actor/entropy", "entropy/all/mean"),
            Name("actor/grad_norm", "optim/grad_norm"),
            Name("actor/lr", "optim/lr"),
            Name("rollout_corr/k3_kl", "mismatch_kl/all/mean"),
            Name("rollout/staleness_mean", "off_policy/mean"),
            Name("perf/time/step", "time/step"),
        ),
        marks=("optim/grad_norm", "optim/lr", "entropy/all/mean", "mismatch_kl/all/mean", "progress/total_rollouts"),
        derived={"groups/no_signal_frac": _no_signal},
    ),
    Project(
        name="TRL",
        version="1.10.0.dev0",
        commit="f2cd57710ae3",
        date="2026-07-24",
        names=(
            Name("val/reward/mean", "eval_reward"),
            Name("val/reward/mean", "eval/reward"),
            *_TRL,
            *(Name(name.ours, f"train/{name.theirs}") for name in _TRL),
        ),
        marks=(
            "frac_reward_zero_std",
            "train/frac_reward_zero_std",
            "completions/clipped_ratio",
            "train/completions/clipped_ratio",
        ),
    ),
)


def project_of(names: Iterable[str]) -> Project | None:
    """The project whose marks ``names`` has, the one with the most of them; None where there is none."""
    present = set(names)
    if "perf/time/step" in present:  # ours, from a service: some names are verl's
        return None
    counts = {project.name: sum(mark in present for mark in project.marks) for project in PROJECTS}
    if counts["miles"]:
        counts["slime"] = 0  # miles has all names of slime, and its own
    best = max(PROJECTS, key=lambda project: counts[project.name])
    return best if counts[best.name] else None
