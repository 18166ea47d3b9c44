"""`rlft <verb> -m sweep=optuna ..`, from its words to its trials' runs; and `rlft resume` of one that was stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.commands.arguments import make_importable
from rlft.commands.launch import import_libraries
from rlft.commands.sweep import record
from rlft.commands.sweep import table as sweep_table
from rlft.commands.sweep.checked import checked_plans, composed
from rlft.commands.sweep.config import USUAL_TRIALS, StudyConfig, check_installed, is_own, key_of, read_config
from rlft.commands.sweep.jobs import are_on_gpus, cluster_of, gpus_of
from rlft.commands.sweep.measure import check_evaluates, lower_is_better
from rlft.commands.sweep.plain import DATE, date_word, dated
from rlft.commands.sweep.space import Interval, Space, read_space
from rlft.config import compose as configs
from rlft.config.cluster import ClusterConfig
from rlft.config.overrides import Arguments, parse
from rlft.plan.run_plan import Plan
from rlft.runs import run_folder
from rlft.runs.find import short_names
from rlft.system import interrupt
from rlft.system.crash import one_line
from rlft.system.terminal import override, resuming, say
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.commands.sweep.runs import Study
    from rlft.commands.sweep.trials import Trials


class AllFailedError(RuntimeError):
    """None of the trials could be done."""


def resume(folder: Path, changes: Sequence[str]) -> None:
    """Resumes the study in this folder.

    Args:
        folder: of the sweep.
        changes: overrides of what may change, such as sweep.trials=40.

    Raises:
        UserError: it has all its trials, or a change is of something else.
    """
    before = record.read(folder)
    for word in (word for word in changes if not record.may_change(word)):
        problem = "cannot change when a sweep is resumed: its trials would no longer be comparable"
        remedy = f"begin another sweep, or change only {', '.join(CHANGED)}"
        raise UserError(key_of(word), problem, got=word.partition("=")[2], remedy=remedy)
    for word in (word for word in changes if key_of(word) == "hydra.sweep.dir"):
        problem = "a sweep is resumed in its own folder"
        raise UserError("hydra.sweep.dir", problem, got=word.partition("=")[2], remedy="leave it out")
    folder = _at_its_start(folder, before.start)
    changed = {key_of(word) for word in changes}
    kept = [word for word in before.words if key_of(word) not in {*changed, "hydra.sweep.dir"}]
    parsed = parse([*before.options, *kept, *changes, override("hydra.sweep.dir", folder)], before.verb)
    make_importable(parsed.config_dir)
    search(before.verb, parsed, resumed=True)


CHANGED = [key for key in record.MAY_CHANGE if key != "hydra.sweep.dir"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A study of which every value has been checked as a run's.

    Attributes:
        verb: of its runs.
        parsed: its words.
        keys: how its values are drawn and trials compared.
        space: the keys and their values.
        plains: the configs of its corners.
        plans: of the first corner and those that read other files.
        cluster: the section of its runs; None where their verb has none.
    """

    verb: str
    parsed: Arguments
    keys: StudyConfig
    space: Space
    plains: Sequence[dict[str, Any]]
    plans: Sequence[Plan]
    cluster: ClusterConfig | None

    @property
    def total(self) -> int:
        return number_of_trials(self.keys, self.space)

    @property
    def steps(self) -> int:
        return self.plans[0].num_steps

    @property
    def first_evaluation(self) -> int:
        """The step of a run's first evaluation after some training."""
        return min(self.steps, int(self.plains[0]["eval"]["every"]))

    @property
    def seeds(self) -> list[int]:
        return [int(self.plains[0]["seed"]) + i for i in range(self.keys.seeds)]

    @property
    def parallel(self) -> bool:
        return self.cluster is not None and self.cluster.jobs > 1


def search(verb: str, parsed: Arguments, *, resumed: bool = False) -> None:
    """Begins a study, or resumes the one in hydra.sweep.dir, and prints what came of its trials.

    Args:
        verb: of its runs.
        parsed: its words.
        resumed: whether it must be there already, with something left to do.
    """
    if (named := parsed.value("hydra.sweep.dir")) is not None:
        check_folder(Path(named))
    begun = Path(named) if named is not None and record.is_study(Path(named)) else None
    checked = check(verb, parsed if begun is None else with_date_of(begun, parsed), dates=begun is None)
    parsed = checked.parsed
    folder = Path(named or configs.new_folder(str(checked.plains[0]["name"]), below="sweeps"))
    if named is None or not resumed:  # a study that is resumed may compute in another directory than the user's
        folder = Path(os.path.relpath(folder))
    from rlft.commands.sweep import page

    with ExitStack() as stack:
        _hold(stack, folder)
        now = record.record_of(verb, parsed, checked.plains, [plan.fingerprints for plan in checked.plans])
        record.check_same(folder, now)
        trials = _trials(checked, folder)
        done = trials.number_drawn - len(trials.unfinished())
        if resumed and done >= checked.total:
            raise _has_all(folder, checked.keys, done, checked.total)
        record.write(folder, now)
        say(f"sweep of {checked.total} trials, {done} done; if it is stopped, resume it with: {resuming(folder)}")
        for line in notes(checked.keys, checked.space):
            say(line)
        shown = page.Page(folder, trials, checked.space, checked.keys.metric, namer(checked.space))
        with _shown_at_the_end(shown.show):
            _run(checked, _study(checked, folder, trials, shown.write_table))
    rows = trials.rows()
    if all(row.state == "failed" for row in rows):
        raise AllFailedError(f"no trial could be done; trial {rows[0].number} failed: {rows[0].why}")


def with_date_of(folder: Path, parsed: Arguments) -> Arguments:
    """The words of a study that is resumed, with the date on which the one in this folder was begun."""
    words = [word for word in record.read(folder).words if key_of(word) == DATE]
    return parsed if parsed.value(DATE) else replace(parsed, overrides=(*parsed.overrides, *words))


def check(verb: str, parsed: Arguments, *, dates: bool = True) -> Checked:
    """Refuses a study for its words, or for what they mean at any value or end of an interval; loads no weights.

    Args:
        verb: of its runs.
        parsed: its words.
        dates: whether it begins now: then its runs get today's date, if their configs name none.
    """
    keys = read_config([word for word in parsed.overrides if is_own(word)], verb)
    check_evaluates(verb)
    check_installed()
    space = read_space([word for word in parsed.overrides if not is_own(word)], verb)
    number_of_trials(keys, space)
    fixed = [word for word in space.fixed if key_of(word) not in ("resume", "hydra.sweep.dir")]
    space = replace(space, fixed=tuple(fixed))
    plains = composed(space, parsed.config_dir, verb, keys.metric)
    if dates and (word := date_word(plains, None)) is not None:
        space, parsed = replace(space, fixed=(*space.fixed, word)), replace(parsed, overrides=(*parsed.overrides, word))
        plains = [dated(plain, word) for plain in plains]
    import_libraries()
    cluster = cluster_of(plains)
    if cluster is not None and cluster.jobs > 1 and are_on_gpus(plains):
        gpus_of(cluster)  # refuses jobs for which there are too few
    plans = checked_plans(space, plains, verb)
    checked = Checked(verb=verb, parsed=parsed, keys=keys, space=space, plains=plains, plans=plans, cluster=cluster)
    check_prunes(keys, checked.first_evaluation, checked.steps)
    return checked


def check_prunes(keys: StudyConfig, first_evaluation: int, steps: int) -> None:
    """Refuses a pruner that never gets an evaluation to prune at."""
    if keys.pruner != "none" and keys.seeds == 1 and first_evaluation >= steps:
        problem = f"never prunes a trial: its run is not evaluated before the last step, {steps}"
        remedy = f"set eval.every below {steps}, or leave sweep.pruner out"
        raise UserError("sweep.pruner", problem, got=keys.pruner, remedy=remedy)


def check_folder(folder: Path) -> None:
    """Refuses a folder that holds a run or those of a plain sweep, or cannot be made."""
    run_folder.check_can_be_made(folder, "hydra.sweep.dir")
    if run_folder.config_file(folder).exists():
        remedy = "name another folder, or leave it out"
        raise UserError("hydra.sweep.dir", "there is a run in that folder", got=folder, remedy=remedy)
    if not record.is_study(folder) and sweep_table.is_sweep(folder):
        problem = "there are runs in that folder that are not of such a sweep"
        raise UserError("hydra.sweep.dir", problem, got=folder, remedy="name another folder, or leave it out")


def _hold(stack: ExitStack, folder: Path) -> None:
    """Keeps other processes out of the sweep's folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem, remedy = f"cannot be written ({error.strerror})", "choose another folder"
        raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy) from None
    try:
        stack.enter_context(run_folder.held(folder, "sweep"))
    except UserError as error:
        problem, remedy = "another process is doing this sweep", "wait for it, or stop it first"
        raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy) from error


def _trials(checked: Checked, folder: Path) -> Trials:
    from rlft.commands.sweep.trials import Trials

    return Trials(
        folder,
        checked.keys,
        checked.space,
        lower=lower_is_better(checked.keys.metric, checked.keys.direction),
        steps=checked.steps,
        first_evaluation=checked.first_evaluation,
        parallel=checked.parallel,
    )


def _study(checked: Checked, folder: Path, trials: Trials, changed: Callable[[], None]) -> Study:
    from rlft.commands.sweep.runs import Study

    name = namer(checked.space)
    return Study(
        trials,
        folder,
        seeds=checked.seeds,
        steps=checked.steps,
        metric=checked.keys.metric,
        total=checked.total,
        name=lambda trial: name(trial.params),
        say=say,
        changed=changed,
    )


def _run(checked: Checked, study: Study) -> None:
    """Does the trials, in this process or several at a time; an interruption says how to resume the sweep."""
    from rlft.commands.sweep.in_process import run_in_process
    from rlft.commands.sweep.parallel import run_in_parallel

    parsed, again = checked.parsed, f"resume the sweep with: {resuming(study.folder)}"
    interrupt.keeps(again)
    try:
        if checked.parallel and checked.cluster is not None:
            on_gpus = are_on_gpus(checked.plains)
            run_in_parallel(study, checked.space, checked.cluster, checked.verb, parsed, on_gpus=on_gpus)
        else:
            run_in_process(study, checked.space, checked.verb, parsed.config_dir)
    except KeyboardInterrupt as interruption:
        interrupt.keeps(again)
        if isinstance(interruption, interrupt.Reported):  # which ends without another line
            say(again)
        raise


@contextmanager
def _shown_at_the_end(show: Callable[[], None]) -> Iterator[None]:
    """Shows the results at the end. What goes wrong with that does not hide an error of the study itself."""
    try:
        yield
    except BaseException:
        try:
            show()
        except Exception as error:  # the study's own error is the one to tell
            say(f"note: the results so far could not be shown: {one_line(error) or type(error).__name__}")
        raise
    show()


def number_of_trials(keys: StudyConfig, space: Space) -> int:
    """How many trials there are to be.

    Raises:
        UserError: a grid has an interval, or another number of combinations.
    """
    if keys.sampler != "grid":
        return USUAL_TRIALS if keys.trials == "auto" else keys.trials
    if space.size is None:
        intervals = [one.key for one in space.varied if isinstance(one, Interval)]
        problem = f"a grid goes through values one by one, and {intervals[0]} has an interval"
        remedy = f"give {intervals[0]} values with commas between them, or use sweep.sampler=tpe"
        raise UserError("sweep.sampler", problem, got="grid", remedy=remedy)
    if keys.trials not in ("auto", space.size):
        problem = f"a grid tries each of its {space.size} combinations once"
        remedy = "leave it out, or use sweep.sampler=tpe or random"
        raise UserError("sweep.trials", problem, got=keys.trials, remedy=remedy)
    return space.size


def notes(keys: StudyConfig, space: Space) -> list[str]:
    """What the person watching should know when a study starts."""
    log = [one.key for one in space.varied if isinstance(one, Interval) and one.log]
    lines = [f"sampled on a log scale: {', '.join(log)} (otherwise write tag(linear,interval(..)))"] if log else []
    total = number_of_trials(keys, space)
    if keys.pruner == "median" and keys.startup >= total:
        problem = f"note: of {total} trials median prunes none: it waits for sweep.startup={keys.startup} complete ones"
        lines.append(f"{problem}; lower sweep.startup, or raise sweep.trials")
    if keys.sampler != "grid" and space.size is not None and space.size <= total:
        lines.append(f"note: there are {space.size} combinations in all; sweep.sampler=grid tries each of them once")
    return lines


def namer(space: Space) -> Callable[[Mapping[str, Any]], str]:
    """(the values of a trial) -> what it is called: its keys, short, and numbers with four digits."""
    keys = [one.key for one in space.varied]
    names = dict(zip(keys, short_names([key.lstrip("+") for key in keys]), strict=True))

    def name(params: Mapping[str, Any]) -> str:
        shown = {key: f"{v:.4g}" if isinstance(v := params[key], float) else v for key in keys}
        return ", ".join(f"{names[key]}={shown[key]}" for key in keys)

    return name


def _has_all(folder: Path, keys: StudyConfig, done: int, total: int) -> UserError:
    """The refusal to resume a sweep that has all its trials."""
    if keys.sampler == "grid":
        problem, remedy = "the grid's combinations are all done", "begin another sweep, with other values"
    else:
        problem, remedy = "the sweep has all its trials", f"raise it: {resuming(folder)} sweep.trials={2 * done}"
    return UserError("sweep.trials", problem, got=total, remedy=remedy)
