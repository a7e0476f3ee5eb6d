"""A run's metrics in Weights & Biases and in MLflow, each through its own package, where the configuration asks for it.

    tracking.wandb={project: my-project, mode: offline}     tracking.mlflow={tracking_uri: http://host:5000, experiment: rl}

A resumed run goes on in the same record: its id is kept in the run's folder. Keys and addresses of accounts come from the
packages' own environment variables (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN, ...). What they show is also in the run's own
`metrics.jsonl`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from epilora.config.schema import JobConfig, MlflowConfig, WandbConfig

PARAMETER_CHARACTERS = 500  # of one MLflow parameter's value


class Tracker(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def make_trackers(config: JobConfig, run_dir: Path) -> list[Tracker]:
    """Those of `config.tracking`. Raises ImportError that says what to install, and what a package raises about its own."""
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = OmegaConf.to_container(OmegaConf.create(asdict(config)), enum_to_str=True)
    made: list[Tracker] = []
    if config.tracking.wandb is not None:
        made.append(WandbTracker(config.tracking.wandb, config.name, settings, run_dir))
    if config.tracking.mlflow is not None:
        made.append(MlflowTracker(config.tracking.mlflow, config.name, settings, run_dir))
    return made


def _missing(package: str, key: str) -> str:
    return f"tracking.{key} needs the package {package}: pip install 'epilora[track]', or leave tracking.{key} out"


class WandbTracker:
    """One W&B run."""

    def __init__(self, config: WandbConfig, name: str, settings: Any, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as err:
            raise ImportError(_missing("wandb", "wandb")) from err
        kept = run_dir / "wandb_run_id.txt"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=config.project,
            entity=config.entity or None,
            name=name,
            id=kept.read_text(),
            resume="allow" if config.mode == "online" else None,  # offline nothing can be looked up
            mode=config.mode,  # type: ignore[arg-type]  # the configuration allows two of its values
            dir=str(run_dir),
            config=settings,
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """One MLflow run, by the client interface: nothing global is set in this process."""

    def __init__(self, config: MlflowConfig, name: str, settings: Any, run_dir: Path) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as err:
            raise ImportError(_missing("mlflow-skinny", "mlflow")) from err
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=config.tracking_uri)
        kept = run_dir / "mlflow_run_id.txt"
        if kept.exists():
            self._id = kept.read_text()
            self._client.set_terminated(self._id, "RUNNING")
            return
        found = self._client.get_experiment_by_name(config.experiment)
        experiment = self._client.create_experiment(config.experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        kept.write_text(self._id)
        parameters = [Param(key, text[:PARAMETER_CHARACTERS]) for key, text in _flat(settings)]
        self._client.log_batch(self._id, params=parameters)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1e3)
        values = [self._metric(key, float(value), now_ms, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(settings: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, text)."""
    if not isinstance(settings, dict):
        return [(prefix, str(settings))]
    return [row for key, value in settings.items() for row in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
