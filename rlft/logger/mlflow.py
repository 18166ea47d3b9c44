"""MLflow: a server's run, or one in a database file."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from rlft.config.bounds import PositiveFloat
from rlft.logger.interface import RunInfo
from rlft.logger.scalars import ScalarLogger, last_steps, name_of, parameters

MOST_PARAMETERS, LONGEST_VALUE = 100, 6000  # parameters of one call, and characters of a parameter's value
LONGEST_TAG, LONGEST_NAME = 500, 250  # the most characters of a tag and of a run's name that every store takes
EXPERIMENT = "rlft"
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


@dataclass(kw_only=True)
class Mlflow(ScalarLogger):
    """Logs to an experiment; parameters keep the values that they had when the run began."""

    package = "mlflow"
    environment: ClassVar = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}

    remedy = (
        "check the server or file of logger.mlflow.tracking_uri (MLFLOW_TRACKING_URI), or leave mlflow out of logger"
    )

    tracking_uri: str | None
    experiment: str | None
    seconds: PositiveFloat

    def open(self, run: RunInfo) -> tuple[str, str]:
        self.client = self.library.MlflowClient(self.tracking_uri)
        # A filter has no escape for a quote; the digits at the end tell names apart.
        name = name_of(run, self.package).replace("'", "_")[-LONGEST_TAG:]
        experiment_name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        with suppress(self.library.MlflowException):  # it exists already, perhaps only since a moment ago
            self.client.create_experiment(experiment_name)
        experiment = self.client.get_experiment_by_name(experiment_name).experiment_id
        runs = self.client.search_runs([experiment], f"tags.`rlft.run` = '{name}'")
        tags, shown_name = {"rlft.run": name}, (os.environ.get("MLFLOW_RUN_NAME") or run.name)[:LONGEST_NAME]
        entry = runs[0] if runs else self.client.create_run(experiment, tags=tags, run_name=shown_name)
        self.client.update_run(entry.info.run_id, status="RUNNING")
        values = {self.renamed(key): str(value)[:LONGEST_VALUE] for key, value in parameters(run.config).items()}
        missing = [self.library.entities.Param(key, v) for key, v in values.items() if key not in entry.data.params]
        for i in range(0, len(missing), MOST_PARAMETERS):
            self.client.log_batch(entry.info.run_id, params=missing[i : i + MOST_PARAMETERS])
        return entry.info.run_id, f"run {entry.info.run_id} of experiment {experiment_name}"

    def logged(self) -> Mapping[str, int]:
        names = self.client.get_run(self.run).data.metrics
        return last_steps((m.key, m.step) for name in names for m in self.client.get_metric_history(self.run, name))

    def renamed(self, metric: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", metric, flags=re.ASCII)

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        point, now = self.library.entities.Metric, int(time.time() * 1000)
        # MLflow's databases turn infinity into the largest number, so that charts break.
        finite = {name: value if math.isfinite(value) else math.nan for name, value in metrics.items()}
        self.client.log_batch(self.run, [point(name, value, now, step) for name, value in finite.items()])

    def close(self, status: str) -> None:
        self.client.set_terminated(self.run, STATUS.get(status, "FAILED"))
