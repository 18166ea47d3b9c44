"""`rlft <verb> -m`: a sweep of runs in one process, expanded and composed by Hydra itself; and Hydra's own questions.

Every job is checked before the first one begins, and jobs share what they can: the loaded base, a started engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlft import catalog
from rlft import config as configs
from rlft.adapters_of_runs import resolved
from rlft.arguments import Arguments
from rlft.checks import check_early
from rlft.launch import launch, work_of
from rlft.roots import Verb
from rlft.run.crash import one_line
from rlft.types import UserError
from rlft.work import command_line, override, say

# What a job's data, model and adapters are read from, and what not: jobs that differ in no more are looked at once.
NOT_OF_THE_FILES = ("seed", "name", "trainer", "algorithm", "steps", "epochs", "minibatches", "logger", "checkpoint")


def ask(verb: Verb, asked: Arguments) -> None:
    """Hydra's answer to --help, --cfg and the like."""
    _hydra(verb, asked, lambda composed: None)


def sweep(verb: Verb, asked: Arguments) -> None:
    """Runs every job; afterwards the table, whatever became of them."""
    from rlft import sweep

    jobs = _expand(asked.overrides, verb)
    sweep.check_jobs(jobs)
    names = sweep.names_of(jobs)
    _check_jobs(jobs, asked.config_dir, verb)
    from rlft.engine import Engines

    folders: list[Path] = []

    def job(composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        hydra_config = HydraConfig.get()
        if not folders:
            folders.append(Path(os.path.relpath(hydra_config.sweep.dir)))
            say(f"sweep of {len(jobs)} jobs; if it is stopped, repeat it with {_sweep_folder(folders[0])}")
        number = hydra_config.job.num
        say(f"job {number}: {names[int(number)]}")
        try:
            _job(composed, engines)
        except Exception as error:
            # Only the first failure of a sweep is raised at its end.
            say(f"job {number} failed: {one_line(error) or type(error).__name__}")
            raise

    try:
        with Engines() as engines:
            _hydra(verb, asked, job)
    finally:
        if folders:
            table = sweep.rows(folders[0], jobs)
            sweep.print_table(table, names, sweep.write_csv(folders[0], table))


def _sweep_folder(folder: Path) -> str:
    """The word that names a sweep's folder, as a shell and Hydra read it."""
    return command_line(override("hydra.sweep.dir", folder))


def _job(composed: Any, engines: Any) -> None:
    """One job with the config Hydra composed, in the folder Hydra made."""
    from hydra.core.hydra_config import HydraConfig

    from rlft import runfolder

    plain = resolved(configs.plain(composed))
    folder = Path(os.path.relpath(HydraConfig.get().runtime.output_dir))
    if runfolder.config_file(folder).exists():
        runfolder.check_same_config(folder, plain)
        work = work_of(plain["verb"])
        plan = work.make_plan(plain)
        if work.steps_done(folder, plan) >= plan.num_steps:
            print(f"job {HydraConfig.get().job.num} is finished already: {folder}")
            return
        plain["resume"] = str(folder)
    try:
        launch(plain, folder, engines)
    except (UserError, KeyboardInterrupt):
        with suppress(OSError):  # nothing is left of a job that was refused or stopped before it began
            for place in (folder, *list(folder.parents)[:2]):
                place.rmdir()
        raise


def _hydra(verb: Verb, asked: Arguments, job: Callable[[Any], None]) -> None:
    import hydra

    configs.register_resolvers()
    sys.argv = [f"rlft {verb}", *asked.options, *configs.named_choices(asked.overrides, verb)]
    folder = str(catalog.config_folder().resolve())
    failures: list[Exception] = []

    def guarded(composed: Any) -> None:
        # Hydra would print a job's exception its own way; the other jobs of a sweep go on.
        try:
            job(composed)
        except Exception as error:
            failures.append(error)

    try:
        hydra.main(config_path=folder, config_name=str(verb), version_base="1.3")(guarded)()
    except Exception as error:
        raise configs.refusal(error, verb) or error from None
    except SystemExit as end:  # how Hydra ends after --help
        if end.code:
            raise
    if failures:
        raise failures[0]


def _expand(overrides: Sequence[str], verb: Verb) -> list[list[str]]:
    """The overrides of each job, in Hydra's own order."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parsed = configs.parse_overrides(overrides, verb)
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None) for job in batch]


def _check_jobs(jobs: Sequence[Sequence[str]], config_dir: Path | None, verb: Verb) -> None:
    """All that can be refused in any job; files that several jobs have in common are looked at once."""
    plains = []
    for number, overrides in enumerate(jobs):
        with _of_job(number, overrides):
            words = [o for o in overrides if not o.startswith("hydra.")]
            plains.append(resolved(configs.compose(words, config_dir, verb)))
            check_early(plains[-1], verb)
    work = work_of(verb)
    scanned: list[Any] = []
    for number, (overrides, plain) in enumerate(zip(jobs, plains, strict=True)):
        with _of_job(number, overrides):
            work.check(plain)
            of_the_files = {key: value for key, value in plain.items() if key not in NOT_OF_THE_FILES}
            if of_the_files not in scanned:
                work.make_plan(plain)
                scanned.append(of_the_files)
            _check_repeated(number, overrides, plain)


@contextmanager
def _of_job(number: int, overrides: Sequence[str]) -> Iterator[None]:
    """What is refused inside says which job it is of."""
    try:
        yield
    except UserError as error:
        problem = f"{error.problem} (job {number}: {' '.join(overrides)})"
        raise UserError(error.key, problem, got=error.got, remedy=error.remedy) from None


def _check_repeated(number: int, overrides: Sequence[str], plain: dict[str, Any]) -> None:
    """A sweep that is repeated in its folder: what a job reached there must not get another job's label."""
    from rlft import runfolder

    for folder in (Path(o.partition("=")[2]) / str(number) for o in overrides if o.startswith("hydra.sweep.dir=")):
        if runfolder.config_file(folder).exists():
            runfolder.check_same_config(folder, plain)
