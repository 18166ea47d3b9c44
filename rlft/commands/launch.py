"""Does a run of any command, from its composed config to its end: checks and plans it, claims its folder, runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlft.commands.training import more_steps
from rlft.config.command import Command
from rlft.config.keys import flatten, with_values
from rlft.config.model import check_whole
from rlft.config.overrides import Arguments
from rlft.config.resolved import AUTO, Resolved, resolve
from rlft.config.schema import ANYWHERE, FASTEST, WEIGHTS
from rlft.logger.interface import Logger
from rlft.runs import checkpoint, fork as forks, run_folder, run_status
from rlft.runs.find import changes_since, one_run, other_processor, with_named_runs
from rlft.runs.fork import Fork, forking
from rlft.system import disk, interrupt
from rlft.system.crash import recorded_in
from rlft.system.interrupt import Reported
from rlft.system.lazy import collect_garbage
from rlft.system.terminal import command_line, resuming, say
from rlft.types import UserError, counted, require


def check_resume(parsed: Arguments) -> Arguments:
    """Checks resume=<run>, which continues a run, or resume=auto, which continues or starts the run in hydra.run.dir.

    Returns the arguments with a name such as `latest` replaced by the run's folder.
    """
    resumed, folder = parsed.value("resume"), parsed.value("hydra.run.dir")
    if resumed is None:
        return parsed
    if resumed == AUTO:
        remedy = "leave it out: the same command with its hydra.sweep.dir continues the sweep"
        require(not parsed.sweep, "resume", "is of one run, and this is a sweep", got=AUTO, remedy=remedy)
        problem = "starts or continues the run in hydra.run.dir, which is not given"
        require(folder is not None, "resume", problem, got=AUTO, remedy="give hydra.run.dir=<folder>")
        return parsed
    run = one_run(resumed, "resume", say)
    if (run / checkpoint.STATE).is_file():
        remedy = f"start a new run from it: {forking(run)}"
        raise UserError("resume", "is a checkpoint; a run is resumed from its newest one", got=resumed, remedy=remedy)
    run_folder.read(run)
    is_its_own = folder is None or Path(folder).resolve() == run.resolve()
    problem = "a resumed run continues in its own folder, not in hydra.run.dir"
    require(is_its_own, "resume", problem, got=resumed, remedy="leave hydra.run.dir out")
    if str(run) == resumed:
        return parsed
    overrides = tuple(f"resume={run}" if o.lstrip("+").startswith("resume=") else o for o in parsed.overrides)
    return replace(parsed, overrides=overrides)


def begin(plain: Mapping[str, Any], folder: Path) -> None:
    """Starts the run of this config in the folder, or resumes it, once the config alone has been checked."""
    folder = Path(os.path.relpath(folder))
    resolved = resolve_in(folder, plain)
    if resolved.config.resume is None:
        run_folder.check_free(folder)
    elif isinstance(plain.get("steps"), int):  # otherwise the number of steps follows from the data
        check_steps(folder, plain["steps"], str(plain.get("trainer", {}).get("schedule")))
    if not launch(resolved, folder, may_be_finished=plain["resume"] == AUTO):
        say(f"finished already, with the same config and inputs: {folder}")


def resolve_in(folder: Path, plain: Mapping[str, Any], name: str | None = None) -> Resolved:
    """Reads the composed config of a run in this folder, with the values that a resumed run keeps and may not change.

    `resume: auto` resumes the run in the folder if there is one. `name` is the command's; None: that of the config.
    """
    if plain["resume"] == AUTO:
        plain = {**plain, "resume": str(folder) if run_folder.config_file(folder).exists() else None}
    resumed = None if plain["resume"] is None else folder
    resolved = resolve(run_folder.with_kept_values(settled(plain), resumed), name)
    if resumed is not None:
        run_folder.check_same_config(folder, resolved.plain)
    return resolved


def settled(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The composed config with what its words mean here: folders of runs that are named, fields that the data have."""
    from rlft.data.files import with_guessed_fields  # not imported for what is refused before

    return with_guessed_fields(with_named_runs(plain))


def launch(
    resolved: Resolved,  # its config; with `resume`, it is that of the run in the folder
    folder: Path,
    shared_engines: Any = None,  # the engines of a sweep; its jobs do not print a page at their end
    *,
    plan: Any = None,  # its plan, if it has been made
    # Whether a resumed run that has all its steps is left as it is, if its inputs are unchanged; otherwise it is
    # refused.
    may_be_finished: bool = False,
    fork: Fork | None = None,  # the checkpoint of another run that this new run starts from
    loggers: Sequence[Logger] = (),
) -> bool:
    """Performs a run to its end, or to an interruption (KeyboardInterrupt, after saving); False: it was left alone."""
    from rlft.plan.rules import models_of  # not imported for what is refused before

    command, plain = resolved.command, resolved.plain
    doing = f"rlft {command.name}: {plain['name']} with {plain['model']['path']} in {folder}"
    is_shown = getattr(resolved.config, "console", None) is not None

    def show_first_rows() -> None:
        from rlft.logger.console import show_rows
        from rlft.plan.run_plan import config_rows

        if is_shown:
            show_rows(config_rows(resolved.config), f"{plain['name']} in {folder}")

    import_libraries(doing, models_of(resolved.config), meanwhile=show_first_rows)
    from rlft.logger.console import show_rows
    from rlft.logger.summary import print_summary
    from rlft.loop.parts import Engines
    from rlft.plan.fit import fit_to_device
    from rlft.plan.sizes import note_of_disk

    plan = fit_to_device(plan or resolved.plan())
    plan = replace(plan, loggers=(*plan.loggers, *loggers)) if loggers else plan
    plain = plan.plain
    if flatten(plain).get(WEIGHTS) == FASTEST:
        generation = plan.config.generation
        engine = generation.named(ANYWHERE)
        measured = replace(engine, weights=engine.chosen)  # engines in other processes do not measure again
        generation = replace(generation, engines={**generation.engines, ANYWHERE: measured})
        plan = replace(plan, config=replace(plan.config, generation=generation))
        plain = with_values(plain, {WEIGHTS: str(measured.weights)})
    if fork is not None:
        forks.check(fork, plain, plan.fingerprints, plan.num_steps)
    run_folder.check_writable(folder)
    if fork is not None:
        forks.begin(fork, folder, plain, plan.fingerprints, plan.num_steps)
        say(f"a new run from {fork.run} after step {fork.step}, in {folder}")
    elif plan.config.resume is None:
        run_folder.claim(folder, plain, plan.fingerprints, plan.num_steps)
    elif _is_left_alone(command, plan, folder, may_be_finished):
        return False
    if disk_note := note_of_disk(plan.disk_bytes(), folder):
        say(f"note: {disk_note}")
    try:
        with ExitStack() as stack:
            interrupt.set_interrupt_message(f"resume from what is saved with: {resuming(folder)}")
            stack.enter_context(disk.explained(resuming(folder), folder))
            stack.enter_context(run_folder.held(folder))
            run_folder.go_on(folder, plain)
            ending = stack.enter_context(run_status.recording_status(folder, plan.num_steps))
            stack.enter_context(recorded_in(folder))
            stack.enter_context(disk.explained(resuming(folder), folder))  # so that status.json has this message, too
            engines = shared_engines if shared_engines is not None else stack.enter_context(Engines())
            if is_shown:
                show_rows(plan.planned_rows())
            outcome = command.run(plan, folder, engines, say)
            ending.interrupted = outcome.interrupted
    except KeyboardInterrupt:
        if command.stopped is not None:
            say(command.stopped(folder))
            raise Reported from None
        kept = checkpoint.finished(run_folder.checkpoints(folder))[-1:]
        saved_text = f"step {checkpoint.step_of(kept[0])} is saved" if kept else "no step is saved"
        say(f"stopped at once; {saved_text}; resume with: {resuming(folder)}")
        raise Reported from None
    if outcome.interrupted:
        after = f"after step {outcome.step}, which is saved" if outcome.step else "before the first step"
        say(f"stopped {after}; resume with: {resuming(folder)}")
        raise Reported
    interrupt.set_interrupt_message(f"the run is finished and saved in {folder}")
    if shared_engines is None and getattr(plan.config, "console", True) is not None:  # some commands have none
        print_page = command.print_summary or (lambda plan, folder: print_summary(folder, ()))
        print_page(plan, folder)
    return True


def _is_left_alone(command: Command, plan: Any, folder: Path, may_be_finished: bool) -> bool:
    """Whether the run in this folder, whose config is the plan's, is finished and is left alone.

    Refuses changed inputs, fewer steps than the run has done, and a finished run that may not be finished.
    """
    schedule = getattr(getattr(plan.config, "trainer", None), "schedule", None)
    done = command.steps_done(folder, plan) if command.steps_done else check_steps(folder, plan.num_steps, schedule)
    run_folder.check_same_inputs(run_folder.read(folder)[run_folder.ORIGIN], plan.fingerprints)
    for note in filter(None, (*changes_since(folder), other_processor(folder))):
        say(f"note: {note}")
    if done < plan.num_steps or may_be_finished:
        return done >= plan.num_steps
    problem = f"the run is finished: it has all its {counted(plan.num_steps, 'step')}"
    raise UserError("resume", problem, got=folder, remedy=after_the_end(command, schedule, folder, plan.num_steps))


def after_the_end(command: Command, schedule: str | None, folder: Path, num_steps: int) -> str:
    """What a user can do with a finished run. schedule: of its learning rate, if it has one."""
    suggested = more_steps(folder, schedule, num_steps)
    remedies = [f"{purpose} ({command_line('rlft', *words)})" for purpose, words in suggested]
    if command.has_policy:
        remedies.append(command_line("rlft", "eval", f"run={folder}"))
    return ", or ".join(remedies) or "start another one"


def import_libraries(
    doing: str,  # what the command does, which is said first, as the import takes seconds
    models: Iterable[tuple[str, str]],  # (key, path) of the models that it then reads, which are checked before
    *,
    needs_weights: bool = True,  # whether it reads more of them than config and tokenizer
    meanwhile: Callable[[], None] = lambda: None,  # shows what else is known before the import
) -> None:
    """Imports torch, transformers and the modules that need them; meanwhile Ctrl-C ends the process at once."""
    from rlft.system.interrupt import ends_the_process

    for key, path in models:
        check_whole(path, key, needs_weights=needs_weights)
    if "torch" not in sys.modules:
        say(f"{doing}; importing torch and transformers ..")
    meanwhile()
    with ends_the_process():
        import transformers

        import rlft.loop.session

        # transformers imports its modules when their names are first used.
        _ = rlft.loop.session, transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    collect_garbage(seldom=False)
    from transformers.utils import logging

    if os.environ.get("TRANSFORMERS_VERBOSITY", "error") == "error":
        logging.disable_progress_bar()


def check_steps(folder: Path, num_steps: int, schedule: str | None) -> int:
    """The step of the newest undamaged checkpoint, from which a resume continues; 0 if there is none.

    Refuses fewer steps than the run has done; only with schedule=constant may a resume have more.
    """
    done = run_folder.steps_done(folder)
    if num_steps >= done:
        return done
    remedies = [f"raise it ({resuming(folder)} steps={2 * done})"] if schedule == "constant" else []
    earlier = [f for f in checkpoint.finished(run_folder.checkpoints(folder)) if checkpoint.step_of(f) < num_steps]
    if earlier:
        remedies.append(f"start a new run from an earlier checkpoint ({resuming(earlier[-1])} steps={num_steps})")
    problem = f"the run has done {counted(done, 'step')} already, and none can be undone"
    raise UserError("steps", problem, got=num_steps, remedy=", or ".join(remedies) or "leave it as it was")
