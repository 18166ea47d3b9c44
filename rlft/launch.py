"""A run of any verb, from its composed config to its end: planned, claimed, held, done, and told how it ended."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlft import interrupt, run_status, runfolder
from rlft.interrupt import Reported
from rlft.run import fork as forks
from rlft.run.crash import recorded_in
from rlft.run.fork import Fork
from rlft.types import UserError
from rlft.work import Work, command_line, resuming, say


def work_of(verb: str) -> Work:
    """The work of this verb; imports what it stands on."""
    import_libraries()
    match verb:
        case "train":
            from rlft.training_verb import WORK
        case "sft":
            from rlft.sft import WORK
        case "rm":
            from rlft.rm import WORK
        case _:
            from rlft.sampling_verb import WORK
    return WORK


def launch(
    plain: dict[str, Any],
    folder: Path,
    shared_engines: Any = None,
    *,
    may_be_finished: bool = False,
    fork: Fork | None = None,
) -> None:
    """Does a run to its end, or to an interruption (KeyboardInterrupt, after saving).

    shared_engines: those of a sweep, whose jobs end without a page of their own. may_be_finished: a resumed run that
    has all its steps is left as it is, after a look at what it was made from; else it is refused. fork: the checkpoint
    of another run that this one, a new one, goes on from.
    """
    work = work_of(plain["verb"])
    from rlft import check
    from rlft.auto_budget import fitted
    from rlft.engine import Engines

    plan = fitted(work.make_plan({**plain, "resume": str(folder)} if fork is not None else plain))
    if fork is not None:
        forks.check(fork, plain, plan.fingerprints, plan.num_steps)
    check.check_writable(folder)
    if fork is not None:
        forks.begin(fork, folder, plain, plan.fingerprints, plan.num_steps)
        say(f"a new run from {fork.run} after step {fork.step}, in {folder}")
    elif plan.config.resume is None:
        runfolder.start(folder, plain, plan.fingerprints)
    elif _is_left_alone(work, plan, plain, folder, may_be_finished):
        say(f"finished already, and made from the same: {folder}")
        return
    try:
        with ExitStack() as stack:
            interrupt.keeps(f"go on from what is saved with: {resuming(folder)}")
            stack.enter_context(runfolder.held(folder))
            runfolder.go_on(folder, plain)
            ending = stack.enter_context(run_status.kept(folder, plan.num_steps))
            stack.enter_context(recorded_in(folder))
            engines = shared_engines if shared_engines is not None else stack.enter_context(Engines())
            outcome = work.do(plan, folder, engines, say)
            ending.interrupted = outcome.interrupted
    except KeyboardInterrupt:
        say(work.stopped(folder))
        raise Reported from None
    if outcome.interrupted:
        how_far = "saved" if outcome.step else "before the first one"
        say(f"stopped after step {outcome.step}, {how_far}; go on with: {resuming(folder)}")
        raise Reported
    interrupt.keeps(f"the run is finished and saved in {folder}")
    has_page = "console" in getattr(plan.config, "logger", ("console",))  # a verb without loggers always has
    if shared_engines is None and has_page:
        work.closing(plan, folder)


def _is_left_alone(work: Work, plan: Any, plain: dict[str, Any], folder: Path, may_be_finished: bool) -> bool:
    """Whether the run in this folder is finished, and need not go on.

    Raises:
        UserError: the run cannot go on with this config, or is finished and was to go on.
    """
    done = work.steps_done(folder, plan)
    runfolder.check_resume(folder, plain, plan.fingerprints)
    if done < plan.num_steps or may_be_finished:
        return done >= plan.num_steps
    problem = f"the run is finished: it has all its {plan.num_steps} steps"
    raise UserError("resume", problem, got=folder, remedy=after_the_end(plain, folder, plan.num_steps))


def after_the_end(plain: dict[str, Any], folder: Path, num_steps: int) -> str:
    """What can be done with a finished run."""
    ways = []
    if plain.get("trainer", {}).get("schedule") == "constant":
        ways.append(f"raise steps ({resuming(folder)} steps={2 * num_steps})")
    if plain["verb"] in ("train", "sft"):
        ways.append(command_line("rlft", "eval", f"run={folder}"))
    return ", or ".join(ways) or "start another one"


def import_libraries() -> None:
    """torch, transformers and all that stands on them: seconds, in which Ctrl-C just ends the process."""
    from rlft.interrupt import ends_the_process

    with ends_the_process():
        import transformers

        import rlft.session

        # transformers imports its parts when they are first asked for.
        _ = rlft.session, transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    from transformers.utils import logging

    if os.environ.get("TRANSFORMERS_VERBOSITY", "error") == "error":
        logging.disable_progress_bar()
