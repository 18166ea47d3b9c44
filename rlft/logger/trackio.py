"""Logs to trackio, a local database that `trackio show` draws."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rlft.config.bounds import PositiveFloat
from rlft.logger.interface import RunInfo
from rlft.logger.scalars import ScalarLogger, last_steps, name_of, parameters


@dataclass(kw_only=True)
class Trackio(ScalarLogger):
    """Logs to a project."""

    package = "trackio"
    remedy = "check that its database can be written (TRACKIO_DIR), or leave trackio out of logger"

    project: str
    seconds: PositiveFloat

    def call(self, call: Any, *arguments: Any) -> Any:
        with redirect_stdout(StringIO()):  # the library prints, even into the live view
            return super().call(call, *arguments)

    def open(self, run: RunInfo) -> tuple[Any, str]:
        name, config = name_of(run, self.package), parameters(run.config)
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        trackio_run = self.library.init(self.project, name, config=config, resume="allow", **quiet)
        return trackio_run, f"run {name}; look at it with `trackio show --project {self.project}`"

    def logged(self) -> Mapping[str, int]:
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs(self.project, self.run.name, run_id=self.run.id)
        return last_steps((name, row["step"]) for row in rows for name in row)

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self.run.finish()
