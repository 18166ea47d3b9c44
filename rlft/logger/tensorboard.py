"""Logs to TensorBoard's event files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlft.config.bounds import PositiveInt
from rlft.logger.interface import RunInfo
from rlft.logger.scalars import ScalarLogger, parameters


@dataclass(kw_only=True)
class Tensorboard(ScalarLogger):
    """Writes to `tensorboard/` in the run's folder."""

    package = "tensorboard"
    remedy = "check that tensorboard/ in the run's folder can be written, or leave tensorboard out of logger"

    flush_seconds: PositiveInt

    def open(self, run: RunInfo) -> tuple[Any, str]:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # Readers ignore what was written earlier for this step and later ones; if a run starts again, for all steps.
        first_step = run.step + 1 if run.step else 0
        folder = str(run.folder / self.package)
        writer: Any = SummaryWriter(folder, purge_step=first_step, flush_secs=self.flush_seconds)
        for summary in hparams(parameters(run.config), {}):
            writer.file_writer.add_summary(summary)
        return writer, f"look at it with `tensorboard --logdir {folder}`"

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.run.add_scalar(name, value, step)

    def flush(self) -> None:
        self.run.flush()

    def close(self, status: str) -> None:
        self.run.close()
