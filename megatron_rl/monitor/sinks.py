"""A run's metrics in Weights & Biases, MLflow and SwanLab, through their own clients.

Each client runs in its own thread, so that a slow or unreachable service never delays a step. Sinks are copies; the
record of a run is its `metrics.jsonl`.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.monitor import MlflowSinkConfig, SinksConfig, SwanlabSinkConfig, WandbSinkConfig
from megatron_rl.config.yaml12 import parse
from megatron_rl.monitor.run_directory import RunDirectory

CLOSING_SECONDS = 120.0  # longest wait at the end of a run for a service to take the remaining steps
MOST_WAITING = 100_000  # steps kept for an unreachable service; beyond, the oldest are dropped
_METRICS_A_CALL, _PARAMETERS_A_CALL, _PARAMETER_CHARACTERS = 1000, 100, 6000  # MLflow's limits


class SinkError(Exception):
    """A service did not accept the data that was sent."""


class Client(Protocol):
    """A service's client as `ServiceSink` uses it: one thread calls begin, log and end in this order."""

    def begin(self, recipe: Mapping[str, Any], resumes: bool) -> None:
        """Open the run on the service; ``resumes``: continue the run of an earlier start."""

    def log(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Send a step, recorded at Unix time ``seconds``."""

    def end(self) -> None:
        """Send the remaining steps and close the run."""


class ServiceSink:
    """Sends each step to a service from its own thread; `write` returns at once.

    The next `write` or `close` raises a failure as `SinkError`. If the service could not open the run, it is not
    tried again.
    """

    def __init__(self, client: Client, recipe: Path) -> None:
        self._client, self._recipe = client, recipe
        self._resumes = False
        self._waiting: queue.Queue[tuple[int, dict[str, float], float] | None] = queue.Queue(MOST_WAITING)
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def resume_at(self, step: int) -> None:
        """Continue the service's run of the earlier start."""
        self._resumes = step > 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step. Raises SinkError if an earlier one failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sink", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            if self._waiting.full():
                self._waiting.get()
            self._waiting.put((step, {name: float(value) for name, value in metrics.items()}, time.time()))
        self._raise_failure()

    def close(self) -> None:
        """Wait up to `CLOSING_SECONDS` until all steps are sent. Raises SinkError if they are not."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            raise SinkError(f"not all steps were sent within {CLOSING_SECONDS:.0f} s; metrics.jsonl has all of them")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SinkError(f"{type(failure).__name__}: {failure}") from failure

    def _work(self) -> None:
        try:
            recipe = parse(self._recipe.read_text())[0] if self._recipe.is_file() else {}
            self._client.begin(recipe, self._resumes)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no error of a client may end the run
            self._failure = error
            return
        while (item := self._waiting.get()) is not None:
            try:
                self._client.log(*item)
            except Exception as error:  # noqa: BLE001 - as above
                self._failure = error
        try:
            self._client.end()
        except Exception as error:  # noqa: BLE001 - as above
            self._failure = error


def service_sinks(config: SinksConfig, directory: RunDirectory) -> dict[str, ServiceSink]:
    """Return the configured sinks by name. The first record imports and opens their clients."""
    clients: dict[str, Client] = {}
    if config.wandb is not None:
        clients["wandb"] = Wandb(config.wandb, directory)
    if config.mlflow is not None:
        clients["mlflow"] = Mlflow(config.mlflow, directory)
    if config.swanlab is not None:
        clients["swanlab"] = Swanlab(config.swanlab, directory)
    return {name: ServiceSink(client, directory.recipe) for name, client in clients.items()}


def missing_clients(config: SinksConfig) -> list[str]:
    """Return an error message per configured service whose client is not installed."""
    services = [name for name in ("wandb", "mlflow", "swanlab") if getattr(config, name) is not None]
    return [
        f"monitor.sinks.{name}: the package {name} is not installed; `pip install {name}`, or set the key to null"
        for name in services
        if importlib.util.find_spec(name) is None
    ]


class Wandb:
    """Weights & Biases. It accepts a step once, so steps that a resumed run repeats keep their first values."""

    def __init__(self, config: WandbSinkConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory

    def begin(self, recipe: Mapping[str, Any], resumes: bool) -> None:
        import wandb

        config = self._config
        settings = wandb.Settings(console="off", silent=True)  # only megatron_rl writes to the terminal
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or self._directory.root.name,
            group=config.group,
            tags=config.tags or None,
            mode=config.mode,
            id=_run_id(self._directory, "wandb", resumes),
            resume="allow",
            dir=self._directory.root,
            config=dict(recipe),
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        self._run.log({**metrics, "_timestamp": seconds}, step=step)

    def end(self) -> None:
        self._run.finish()


class Swanlab:
    """SwanLab. It accepts a step once, as Weights & Biases does."""

    def __init__(self, config: SwanlabSinkConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory

    def begin(self, recipe: Mapping[str, Any], resumes: bool) -> None:
        import swanlab

        config = self._config
        self._run = swanlab.init(
            project=config.project,
            workspace=config.workspace,
            name=config.name or self._directory.root.name,
            tags=config.tags or None,
            mode=config.mode,
            id=_run_id(self._directory, "swanlab", resumes),
            resume="allow",
            log_dir=str(self._directory.root / "swanlab"),
            config=dict(recipe),
        )

    def log(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        self._run.log(dict(metrics), step=step)

    def end(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow. It keeps all values of a repeated step and shows the newest. "@" in names becomes "_at_"."""

    def __init__(self, config: MlflowSinkConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory

    def begin(self, recipe: Mapping[str, Any], resumes: bool) -> None:
        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3"
        )  # the default of 7 waits ten minutes for an unreachable server
        import mlflow
        from mlflow.entities import Param

        config = self._config
        local_database = f"sqlite:///{self._directory.root.absolute() / 'mlflow.db'}"
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or local_database
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        stored_id = _read_id(self._directory, "mlflow") if resumes else None
        if stored_id is not None:
            self._id = stored_id
            self._client.update_run(stored_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(config.experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
        name = config.name or self._directory.root.name
        self._id = self._client.create_run(experiment_id, run_name=name).info.run_id
        _write_id(self._directory, "mlflow", self._id)
        parameters = [Param(key, value[:_PARAMETER_CHARACTERS]) for key, value in _flat(recipe)]
        for start in range(0, len(parameters), _PARAMETERS_A_CALL):
            self._client.log_batch(self._id, params=parameters[start : start + _PARAMETERS_A_CALL])

    def log(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        from mlflow.entities import Metric

        entries = [Metric(_mlflow_name(name), value, int(1000 * seconds), step) for name, value in metrics.items()]
        for start in range(0, len(entries), _METRICS_A_CALL):
            self._client.log_batch(self._id, metrics=entries[start : start + _METRICS_A_CALL])

    def end(self) -> None:
        self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of a recipe as pairs (dotted key, text)."""
    if isinstance(value, Mapping):
        return [pair for key, part in value.items() for pair in _flat(part, f"{prefix}{key}.")]
    if isinstance(value, list):
        return [pair for i, part in enumerate(value) for pair in _flat(part, f"{prefix}{i}.")]
    return [(prefix.rstrip("."), str(value))]


def _run_id(directory: RunDirectory, service: str, resumes: bool) -> str:
    """Return this run's id at a service: that of the earlier start, or a new one of letters and digits."""
    run_id = _read_id(directory, service) if resumes else None
    if run_id is None:
        run_id = os.urandom(16).hex()[:21]
        _write_id(directory, service, run_id)
    return run_id


def _id_file(directory: RunDirectory, service: str) -> Path:
    return directory.root / f"{service}-run-id"


def _read_id(directory: RunDirectory, service: str) -> str | None:
    file = _id_file(directory, service)
    return file.read_text().strip() if file.is_file() else None


def _write_id(directory: RunDirectory, service: str, value: str) -> None:
    _id_file(directory, service).write_text(value + "\n")
