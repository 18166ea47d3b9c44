"""Runs of a sweep in this process, one after the other, with what they can share: a loaded base, a started engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlft.commands.launch import launch, resolve_in
from rlft.commands.sweep.driver import Ending, How, Place, Run
from rlft.config import compose as configs
from rlft.config.resolved import AUTO
from rlft.logger.interface import Logger
from rlft.runs import run_folder
from rlft.system import disk
from rlft.system.crash import explains_itself, one_line
from rlft.system.terminal import Say
from rlft.types import Evaluation, UserError


class PrunedError(RuntimeError):
    """The sweep has pruned this run at an evaluation; its newest checkpoint stays."""


def why_pruned(step: int) -> str:
    """The reason in the status of a run that is pruned."""
    return f"pruned by its sweep after step {step}: its trial lags behind"


class PruningLogger(Logger):
    """Asks after each evaluation whether the run is pruned, and ends it then."""

    def __init__(self, is_pruned: Callable[[], bool]) -> None:
        self._is_pruned = is_pruned

    def evaluation(self, evaluation: Evaluation) -> None:
        if self._is_pruned():
            raise PrunedError(why_pruned(evaluation.step))


class InThisProcess(Place):
    """Does runs in this process, with what `engines` keeps for the next one.

    `prunes` is whether runs may be pruned.
    """

    def __init__(self, command: str, config_dir: Path | None, engines: Any, say: Say, *, prunes: bool) -> None:
        self._command, self._config_dir, self._engines, self._say = command, config_dir, engines, say
        self._prunes, self._ending = prunes, Ending(How.finished)

    def start(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        self._say(f"job {run.number}: {run.name}")
        self._ending = Ending(How.finished)
        try:
            self._do(run, is_pruned)
        except PrunedError:
            self._ending = Ending(How.pruned)
        except KeyboardInterrupt:
            if not is_pruned():  # else it comes too late for this run
                raise
            self._ending = Ending(How.pruned)
        except (Exception, SystemExit) as error:  # a run ends alone, whatever it raises
            self._ending = failure(error)  # without the error, whose traceback would hold the run's tensors
            self._say(f"job {run.number} failed: {self._ending.problem}")
            if self._engines is not None:  # the next run gets a base and an engine that nothing has happened to
                with suppress(Exception):
                    self._engines.close()
            if isinstance(error, OSError | disk.DiskError) and (of_the_disk := disk.failure_of(error)) is not None:
                raise of_the_disk from None

    def ending(self, run: Run) -> Ending:
        return self._ending

    def _do(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        resolved, plan, goes_on = run.resolved, run.plan, run_folder.config_file(run.folder).exists()
        plain = resolved.plain if resolved else configs.compose(run.words, self._config_dir, self._command)
        kept = run_folder.with_kept_values(plain, run.folder if goes_on else None)
        if resolved is None or (goes_on and kept != plain):  # the run that goes on has other values than were planned
            resolved, plan = resolve_in(run.folder, {**plain, "resume": AUTO}, self._command), None
        elif goes_on:
            resumed: dict[str, Any] = {"resume": str(run.folder)}
            run_folder.check_same_config(run.folder, kept | resumed)
            resolved = replace(resolved, plain=kept | resumed, config=replace(resolved.config, **resumed))
            plan = plan and replace(plan, plain=resolved.plain, config=replace(plan.config, **resumed))
        else:
            resolved = replace(resolved, plain=kept)
        try:
            loggers = [PruningLogger(is_pruned)] if self._prunes else []
            launch(resolved, run.folder, self._engines, plan=plan, may_be_finished=True, loggers=loggers)
        except (UserError, KeyboardInterrupt):
            with suppress(OSError):  # a run that was refused, or stopped before it started, leaves no folder
                for folder in (run.folder, *list(run.folder.parents)[:2]):
                    folder.rmdir()
            raise


def failure(error: BaseException) -> Ending:
    """The ending of a run by this error."""
    text, kind = one_line(error), type(error).__name__
    problem = text if explains_itself(error) else f"{kind}: {text}" if text else kind
    return Ending(How.refused if isinstance(error, UserError) else How.failed, problem)
