"""A run's metrics in Weights & Biases, MLflow and SwanLab, through their own clients.

Each client works in a thread of its own: no service that is slow or away holds up a step. `metrics.jsonl` stays the
record of the run; a sink is a copy of it.
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

from megatron_rl.config.sinks import MlflowSinkConfig, SinksConfig, SwanlabSinkConfig, WandbSinkConfig
from megatron_rl.config.yaml12 import parse
from megatron_rl.monitor.run_directory import RunDirectory

CLOSING_SECONDS = 120.0  # that the end of a run waits for a service to take what still waits
MOST_WAITING = 100_000  # steps; a service that is away for longer loses the oldest
_METRICS_A_CALL, _PARAMETERS_A_CALL, _PARAMETER_CHARACTERS = 1000, 100, 6000  # MLflow's limits


class SinkError(Exception):
    """A service did not take what it was sent."""


class Client(Protocol):
    """What a service is to `ServiceSink`. All three are called from one thread, in this order."""

    def begin(self, recipe: Mapping[str, Any], resumes: bool) -> None:
        """Open the run on the service; ``resumes``: it goes on with the one of an earlier start."""

    def log(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Send a step, recorded at Unix time ``seconds``."""

    def end(self) -> None:
        """Send what waits; the run is over."""


class ServiceSink:
    """Sends each step to a service, from a thread; `write` returns at once.

    A failure is raised by the next `write` or by `close`, as `SinkError`. A service at which the run could not begin
    is not asked again.
    """

    def __init__(self, client: Client, recipe: Path) -> None:
        self._client, self._recipe = client, recipe
        self._resumes = False
        self._waiting: queue.Queue[tuple[int, dict[str, float], float] | None] = queue.Queue(MOST_WAITING)
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def resume_at(self, step: int) -> None:
        """The run goes on: the service's run of the earlier start does, too."""
        self._resumes = step > 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step. SinkError for a failure of an earlier one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sink", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            if self._waiting.full():
                self._waiting.get()
            self._waiting.put((step, {name: float(value) for name, value in metrics.items()}, time.time()))
        self._raise_failure()

    def close(self) -> None:
        """Wait until everything is sent, `CLOSING_SECONDS` at most. SinkError where it is not."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            raise SinkError(f"not everything was sent within {CLOSING_SECONDS:.0f} s; metrics.jsonl has it all")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SinkError(f"{type(failure).__name__}: {failure}") from failure

    def _work(self) -> None:
        try:
            recipe = parse(self._recipe.read_text())[0] if self._recipe.is_file() else {}
            self._client.begin(recipe, self._resumes)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a client raises, the run goes on
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
    """The sinks that ``config`` asks for, by name. Nothing is opened or imported before the first record."""
    clients: dict[str, Client] = {}
    if config.wandb is not None:
        clients["wandb"] = Wandb(config.wandb, directory)
    if config.mlflow is not None:
        clients["mlflow"] = Mlflow(config.mlflow, directory)
    if config.swanlab is not None:
        clients["swanlab"] = Swanlab(config.swanlab, directory)
    return {name: ServiceSink(client, directory.recipe) for name, client in clients.items()}


def missing_clients(config: SinksConfig) -> list[str]:
    """A problem for each service whose client is not installed here."""
    wanted = [name for name in ("wandb", "mlflow", "swanlab") if getattr(config, name) is not None]
    return [
        f"monitor.sinks.{name}: the package {name} is not installed; `pip install {name}`, or set the key to null"
        for name in wanted
        if importlib.util.find_spec(name) is None
    ]


class Wandb:
    """Weights & Biases takes a step once: of steps that a resumed run repeats it keeps the first numbers."""

    def __init__(self, config: WandbSinkConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory

    def begin(self, recipe: Mapping[str, Any], resumes: bool) -> None:
        import wandb

        config = self._config
        settings = wandb.Settings(console="off", silent=True)  # the terminal is ours
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
    """SwanLab takes a step once, as Weights & Biases does."""

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
    """MLflow keeps every number that a step was recorded with; the newest is shown. Names get "_at_" for "@"."""

    def __init__(self, config: MlflowSinkConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory

    def begin(self, recipe: Mapping[str, Any], resumes: bool) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # its 7 are ten minutes for a server that is away
        import mlflow
        from mlflow.entities import Param

        config = self._config
        own = f"sqlite:///{self._directory.root.absolute() / 'mlflow.db'}"
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = _read_id(self._directory, "mlflow") if resumes else None
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
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

        found = [Metric(_mlflow_name(name), value, int(1000 * seconds), step) for name, value in metrics.items()]
        for start in range(0, len(found), _METRICS_A_CALL):
            self._client.log_batch(self._id, metrics=found[start : start + _METRICS_A_CALL])

    def end(self) -> None:
        self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """The leaves of a recipe as pairs of dotted key and text."""
    if isinstance(value, Mapping):
        return [pair for key, part in value.items() for pair in _flat(part, f"{prefix}{key}.")]
    if isinstance(value, list):
        return [pair for i, part in enumerate(value) for pair in _flat(part, f"{prefix}{i}.")]
    return [(prefix.rstrip("."), str(value))]


def _run_id(directory: RunDirectory, service: str, resumes: bool) -> str:
    """The service's id of this run: a new one, or that of the earlier start. Both services take letters and digits."""
    known = _read_id(directory, service) if resumes else None
    if known is None:
        known = os.urandom(16).hex()[:21]
        _write_id(directory, service, known)
    return known


def _id_file(directory: RunDirectory, service: str) -> Path:
    return directory.root / f"{service}-run-id"


def _read_id(directory: RunDirectory, service: str) -> str | None:
    file = _id_file(directory, service)
    return file.read_text().strip() if file.is_file() else None


def _write_id(directory: RunDirectory, service: str, value: str) -> None:
    _id_file(directory, service).write_text(value + "\n")
