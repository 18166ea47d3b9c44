"""`rlft <command> -m`, from its words to its runs: a plain sweep, or a study, which `rlft resume` resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlft.commands.sweep.checks import Checked, check, gpus_of, is_finished
from rlft.commands.sweep.driver import (
    Driver,
    Ending,
    How,
    InThisProcess,
    JobsFailedError,
    Run,
    SideBySide,
    Source,
    threads_of_a_job,
)
from rlft.commands.sweep.page import TABLE, show_jobs
from rlft.commands.sweep.space import MAY_CHANGE, is_own, is_study, read_record
from rlft.config import compose as configs
from rlft.config.overrides import SWEEPING, Arguments, key_of, make_importable, parse
from rlft.runs import run_folder
from rlft.runs.lines import silent
from rlft.runs.run_folder import CONFIG
from rlft.system import interrupt
from rlft.system.crash import escaped
from rlft.system.interrupt import Interrupt
from rlft.system.terminal import command_line, override, resuming, say
from rlft.types import Mistakes, UserError, counted, require


class Grid(Source[Run]):
    """The jobs of a plain sweep, see `driver.Source`: a run for every combination of the values, in <sweep>/<job>.

    What it knows of its jobs is what their runs leave on disk: the same command again does what they lack.
    """

    def __init__(self, checked: Checked, folder: Path) -> None:
        repeating = command_line(override("hydra.sweep.dir", folder))
        self._space, self._folder = checked.space, folder
        self._waiting = [
            Run(
                number=number,
                name=checked.space.name(params),
                words=checked.space.words(params),
                folder=folder / str(number),
                resolved=resolved,
                plan=checked.plans.get(number),
            )
            for number, (params, resolved) in enumerate(zip(checked.space.combinations(), checked.configs, strict=True))
        ]
        self._failed: dict[int, str] = {}
        jobs = counted(len(self._waiting), "job")
        self.beginning = [f"sweep of {jobs}; if it is stopped, repeat it with {repeating}"]
        self.again = f"repeat the sweep with {repeating}"

    def next(self) -> Run | None:
        while self._waiting:
            run = self._waiting.pop(0)
            if run.resolved is None or not is_finished(run.resolved.plain, run.folder):
                return run
            print(f"job {run.number} is finished already: {run.folder}")
        return None

    def is_done(self) -> bool:
        return not self._waiting

    def ended(self, run: Run, ending: Ending) -> None:
        """A job that has failed stops none of the others."""
        if ending.how in (How.failed, How.refused):
            self._failed[run.number] = ending.problem

    def conclude(self) -> None:
        if self._failed:
            number, problem = next(iter(self._failed.items()))
            others = f"{len(self._failed)} jobs failed, the first of them " if len(self._failed) > 1 else ""
            raise JobsFailedError(f"{others}job {number}: {problem}")

    def show(self) -> None:
        show_jobs(self._folder, self._space, self._failed)


def resume(folder: Path, changes: Sequence[str]) -> None:
    """Resumes the study in this folder with overrides of what may change, such as sweep.trials=40."""
    before = read_record(folder)
    mistakes = Mistakes()
    for word in changes:
        key, got = key_of(word), word.partition("=")[2]
        problem = "cannot change when a sweep is resumed: its trials would no longer be comparable"
        others = ", ".join(other for other in MAY_CHANGE if other != "hydra.sweep.dir")
        remedy = f"begin another sweep, or change only {others}"
        with mistakes:
            require(key in MAY_CHANGE, key, problem, got=got, remedy=remedy)
            is_own_folder, problem = key != "hydra.sweep.dir", "a sweep is resumed in its own folder"
            require(is_own_folder, key, problem, got=got, remedy="leave it out")
    mistakes.refuse()
    folder = _at_its_start(folder, before.start)
    changed = {key_of(word) for word in changes}
    kept = [word for word in before.words if key_of(word) not in {*changed, "hydra.sweep.dir"}]
    parsed = parse([*before.options, *kept, *changes, override("hydra.sweep.dir", folder)], before.command)
    make_importable(parsed.config_dir)
    sweep(before.command, parsed, resumed=True)


def _at_its_start(folder: Path, start: str) -> Path:
    """Changes to the directory in which a study was begun, if it is another; returns the study's folder from there.

    The study's words, and the configs of its runs, have paths that are relative to it.
    """
    if not Path(start).is_dir() or Path(start).samefile(Path.cwd()):
        return Path(os.path.relpath(folder))
    folder = folder.resolve()
    os.chdir(start)
    say(f"relative paths are read from {start}, where the sweep was begun")
    return folder


def sweep(command: str, parsed: Arguments, *, resumed: bool = False) -> None:
    """Begins a sweep and prints its results, or resumes the one in hydra.sweep.dir, which is there if `resumed`."""
    named = parsed.value("hydra.sweep.dir")
    if named is not None:
        check_folder(Path(named), is_chosen=any(map(is_own, parsed.overrides)))
    checked = check(command, parsed, None if named is None else Path(named))
    folder = Path(named or configs.new_folder(str(checked.plains[0]["name"]), below="sweeps"))
    if named is None or not resumed:  # a study that is resumed may compute in another directory than the user's
        folder = Path(os.path.relpath(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem, remedy = f"cannot be written ({error.strerror})", "choose another folder"
        raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy) from None
    with ExitStack() as stack:
        source: Source[Any]
        if checked.keys is None:
            source = Grid(checked, folder)
        else:
            from rlft.commands.sweep.study import opened

            try:
                stack.enter_context(run_folder.held(folder, "sweep"))
            except UserError as error:
                problem, remedy = "another process is doing this sweep", "wait for it, or stop it first"
                raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy) from error
            source = opened(checked, checked.keys, folder, resumed=resumed)
        for line in source.beginning:
            say(line)
        with _shown_at_the_end(source):
            drive(source, checked, folder)
    source.conclude()


def check_folder(folder: Path, *, is_chosen: bool) -> None:
    """Refuses a folder that holds a run or a sweep of the other kind, or cannot be made.

    is_chosen: whether Optuna chooses the values of the sweep that is to be there.
    """
    run_folder.check_can_be_made(folder, "hydra.sweep.dir")
    problem, remedy = "", "name another folder, or leave it out"
    if not is_chosen and is_study(folder):
        problem = "there is a sweep in that folder whose values Optuna chooses"
        remedy = f"resume that one with {resuming(folder)}, or name another folder"
    elif is_chosen and run_folder.config_file(folder).exists():
        problem = "there is a run in that folder"
    elif is_chosen and not is_study(folder) and ((folder / TABLE).exists() or any(folder.glob(f"*/{CONFIG}"))):
        problem = "there are runs in that folder that are not of such a sweep"
    require(not problem, "hydra.sweep.dir", problem, got=folder, remedy=remedy)


def drive(source: Source[Any], checked: Checked, folder: Path) -> None:
    """Does the runs: one at a time in this process, or `cluster.jobs` at a time in processes of their own."""
    command, parsed, cluster = checked.command, checked.parsed, checked.cluster
    with ExitStack() as stack:
        if cluster is None or cluster.jobs == 1:
            from rlft.logger.console import PRINTED
            from rlft.loop.parts import Engines

            before, prunes = interrupt.signals_received(), checked.keys is not None
            tell = silent if prunes else say
            PRINTED.set(set())
            stack.callback(PRINTED.set, None)
            here = InThisProcess(command, parsed.config_dir, stack.enter_context(Engines()), tell, prunes=prunes)
            Driver(source, here, 1, lambda: interrupt.signals_received() > before).run()
            return
        from rlft.system.process.launcher import open_launcher

        handler = stack.enter_context(Interrupt(say))
        handler.in_step = True  # a signal ends the runs as it ends one, after its step
        threads = threads_of_a_job(cluster.jobs)
        launcher = stack.enter_context(open_launcher(cluster, folder, on_gpus=checked.on_gpus, threads=threads))
        gpus = gpus_of(cluster) if checked.on_gpus else []
        options = [option for option in parsed.options if option not in SWEEPING]

        def words(run: Run) -> list[str]:
            return [command, *options, *run.words, "resume=auto", override("hydra.run.dir", run.folder)]

        place = SideBySide(launcher, words, cluster, handler, say, on_gpus=checked.on_gpus, gpus=gpus)
        Driver(source, place, cluster.jobs, lambda: handler.requested).run()


@contextmanager
def _shown_at_the_end(source: Source[Any]) -> Iterator[None]:
    """Shows the results at the end, and says after an interruption how to resume the sweep.

    What goes wrong with the results does not hide an error of the sweep itself.
    """
    interrupt.set_interrupt_message(source.again)
    try:
        yield
    except BaseException as ended:
        interrupt.set_interrupt_message(source.again)
        if isinstance(ended, interrupt.Reported):  # which ends without another line
            say(source.again)
        try:
            source.show()
        except Exception as error:  # the sweep's own error is the one to tell
            say(f"note: the results so far could not be shown: {escaped(error) or type(error).__name__}")
        raise
    source.show()
