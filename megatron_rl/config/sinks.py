"""`monitor.sinks`: services for experiments that a run's metrics also go to, each through its own client."""

from __future__ import annotations

from typing import Literal

from megatron_rl.config.base import Section


class WandbSinkConfig(Section):
    """Weights & Biases (package `wandb`). The key comes from `wandb login` or WANDB_API_KEY, never from a recipe."""

    project: str = "megatron_rl"
    """The service's project; made where it is not there."""
    entity: str | None = None
    """Team or user; null: the key's own."""
    name: str | None = None
    """null: the name of the run directory."""
    group: str | None = None
    """Runs with the same group are drawn as one, as seeds of one arm."""
    tags: list[str] = []
    """Labels by which the service finds runs."""
    mode: Literal["online", "offline"] = "online"
    """offline: everything stays in RUN/wandb until `wandb sync`."""


class MlflowSinkConfig(Section):
    """MLflow (package `mlflow`). Passwords and tokens come from MLFLOW_TRACKING_… variables, never from a recipe."""

    experiment: str = "megatron_rl"
    """Made where it is not there."""
    name: str | None = None
    """null: the name of the run directory."""
    tracking_uri: str | None = None
    """null: MLFLOW_TRACKING_URI, and where that is not set the database RUN/mlflow.db."""


class SwanlabSinkConfig(Section):
    """SwanLab (package `swanlab`). The key comes from `swanlab login` or SWANLAB_API_KEY, never from a recipe."""

    project: str = "megatron_rl"
    """The service's project; made where it is not there."""
    workspace: str | None = None
    """null: the key's own."""
    name: str | None = None
    """null: the name of the run directory."""
    tags: list[str] = []
    """Labels by which the service finds runs."""
    mode: Literal["online", "offline"] = "online"
    """offline: everything stays in RUN/swanlab until `swanlab sync`."""


class SinksConfig(Section):
    """Each null: not used. `{}` takes the defaults: `--set monitor.sinks.wandb={}`."""

    wandb: WandbSinkConfig | None = None
    """Weights & Biases."""
    mlflow: MlflowSinkConfig | None = None
    """MLflow."""
    swanlab: SwanlabSinkConfig | None = None
    """SwanLab."""
