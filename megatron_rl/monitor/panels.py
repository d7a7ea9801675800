"""Which metrics are drawn together: the panels of plots and of pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One small plot: its metrics (regular expressions of full names), scale and largest number of curves."""

    title: str
    metrics: tuple[str, ...]
    is_log: bool = False
    limit: int | None = None  # if more metrics match, those with the largest mean are drawn


VALIDATION = (r"val/reward/mean", r"val/.+/(avg|pass)@\d+")
PANELS = (
    Panel("reward", ("critic/rewards/mean",)),
    Panel("validation", VALIDATION),
    Panel("response length", ("response_length/mean",)),
    Panel("mismatch: std of rho", ("mismatch/rho_std",), is_log=True),
    Panel("k3 KL, engine to learner", ("rollout_corr/k3_kl",), is_log=True),
    Panel("PPO KL", ("actor/ppo_kl",)),
    Panel("entropy", ("actor/entropy",)),
    Panel("clip fraction", ("actor/pg_clipfrac",)),
    Panel("gradient norm", ("actor/grad_norm", "noise/grad_norm_ema"), is_log=True),
    Panel("gradient noise scale", ("noise/gns",), is_log=True),
    Panel("learning rate", ("actor/lr", "lr_sched/shadow_lr"), is_log=True),
    Panel("route agreement", ("router/agree_frac",)),
    Panel("repetition", ("response/repetition_frac", "response_length/clip_ratio")),
    Panel("seconds by phase", (r"perf/time/(?!step$).+",), limit=5),
)
