"""The runs of a study in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlft.commands.sweep.checked import Values
from rlft.commands.sweep.config import key_of
from rlft.commands.sweep.plain import go_on
from rlft.commands.sweep.runs import (
    OF_THE_VALUES,
    FailedError,
    PrunedError,
    Run,
    Study,
    one_after_the_other,
    why_pruned,
)
from rlft.commands.sweep.space import Space
from rlft.config import compose as configs
from rlft.loop.engines import Engines
from rlft.plan.checks import check_early
from rlft.runs import run_folder
from rlft.runs.references import resolved
from rlft.system.process import signals
from rlft.types import Evaluation, RunInfo, StepRecord, UserError


def run_in_process(study: Study, space: Space, verb: str, config_dir: Path | None) -> None:
    """Does all trials, one after the other, on one base and with one engine as far as their configs allow it."""
    before = signals.count()
    with Engines() as engines:
        do = partial(_do_run, space=space, verb=verb, config_dir=config_dir, engines=engines)
        one_after_the_other(study, do, lambda: signals.count() > before)


def _do_run(
    run: Run, report_new: Callable[[], bool], *, space: Space, verb: str, config_dir: Path | None, engines: Any
) -> None:
    """Does a run, see `runs.DoRun`."""
    words = words_of(run, space)
    try:
        plain = resolved(configs.compose(words, config_dir, verb))
        check_early(plain, verb)
        exists = run_folder.config_file(run.folder).exists()
        plain = run_folder.with_kept_values(plain, run.folder if exists else None)
        go_on(plain, run.folder, engines, loggers=(StudyLogger(report_new),))
    except OF_THE_VALUES as error:
        raise FailedError(str(error)) from error
    except UserError as error:
        if Values(space, config_dir, verb).are_refused(words, error.key):
            raise FailedError(str(error)) from error
        raise


def words_of(run: Run, space: Space) -> list[str]:
    """The overrides of a run, of its config alone."""
    words = [word for word in space.words(run.trial.params) if key_of(word) != "seed"]
    return [*words, f"seed={run.seed}"]


class StudyLogger:
    """A logger that reports each evaluation to the study, and ends the run if the study prunes its trial."""

    def __init__(self, report_new: Callable[[], bool]) -> None:
        self._report_new = report_new

    def evaluation(self, evaluation: Evaluation) -> None:
        if self._report_new():
            raise PrunedError(why_pruned(evaluation.step))

    def start(self, run: RunInfo) -> None: ...

    def stage(self, name: str) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, status: str) -> None: ...
