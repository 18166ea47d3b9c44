"""`rlft <verb> -m`: a sweep of runs, expanded and composed by Hydra; also Hydra's --help and --cfg.

Every job is checked before the first one starts. Jobs run one after the other in this process, and share the loaded
base and a started engine if they can; or several at a time in processes of their own (cluster.jobs, `sweep_jobs.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlft.commands.launch import import_libraries, launch, saved_steps
from rlft.commands.sweep.jobs import SideBySide, are_on_gpus, cluster_of, gpus_of, opened_for
from rlft.commands.sweep.space import check_one_by_one
from rlft.config import command as verbs
from rlft.config import compose as configs
from rlft.config.cluster import ClusterConfig
from rlft.config.overrides import SWEEPING, Arguments, unquoted
from rlft.plan.checks import check_early
from rlft.runs.references import resolved
from rlft.system.crash import one_line
from rlft.system.interrupt import Interrupt
from rlft.system.terminal import command_line, override, resuming, say
from rlft.tokens.chat_template import AUTO_DATE, today
from rlft.types import Logger, UserError

# Keys that no file of data, model or adapters is read by: jobs that differ only in these are planned once.
NOT_OF_THE_FILES = ("seed", "name", "trainer", "algorithm", "steps", "epochs", "minibatches", "logger", "rollouts",
                    "checkpoint")  # fmt: skip

DATE = "model.date"
LOGGING_KEPT = ("hydra/job_logging=none", "hydra/hydra_logging=none")
"""Hydra would write a log file for each job, or, with its logging `disabled`, switch off the warnings of every module
that is imported already. Not a verb's YAML to say, since one from outside the tree may forget it."""


def ask(verb: str, parsed: Arguments) -> None:
    """Prints Hydra's answer to --help, --cfg and the like."""
    _hydra(verb, parsed, lambda composed: None)


def sweep(verb: str, parsed: Arguments) -> None:
    """Runs every job and then prints the table, even if jobs failed."""
    from rlft.commands.sweep import table as sweep

    check_one_by_one(parsed.overrides, verb)
    if (named := parsed.value("hydra.sweep.dir")) is not None:
        _check_folder(Path(named))
    jobs = _expand(parsed.overrides, verb)
    sweep.check_jobs(jobs)
    names = sweep.names_of(jobs)
    plains = _composed(jobs, parsed.config_dir, verb)
    if (word := date_word(plains, None if named is None else Path(named))) is not None:
        parsed = replace(parsed, overrides=(*parsed.overrides, word))
        jobs, plains = [[*job, word] for job in jobs], [dated(plain, word) for plain in plains]
    cluster = cluster_of(plains)
    _check_plans(jobs, plains, verb)
    folders: list[Path] = []

    def number_of_job() -> int:
        """The number of the job that Hydra has composed; says where the sweep is before the first one."""
        from hydra.core.hydra_config import HydraConfig

        hydra_config = HydraConfig.get()
        if not folders:
            folders.append(Path(os.path.relpath(hydra_config.sweep.dir)))
            say(f"sweep of {len(jobs)} jobs; if it is stopped, repeat it with {_sweep_folder(folders[0])}")
        return int(hydra_config.job.num)

    try:
        if cluster is None or cluster.jobs == 1:
            _one_after_the_other(verb, parsed, names, number_of_job)
        else:
            _side_by_side(verb, parsed, jobs, names, number_of_job, cluster, on_gpus=are_on_gpus(plains))
    finally:
        if folders:
            table = sweep.rows(folders[0], jobs)
            sweep.print_table(table, names, sweep.write_csv(folders[0], table))


def date_word(plains: Sequence[Mapping[str, Any]], folder: Path | None) -> str | None:
    """The override by which all jobs have the date on which the sweep was begun; None if their configs name dates.

    Args:
        plains: the jobs' configs.
        folder: of a sweep that is repeated, whose first job with a date says which; None for a new one.
    """
    from rlft.runs import run_folder

    if any(plain.get("model", {}).get("date") != AUTO_DATE for plain in plains):
        return None
    runs = sorted(file.parent for file in folder.glob("*/config.yaml")) if folder is not None else []
    dates = [run_folder.read(run)["model"].get("date", AUTO_DATE) for run in runs]
    return override(DATE, dates[0] if dates else today())


def dated(plain: dict[str, Any], word: str) -> dict[str, Any]:
    """The config with the date of a `date_word`."""
    return {**plain, "model": {**plain["model"], "date": word.partition("=")[2]}}


def _one_after_the_other(verb: str, parsed: Arguments, names: Sequence[str], number_of_job: Callable[[], int]) -> None:
    """Does the jobs in this process."""
    from rlft.loop.engines import Engines

    def job(composed: Any) -> None:
        number = number_of_job()
        say(f"job {number}: {names[number]}")
        with _failure_is_printed(number):
            _job(composed, engines)

    with Engines() as engines:
        _hydra(verb, parsed, job)


@contextmanager
def _failure_is_printed(number: int) -> Iterator[None]:
    """Prints why a job failed: only the first failure of a sweep is raised at its end."""
    try:
        yield
    except Exception as error:
        say(f"job {number} failed: {one_line(error) or type(error).__name__}")
        raise


def _side_by_side(
    verb: str,
    parsed: Arguments,
    jobs: Sequence[Sequence[str]],
    names: Sequence[str],
    number_of_job: Callable[[], int],
    cluster: ClusterConfig,
    *,
    on_gpus: bool,
) -> None:
    """Does the jobs in processes of their own, `cluster.jobs` at a time."""
    gpus = gpus_of(cluster) if on_gpus else []
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(say))
        interrupt.in_step = True  # a signal ends the jobs as it ends a run, after its step
        started: list[SideBySide] = []

        def job(composed: Any) -> None:
            number = number_of_job()
            with _failure_is_printed(number):
                plain, folder = _composed_job(composed)
                is_finished = _is_finished(plain, folder)
            if is_finished:
                say(f"job {number} is finished already: {folder}")
                return
            if not started:
                launcher = stack.enter_context(opened_for(cluster, folder.parent, on_gpus=on_gpus))
                started.append(SideBySide(launcher, cluster, interrupt, say, on_gpus=on_gpus, gpus=gpus))
            kept = [word for word in jobs[number] if not word.startswith("hydra.")]
            options = [option for option in parsed.options if option not in SWEEPING]
            words = [verb, *options, *kept, "resume=auto", override("hydra.run.dir", folder)]
            started[0].start(number, names[number], words, folder)

        try:
            _hydra(verb, parsed, job)
        except Exception:
            for begun in started:  # one job that is refused does not end those that run
                begun.finish()
            raise
        for begun in started:
            begun.finish()


def _check_folder(folder: Path) -> None:
    """Refuses a folder that cannot be made, or holds a sweep whose values Optuna chooses."""
    from rlft.commands.sweep.record import is_study
    from rlft.runs import run_folder

    run_folder.check_can_be_made(folder, "hydra.sweep.dir")
    if is_study(folder):
        problem = "there is a sweep in that folder whose values Optuna chooses"
        remedy = f"resume that one with {resuming(folder)}, or name another folder"
        raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy)


def _sweep_folder(folder: Path) -> str:
    """The override that names a sweep's folder, quoted for the shell and Hydra."""
    return command_line(override("hydra.sweep.dir", folder))


def _job(composed: Any, engines: Any) -> None:
    """Does one job with the config that Hydra composed, in the folder that Hydra made."""
    from hydra.core.hydra_config import HydraConfig

    plain, folder = _composed_job(composed)
    if not go_on(plain, folder, engines):
        print(f"job {HydraConfig.get().job.num} is finished already: {folder}")


def go_on(plain: dict[str, Any], folder: Path, engines: Any, loggers: Sequence[Logger] = ()) -> bool:
    """Does what the run of this config in this folder lacks; returns whether it lacked anything.

    Args:
        plain: the composed config.
        folder: the run's folder, which may not exist yet.
        engines: of the sweep.
        loggers: are told of the run after its own.
    """
    from rlft.runs import run_folder

    if _is_finished(plain, folder):
        return False
    if run_folder.config_file(folder).exists():
        plain = {**plain, "resume": str(folder)}
    try:
        launch(plain, folder, engines, loggers=loggers)
    except (UserError, KeyboardInterrupt):
        with suppress(OSError):  # a job that was refused, or stopped before it started, leaves no folder
            for parent in (folder, *list(folder.parents)[:2]):
                parent.rmdir()
        raise
    return True


def _composed_job(composed: Any) -> tuple[dict[str, Any], Path]:
    """(the plain config of the job that Hydra has composed, its folder)."""
    from hydra.core.hydra_config import HydraConfig

    from rlft.runs import run_folder

    folder = Path(os.path.relpath(HydraConfig.get().runtime.output_dir))
    exists = run_folder.config_file(folder).exists()
    return run_folder.with_kept_values(resolved(configs.plain(composed)), folder if exists else None), folder


def _is_finished(plain: dict[str, Any], folder: Path) -> bool:
    """Whether the folder has a run of this config with all its steps.

    Raises:
        UserError: it has a run of another config.
    """
    from rlft.runs import run_folder

    if not run_folder.config_file(folder).exists():
        return False
    run_folder.check_same_config(folder, plain)
    verb = verbs.named(plain["verb"])
    plan = verb.make_plan(plain)
    return saved_steps(verb, folder, plan) >= plan.num_steps


def _hydra(verb: str, parsed: Arguments, job: Callable[[Any], None]) -> None:
    import hydra

    configs.register_resolvers()
    first, *others = configs.primary_folders(verb)
    search = [configs.search_path(others)] if others else []
    sys.argv = [f"rlft {verb}", *parsed.options, *configs.named_choices(parsed.overrides, verb), *search, *LOGGING_KEPT]
    failures: list[Exception] = []

    def guarded(composed: Any) -> None:
        # Hydra would print a job's exception in its own way; the other jobs of a sweep continue.
        try:
            job(composed)
        except Exception as error:  # the other jobs go on, and the first failure is raised behind them
            failures.append(error)

    try:
        hydra.main(config_path=str(first), config_name=verb, version_base="1.3")(guarded)()
    except Exception as error:
        if isinstance(error, OSError) and parsed.sweep:
            problem, remedy = f"cannot be written ({error.strerror})", "choose another folder"
            raise UserError("hydra.sweep.dir", problem, got=error.filename, remedy=remedy) from None
        raise configs.refusal(error, verb) or error from None
    except SystemExit as end:  # Hydra exits after --help
        if end.code:
            raise
    if failures:
        raise failures[0]


def _expand(overrides: Sequence[str], verb: str) -> list[list[str]]:
    """The overrides of each job, in Hydra's own order."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parsed = configs.parse_overrides(overrides, verb)
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None) for job in batch]


def _composed(jobs: Sequence[Sequence[str]], config_dir: Path | None, verb: str) -> list[dict[str, Any]]:
    """The plain config of every job, once each has been checked by itself."""
    plains = []
    for number, overrides in enumerate(jobs):
        with _of_job(number, overrides):
            words = [o for o in overrides if not o.startswith("hydra.")]
            plains.append(resolved(configs.compose(words, config_dir, verb)))
            check_early(plains[-1], verb)
    return plains


def _check_plans(jobs: Sequence[Sequence[str]], plains: Sequence[dict[str, Any]], verb: str) -> None:
    """Refuses whatever any job would refuse; files that several jobs share are read once."""
    import_libraries()
    scanned: list[Any] = []
    for number, (overrides, plain) in enumerate(zip(jobs, plains, strict=True)):
        with _of_job(number, overrides):
            if (planned := of_the_files(plain)) not in scanned:
                verbs.named(verb).make_plan(plain)
                scanned.append(planned)
            _check_repeated(number, overrides, plain)


def of_the_files(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config a plan depends on besides the config's own checks: jobs that agree in it are planned once."""
    of_a_teacher = plain.get("snapshot", {}).get("teacher", "none") != "none"  # whose tokens an algorithm asks for
    left_out = [key for key in NOT_OF_THE_FILES if key != "algorithm" or not of_a_teacher]
    return {key: value for key, value in plain.items() if key not in left_out}


@contextmanager
def _of_job(number: int, overrides: Sequence[str]) -> Iterator[None]:
    """Adds the job's number and overrides to a refusal inside."""
    try:
        yield
    except UserError as error:
        typed = " ".join(word for word in overrides if not word.startswith(f"{DATE}="))  # the sweep adds its date
        problem = f"{error.problem} (job {number}: {typed})"
        raise UserError(error.key, problem, got=error.got, remedy=error.remedy) from None


def _check_repeated(number: int, overrides: Sequence[str], plain: dict[str, Any]) -> None:
    """Refuses a repeated sweep whose job of this number had another config: its results would be mislabelled."""
    from rlft.runs import run_folder

    named = [o.partition("=")[2] for o in overrides if o.startswith("hydra.sweep.dir=")]
    for folder in (Path(unquoted(value)) / str(number) for value in named):
        if run_folder.config_file(folder).exists():
            run_folder.check_same_config(folder, plain)
