"""`rlft <verb> -m sweep=optuna ..`, from its words to its trials' runs; and `rlft resume` of one that was stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlft.config import compose as configs
from rlft.config.overrides import Arguments, parse
from rlft.run import run_folder
from rlft.run.naming import short_names
from rlft.system import interrupt
from rlft.system.terminal import override, resuming, say
from rlft.types import UserError
from rlft.verbs.arguments import make_importable
from rlft.verbs.launch import import_libraries
from rlft.verbs.study import words
from rlft.verbs.study.checked import checked_plans, composed
from rlft.verbs.study.config import USUAL_TRIALS, StudyConfig, check_installed, is_own, key_of, read_config
from rlft.verbs.study.measure import check_loggers, check_metric, lower_is_better
from rlft.verbs.study.space import Interval, Space, read_space
from rlft.verbs.sweep_jobs import are_on_cards, cluster_of


class AllFailedError(RuntimeError):
    """None of the trials could be done."""


def resume(folder: Path, changes: Sequence[str]) -> None:
    """Goes on with the study in this folder.

    Args:
        folder: of the sweep.
        changes: overrides of what may change, such as sweep.trials=40.

    Raises:
        UserError: it has all its trials, or a change is of something else.
    """
    begun = words.saved(folder)
    for word in (word for word in changes if not words.may_change(word)):
        problem = "cannot change when a sweep goes on: its trials would no longer be comparable"
        remedy = f"begin another sweep, or change only {', '.join(CHANGED)}"
        raise UserError(key_of(word), problem, got=word.partition("=")[2], remedy=remedy)
    for word in (word for word in changes if key_of(word) == "hydra.sweep.dir"):
        problem = "a sweep goes on in its own folder"
        raise UserError("hydra.sweep.dir", problem, got=word.partition("=")[2], remedy="leave it out")
    folder = _at_its_start(folder, begun.start)
    changed = {key_of(word) for word in changes}
    kept = [word for word in begun.words if key_of(word) not in {*changed, "hydra.sweep.dir"}]
    parsed = parse([*begun.options, *kept, *changes, override("hydra.sweep.dir", folder)], begun.verb)
    make_importable(parsed.config_dir)
    search(begun.verb, parsed, resumed=folder)


CHANGED = [key for key in words.MAY_CHANGE if key != "hydra.sweep.dir"]


def _at_its_start(folder: Path, start: str | None) -> Path:
    """Changes to the directory in which a study was begun, if it is another; returns the study's folder from there.

    The study's words, and the configs of its runs, have paths that are relative to it.
    """
    if start is None or not Path(start).is_dir() or Path(start).samefile(Path.cwd()):
        return Path(os.path.relpath(folder))
    folder = folder.resolve()
    os.chdir(start)
    say(f"relative paths are read from {start}, where the sweep was begun")
    return folder


def search(verb: str, parsed: Arguments, *, resumed: Path | None = None) -> None:
    """Begins a study, or goes on with the one in hydra.sweep.dir, and prints what came of its trials.

    Args:
        verb: of its runs.
        parsed: its words.
        resumed: the folder of the study that is gone on with; refused when there is nothing left to do.
    """
    check_installed()
    keys = read_config([word for word in parsed.overrides if is_own(word)], verb)
    space = read_space([word for word in parsed.overrides if not is_own(word)], verb)
    total = number_of_trials(keys, space)
    fixed = [word for word in space.fixed if key_of(word) != "resume" and not key_of(word).startswith("hydra.")]
    space = replace(space, fixed=tuple(fixed))
    plains = composed(space, parsed.config_dir, verb, keys.metric)
    check_metric(keys.metric, plains[0])
    check_loggers(plains[0])
    import_libraries()
    cluster = cluster_of(plains)
    plans = checked_plans(space, plains, verb)
    steps = plans[0].num_steps
    named = parsed.value("hydra.sweep.dir")
    new = Path(os.path.relpath(named or configs.new_folder(str(plains[0]["name"]), below="sweeps")))
    folder = resumed or new
    if run_folder.config_file(folder).exists():
        remedy = "name another folder, or leave it out"
        raise UserError("hydra.sweep.dir", "there is a run in that folder", got=folder, remedy=remedy)

    from rlft.verbs.study import page
    from rlft.verbs.study.beside import trials_beside
    from rlft.verbs.study.here import trials_here
    from rlft.verbs.study.runs import Study
    from rlft.verbs.study.trials import Trials

    with ExitStack() as stack:
        _hold(stack, folder)
        words.keep(folder, words.begun(verb, parsed, plains, [plan.fingerprints for plan in plans]))
        seeds = [int(plains[0]["seed"]) + i for i in range(keys.seeds)]
        beside = cluster is not None and cluster.jobs > 1
        trials = Trials(
            folder,
            keys,
            space,
            lower=lower_is_better(keys.metric, keys.direction),
            steps=steps,
            first_evaluation=min(steps, int(plains[0]["eval"]["every"])),
            beside=beside,
        )
        done = trials.number_drawn - len(trials.unfinished())
        if resumed and done >= total:
            raise _has_all(folder, keys, done, total)
        say(f"sweep of {total} trials, {done} done; if it is stopped, go on with: {resuming(folder)}")
        for line in notes(keys, space):
            say(line)
        name = namer(space)
        study = Study(
            trials,
            folder,
            seeds=seeds,
            steps=steps,
            metric=keys.metric,
            total=total,
            name=lambda trial: name(trial.params),
            say=say,
        )
        interrupt.keeps(f"go on with: {resuming(folder)}")
        try:
            if beside and cluster is not None:
                trials_beside(study, space, cluster, verb, parsed, on_cards=are_on_cards(plains))
            else:
                trials_here(study, space, verb, parsed.config_dir)
        except KeyboardInterrupt as interruption:
            goes_on = f"the sweep goes on with: {resuming(folder)}"
            interrupt.keeps(goes_on)
            if isinstance(interruption, interrupt.Reported):  # which ends without another line
                say(goes_on)
            raise
        finally:
            page.show(folder, trials, space, keys.metric, lambda row: name(row.params))
    rows = trials.rows()
    if all(row.state == "failed" for row in rows):
        raise AllFailedError(f"no trial could be done; trial {rows[0].number} failed: {rows[0].why}")


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
    found = [f"drawn by their logarithms: {', '.join(log)} (tag(linear,interval(..)): by themselves)"] if log else []
    if keys.sampler != "grid" and space.size is not None and space.size <= number_of_trials(keys, space):
        found.append(f"note: there are {space.size} combinations in all; sweep.sampler=grid tries each of them once")
    return found


def namer(space: Space) -> Callable[[Mapping[str, Any]], str]:
    """(the values of a trial) -> what it is called: its keys, short, and numbers with four digits."""
    keys = [one.key for one in space.varied]
    names = dict(zip(keys, short_names([key.lstrip("+") for key in keys]), strict=True))

    def name(params: Mapping[str, Any]) -> str:
        shown = {key: f"{v:.4g}" if isinstance(v := params[key], float) else v for key in keys}
        return ", ".join(f"{names[key]}={shown[key]}" for key in keys)

    return name


def _has_all(folder: Path, keys: StudyConfig, done: int, total: int) -> UserError:
    """The refusal to go on with a sweep that has all its trials."""
    if keys.sampler == "grid":
        problem, remedy = "the grid's combinations are all done", "begin another sweep, with other values"
    else:
        problem, remedy = "the sweep has all its trials", f"raise it: {resuming(folder)} sweep.trials={2 * done}"
    return UserError("sweep.trials", problem, got=total, remedy=remedy)


def _hold(stack: ExitStack, folder: Path) -> None:
    """Keeps other processes out of the sweep's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(run_folder.held(folder))
    except UserError as error:
        problem, remedy = "another process is doing this sweep", "wait for it, or stop it first"
        raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy) from error
