"""The command line: verbs and exit codes.

Exit codes: 0 done, 1 the run stopped by itself (the message says why), 2 a mistake the user can mend, 130 interrupted.
An error that nobody foresaw is told in one line, too (rlft.run.crash); RLFT_DEBUG=1 prints tracebacks.
Nothing heavy is imported before it is needed: `rlft --help` and `rlft train --help` import no torch.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlft
from rlft import catalog, interrupt
from rlft import config as configs
from rlft.arguments import Arguments, check_text, parse
from rlft.roots import Verb
from rlft.types import UserError

AUTO = "auto"
USAGE = """\
rlft: fine-tune language models with reinforcement learning on the hardware you have

  rlft train +recipe=<name> [<key>=<value>] ...   train; -m with several values sweeps; --help lists groups and recipes
  rlft sft +recipe=<name> [...]                   supervised fine-tuning on demonstrations
  rlft rm +recipe=<name> [...]                    a reward model from preferences
  rlft sample [run=<run>] [...]                   scored completions of a data set, to learn from or to look at
  rlft resume <run> [<key>=<value>] ...           go on from where any of these was saved
  rlft eval run=<run or checkpoint> [...]         mean@k and pass@k on the held-out split; or a model: model.path=<path>
  rlft chat run=<run or checkpoint>               talk to it
  rlft export run=<run> out=<folder>              a model folder for transformers and vLLM, or the bare adapter
  rlft plan +recipe=<name> [...]                  what a run needs, and whether it fits, before any weight is loaded
  rlft runs [<folder>]                            every run: how it stands, its step, reward or loss, accuracy, age
  rlft watch <run>                                the live view of a run, from another terminal
  rlft diff <run> <run>                           in which keys they differ, and what came of it
  rlft report <run> ...                           one HTML file: curves, alarms, completions with coloured tokens
  rlft recipes                                    list the recipes
  rlft --version

<run> is a run's folder, a folder with one run below it, or `latest`: the run below runs/ that was started, resumed or
trained last.

First: rlft train +recipe=grpo_arithmetic         two minutes on a CPU, nothing to download
"""
RESUME_USAGE = """\
usage: rlft resume <run> [<key>=<value>] ...
       rlft resume <checkpoint> [<key>=<value>] ... [hydra.run.dir=<new folder>]

A run goes on from its newest checkpoint, exactly as if never stopped. Keys that would change the run are refused.
From a checkpoint a new run begins, whose steps count on; keys may change that the checkpoint still fits, such as
trainer.lr, algorithm.kl_coef, data or rewards.
  rlft resume runs/grpo_arithmetic/<time>
  rlft resume runs/grpo_arithmetic/<time> steps=80
  rlft resume runs/grpo_arithmetic/<time>/checkpoints/step_000040 trainer.lr=1e-4"""

PLAN_USAGE = """\
usage: rlft plan +recipe=<name> [<key>=<value>] ... [device_memory=24GiB] [--json]

Everything that is known of a run before a weight is loaded: its sizes, the memory it takes by part, whether it fits,
which key to change where it does not, how long the data are, and what every reward says of right and wrong answers.
Whatever the run itself would refuse is refused here.

  device_memory   of the device that the run is planned for; by default that of this machine
  --json          the same as one JSON object of at most 64 KiB, for scripts

The exit code is 0 where it fits and 1 where it does not.

  rlft plan +recipe=grpo_arithmetic
  rlft plan +recipe=grpo_gsm8k model.path=<folder> device_memory=24GiB"""


INTERRUPTED = {
    "eval": "nothing was written",
    "export": "nothing was exported",
    "report": "no report was written",
    "chat": "the conversation has ended",
    "watch": "the view has ended, the run is left as it is",
    **dict.fromkeys((*Verb, "sample", "plan"), "nothing was begun"),
    "resume": "the run is as it was",
}
"""What is said of a verb that is interrupted before it says more itself."""


def main() -> None:
    code = run(sys.argv[1:])
    interrupt.ignore_signals()
    if code == interrupt.EXIT_CODE:
        interrupt.end_soon(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    verbs: dict[str, Callable[[list[str]], int]] = {
        **{str(verb): functools.partial(run_verb, verb) for verb in (Verb.train, Verb.sft, Verb.rm)},
        "sample": sample,
        "resume": resume,
        "eval": evaluate,
        "chat": chat,
        "export": export,
        "plan": plan,
        "runs": _reads_runs("runs_verb"),
        "watch": _reads_runs("watch_verb"),
        "diff": _reads_runs("diff_verb"),
        "report": _reads_runs("report_verb"),
        "recipes": recipes,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"rlft {rlft.__version__}")
        return 0
    verb, rest = arguments[0], list(arguments[1:])
    try:
        check_text(arguments)
        if verb not in verbs:
            close = difflib.get_close_matches(verb, verbs, n=1)
            remedy = f"did you mean rlft {close[0]}?" if close else f"use one of {', '.join(verbs)}"
            raise UserError(verb, "there is no such verb", remedy=remedy)
        _quiet()
        with interrupt.ends_promptly(INTERRUPTED.get(verb, "nothing was changed")):
            return _interruptible(verbs[verb], rest)
    except KeyboardInterrupt:  # before or after the verb itself
        print(interrupt.line(), file=sys.stderr)
        return interrupt.EXIT_CODE
    except Exception as error:
        return _failed(error)


def _interruptible(verb: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Runs the verb; an interruption leaves a line that says what is kept."""
    try:
        return verb(arguments)
    except KeyboardInterrupt as interruption:
        interrupt.ignore_signals()
        if not isinstance(interruption, interrupt.Reported):
            print(interrupt.line(), file=sys.stderr)
        return interrupt.EXIT_CODE


def _failed(error: Exception) -> int:
    """Says in one line what ended the command; returns its exit code."""
    from rlft.run import crash

    if crash.debugging():
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):  # whoever read the output, `head` say, has seen enough
        _leave_standard_output()
        return 1
    if isinstance(error, UserError):
        print(f"rlft: {crash.one_line(error)}", file=sys.stderr)
        return 2
    told = crash.one_line(error) if crash.explains_itself(error) else crash.report(error)
    print(f"rlft: stopped: {told}", file=sys.stderr)
    return 1


def _leave_standard_output() -> None:
    """Lets Python end without writing to a pipe that nobody reads."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _quiet() -> None:
    """Other libraries' progress bars and chatter, unless the user has asked for them."""
    for name, value in {
        "HYDRA_FULL_ERROR": "1",  # Hydra raises, and we tell it our way
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Threads of torch that wait spin for some 30 us, then sleep. Without the spinning an update takes a third more;
        # with the usual milliseconds of it, two such runs on one machine take ten times as long instead of three.
        "GOMP_SPINCOUNT": "10000",
    }.items():
        os.environ.setdefault(name, value)


# -- runs --------------------------------------------------------------------------------------------------------------
def run_verb(verb: Verb, arguments: list[str]) -> int:
    """`rlft train`, `rlft sft`, `rlft rm`: one run, or with -m a sweep."""
    asked = parse(arguments, verb)
    _make_importable(asked.config_dir)
    asked = _check_resume_argument(asked)
    if asked.asks or asked.sweep:
        from rlft import multirun

        multirun.ask(verb, asked) if asked.asks else multirun.sweep(verb, asked)
        return 0
    run = configs.compose_run(asked.overrides, asked.config_dir, verb)
    _launch(run.plain, run.folder)
    return 0


def sample(arguments: list[str]) -> int:
    """`rlft sample`: with run=<run>, that run's model, prompts, data and rewards, and its policy samples."""
    asked = parse(arguments, Verb.sample)
    place = asked.value("run")
    if place is None:
        return run_verb(Verb.sample, arguments)
    _only_overrides(arguments, Verb.sample)
    asked = _check_resume_argument(asked)
    from rlft.place import find
    from rlft.run.like import like_run
    from rlft.run.naming import one_run
    from rlft.work import say

    where = find(one_run(place, "run", say))
    of_the_folder = [o for o in asked.overrides if o.startswith(("hydra.", "resume=", "name="))]
    run = configs.compose_run(of_the_folder, asked.config_dir, Verb.sample)
    changes = [o for o in asked.overrides if not o.startswith(("hydra.", "run="))]
    plain = configs.changed(like_run(run.plain, where), changes, asked.config_dir, Verb.sample)
    _launch(plain, run.folder)
    return 0


def _launch(plain: dict[str, Any], folder: Path) -> None:
    from rlft import adapters_of_runs, runfolder
    from rlft.checks import check_early
    from rlft.launch import launch

    folder, may_be_finished = Path(os.path.relpath(folder)), plain["resume"] == AUTO
    if may_be_finished:
        plain = {**plain, "resume": str(folder) if runfolder.config_file(folder).exists() else None}
    plain = adapters_of_runs.resolved(plain)
    check_early(plain, Verb(plain["verb"]))
    if plain["resume"] is None:
        runfolder.check_free(folder)
    else:
        runfolder.check_same_config(folder, plain)
    launch(plain, folder, may_be_finished=may_be_finished)


def _make_importable(config_dir: Path | None) -> None:
    """A user's own modules are found beside where rlft runs and beside their YAML; reward workers inherit the path.

    Last on the path: a folder of theirs named `datasets` must not hide the library.
    """
    for folder in (Path.cwd(), config_dir):
        if folder is not None and str(folder.resolve()) not in sys.path:
            sys.path.append(str(folder.resolve()))


def _check_resume_argument(asked: Arguments) -> Arguments:
    """resume=<run> names a run, which goes on in its folder; resume=auto goes on in hydra.run.dir, or begins there.

    Returns the arguments with the run's folder in place of another name that it was given by, such as `latest`.
    """
    resumed, folder = asked.value("resume"), asked.value("hydra.run.dir")
    if resumed is None:
        return asked
    if resumed == AUTO:
        if folder is None or asked.sweep:
            problem = "begins or goes on with the run in hydra.run.dir, and none is named"
            raise UserError("resume", problem, got=AUTO, remedy="give hydra.run.dir=<folder>")
        return asked
    from rlft import runfolder
    from rlft.run.fork import forking
    from rlft.run.naming import one_run
    from rlft.trainer import checkpoint
    from rlft.work import say

    run = one_run(resumed, "resume", say)
    if (run / checkpoint.STATE).is_file():
        remedy = f"start a new run from it: {forking(run)}"
        raise UserError("resume", "is a checkpoint, and a run goes on from its newest", got=resumed, remedy=remedy)
    runfolder.read(run)
    if folder is not None and Path(folder).resolve() != run.resolve():
        problem = "a resumed run goes on in its own folder, not in hydra.run.dir"
        raise UserError("resume", problem, got=resumed, remedy="take hydra.run.dir out")
    if str(run) == resumed:
        return asked
    overrides = tuple(f"resume={run}" if o.lstrip("+").startswith("resume=") else o for o in asked.overrides)
    return replace(asked, overrides=overrides)


# -- the other verbs -------------------------------------------------------------------------------------------------
def resume(arguments: list[str]) -> int:
    """`rlft resume <run> [key=value ..]`: the run's own config, with changes that do not change the run."""
    from rlft import runfolder
    from rlft.run.fork import forking
    from rlft.run.naming import one_run
    from rlft.trainer import checkpoint
    from rlft.work import override, say

    if arguments and arguments[0] in ("-h", "--help"):
        print(RESUME_USAGE)
        return 0
    if not arguments or not arguments[0].removeprefix("run="):
        raise UserError("resume", "names no run", remedy="write rlft resume runs/<name>/<time>")
    folder = one_run(arguments[0].removeprefix("run="), "resume", say)
    if (folder / checkpoint.STATE).is_file():
        return fork(folder, arguments[1:])
    plain = runfolder.read(folder)
    plain.pop(runfolder.ORIGIN, None)
    verb = Verb(plain.get("verb", Verb.train))
    asked = _only_overrides(arguments[1:], verb)
    if asked.value("hydra.run.dir") is not None:
        remedy = "leave it out"
        if saved := checkpoint.finished(runfolder.checkpoints(folder)):
            new = override("hydra.run.dir", str(asked.value("hydra.run.dir")).strip("'\""))
            remedy += f", or start a new run from a checkpoint: {forking(saved[-1], new)}"
        problem = "a resumed run goes on in its own folder"
        raise UserError("hydra.run.dir", problem, got=asked.value("hydra.run.dir"), remedy=remedy)
    plain = configs.changed(plain, asked.overrides, asked.config_dir, verb)
    plain["resume"] = str(folder)
    _launch(plain, folder)
    return 0


def fork(folder: Path, arguments: list[str]) -> int:
    """`rlft resume <checkpoint> [key=value ..]`: a new run that goes on from a checkpoint of another one."""
    from rlft import adapters_of_runs
    from rlft.launch import launch
    from rlft.place import find
    from rlft.run.fork import open_fork

    source = open_fork(find(folder).run, folder)
    verb = Verb(source.before.get("verb", Verb.train))
    asked = _only_overrides(arguments, verb)
    if asked.value("resume") is not None:
        problem = "a new run begins from the checkpoint"
        raise UserError("resume", problem, got=asked.value("resume"), remedy="leave it out")
    changes = [o for o in asked.overrides if not o.startswith(("hydra.run.dir=", "resume="))]
    plain = configs.changed(dict(source.before), changes, asked.config_dir, verb)
    plain["resume"] = None
    new = asked.value("hydra.run.dir") or configs.new_folder(plain["name"])
    launch(adapters_of_runs.resolved(plain), Path(os.path.relpath(new.strip("'\""))), fork=source)
    return 0


def evaluate(arguments: list[str]) -> int:
    """`rlft eval run=<run or checkpoint>`, or of a model: a table, and a JSONL of every completion."""
    from rlft import adapters_of_runs, evaluation_verb
    from rlft.checks import check_early
    from rlft.launch import import_libraries
    from rlft.place import find_checkpoint
    from rlft.work import say

    if arguments and arguments[0] in ("-h", "--help"):
        print(evaluation_verb.USAGE)
        return 0
    asked, where, changes = _of_a_run(arguments)
    if where is None:
        _check_names_a_model(asked, "there is nothing to evaluate")
    if where is None:
        plain = configs.compose(changes, asked.config_dir)
    else:
        plain = configs.changed(evaluation_verb.as_training(where), changes, asked.config_dir)
    plain = adapters_of_runs.resolved(plain)
    check_early(evaluation_verb.as_evaluation(plain), Verb.train, trains=False)
    if where is not None:
        find_checkpoint(where, lambda damage: None)
    import_libraries()
    evaluation_verb.run(plain, where, say)
    return 0


def chat(arguments: list[str]) -> int:
    """`rlft chat run=<run or checkpoint>`, or with a model."""
    from rlft import adapters_of_runs, chat_verb
    from rlft.launch import import_libraries
    from rlft.work import say

    if arguments and arguments[0] in ("-h", "--help"):
        print(chat_verb.USAGE)
        return 0
    asked, where, changes = _of_a_run(arguments, chat_verb.WORDS)
    if where is None:
        _check_names_a_model(asked, "there is nobody to talk to")
    raw = chat_verb.read_raw(asked.value("raw"))
    if where is None:
        plain = configs.compose(changes, asked.config_dir)
        configs.build(plain)
    else:
        plain = configs.changed(where.config, changes, asked.config_dir, Verb(where.config.get("verb", Verb.train)))
    import_libraries()
    chat_verb.run(adapters_of_runs.resolved(plain), where, raw, say)
    return 0


def export(arguments: list[str]) -> int:
    """`rlft export run=<run or checkpoint> out=<folder>`."""
    from rlft import export_verb
    from rlft.export import push
    from rlft.launch import import_libraries
    from rlft.work import say

    if arguments and arguments[0] in ("-h", "--help"):
        print(export_verb.USAGE)
        return 0
    asked, where, changes = _of_a_run(arguments, [*export_verb.WORDS, *export_verb.PUSH_WORDS])
    if where is None:
        problem = "is missing: there is nothing to export"
        raise UserError("run", problem, remedy="write run=runs/<name>/<time>")
    for key in (o.partition("=")[0] for o in changes if not o.startswith("model.")):
        raise UserError(key, "changes nothing of what was trained", remedy="leave it out")
    config = configs.changed(where.config, changes, asked.config_dir, Verb(where.config.get("verb", Verb.train)))
    out, kind, dtype = (asked.value(word) for word in export_verb.WORDS)
    target = push.read_target(*(asked.value(word) for word in export_verb.PUSH_WORDS))
    request = export_verb.prepare(replace(where, config=config), out, kind, dtype, say)
    pushing = None
    if target is not None:
        request, pushing = replace(request, repo_id=target.repo_id), push.prepare_push(target)
    import_libraries()
    export_verb.run(request, pushing, say)
    return 0


def plan(arguments: list[str]) -> int:
    """`rlft plan +recipe=<name>`: what the run of this config is and needs; trains nothing, loads no weight."""
    if any(word in ("-h", "--help") for word in arguments):
        print(PLAN_USAGE)
        return 0
    as_json = "--json" in arguments
    words = [word for word in arguments if word != "--json"]
    verb = _verb_of(words)
    asked = _only_overrides(words, verb)
    overrides = [o for o in asked.overrides if not o.startswith("device_memory=")]
    run = configs.compose_run(overrides, asked.config_dir, verb)
    from rlft import adapters_of_runs
    from rlft.checks import check_early
    from rlft.checks.device_memory import read_bytes
    from rlft.launch import import_libraries

    plain, named = adapters_of_runs.resolved(run.plain), asked.value("device_memory")
    memory = None if named is None else read_bytes(named)
    check_early(plain, verb)
    import_libraries()
    from rlft import plan_verb
    from rlft.plan_page import print_plan

    planned = plan_verb.plan_of(plain, memory)
    if as_json:
        print(json.dumps(plan_verb.as_dict(planned), indent=1))
    else:
        print_plan(planned)
    return 0 if planned.fits else 1


def _reads_runs(module: str) -> Callable[[list[str]], int]:
    """A verb that only reads what runs have left, whose module prints what comes of its words."""

    def verb(arguments: list[str]) -> int:
        found = importlib.import_module(f"rlft.{module}")
        if any(word in ("-h", "--help") for word in arguments):
            print(found.USAGE)
        else:
            found.command(arguments)
        return 0

    return verb


def _verb_of(words: Sequence[str]) -> Verb:
    """The verb of the recipe that is named, `rlft train` where none is."""
    named = next((word.partition("=")[2] for word in words if word.startswith("+recipe=")), None)
    found = catalog.verb_of(named) if named in catalog.choices("recipe") else "train"
    if found == Verb.sample:
        raise UserError("+recipe", "samples, which is not planned", got=named, remedy="plan one that trains")
    return Verb(found)


def _of_a_run(arguments: list[str], words: Sequence[str] = ()) -> tuple[Arguments, Any, list[str]]:
    """What was asked, the run that it names (None: none), and the changes to its config; words: the verb's own."""
    from rlft.place import find
    from rlft.run.naming import one_run
    from rlft.work import say

    if arguments and not arguments[0].startswith(("-", "+")) and "=" not in arguments[0]:
        arguments = [f"run={arguments[0]}", *arguments[1:]]
    asked = _only_overrides(arguments)
    own = ("run", "checkpoint", *words)
    place = asked.value("run") or asked.value("checkpoint")
    if not place and any(o.partition("=")[0] in ("run", "checkpoint") for o in asked.overrides):
        raise UserError("run", "is empty", remedy="write run=runs/<name>/<time>")
    changes = [o for o in asked.overrides if o.partition("=")[0] not in own]
    return asked, find(one_run(place, "run", say)) if place else None, changes


def _check_names_a_model(asked: Arguments, otherwise: str) -> None:
    """Where no run is named, a model or a recipe must be: the defaults alone are nobody's wish."""
    if not any(asked.value(key) for key in ("model.path", "recipe")):
        remedy = "give run=<run>, model.path=<model> or +recipe=<name>"
        raise UserError("run", f"is missing: {otherwise}", remedy=remedy)


def _only_overrides(arguments: Sequence[str], verb: Verb = Verb.train) -> Arguments:
    """The words of a verb that neither sweeps nor prints the config; its own modules are made importable."""
    asked = parse(arguments, verb)
    if asked.sweep or asked.asks:
        raise UserError(
            "command line",
            "this verb has no such option",
            got=asked.options[0],
            remedy="give it to rlft train, rlft sft or rlft rm",
        )
    _make_importable(asked.config_dir)
    return asked


def recipes(arguments: list[str]) -> int:
    """`rlft recipes`: names with the first comment line of their YAML."""
    if arguments and arguments[0] not in ("-h", "--help"):
        raise UserError("recipes", "takes no more words", got=arguments[0], remedy="write rlft recipes")
    width = max(map(len, catalog.choices("recipe")))
    for verb in Verb:
        for name in catalog.choices("recipe", verb):
            what = catalog.first_comment(catalog.recipe_folder() / f"{name}.yaml")
            print(f"rlft {verb:<6} +recipe={name:<{width}}  {what}")
    return 0


if __name__ == "__main__":
    main()
