"""The command line: commands and exit codes.

Exit codes: 0 done, 1 the run stopped by itself (the message says why), 2 a mistake the user can fix, 130 interrupted.
An unexpected error is printed in one line, too (rlft.system.crash); RLFT_DEBUG=1 prints tracebacks.
Nothing heavy is imported before it is needed: `rlft --help` and `rlft train --help` import no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import rlft
from rlft.config import command as commands
from rlft.config import recipe_file
from rlft.config.choices import closest
from rlft.config.compose import answer, compose_run
from rlft.config.overrides import check_text, make_importable, parse
from rlft.system import interrupt
from rlft.system.terminal import discard, for_a_shell
from rlft.types import UserError


@dataclass(frozen=True, slots=True)
class Tool:
    """A command that makes no run.

    Attributes:
        module: the module with `USAGE` and `command(arguments)`, which returns an exit code, or None for 0.
        usage: the words after the name, for `rlft --help`.
        help: what it does, in one line.
        interrupted: the message for an interruption before the command has set a more precise one.
    """

    module: str
    usage: str
    help: str
    interrupted: str = "nothing was changed"

    def __call__(self, arguments: list[str]) -> int:
        module = importlib.import_module(self.module)
        if any(word in ("-h", "--help") for word in arguments):
            print(module.USAGE)
            return 0
        return module.command(arguments) or 0


ONE_RUN = "run=<run or checkpoint>"
TOOLS = {
    "resume": Tool(
        "rlft.commands.resume",
        "<run> [<key>=<value>] ...",
        "go on from where any of these was saved",
        interrupted="the run is as it was",
    ),
    "eval": Tool(
        "rlft.commands.eval",
        f"{ONE_RUN} [...]",
        "mean@k and pass@k on the held-out split; or a model: model.path=<path>",
        interrupted="nothing was written",
    ),
    "chat": Tool("rlft.commands.chat", ONE_RUN, "talk to it", interrupted="the conversation has ended"),
    "serve": Tool(
        "rlft.commands.serve",
        ONE_RUN,
        "an endpoint that is compatible with those of OpenAI and vLLM",
        interrupted="the server has ended",
    ),
    "export": Tool(
        "rlft.commands.export.command",
        "run=<run> out=<folder>",
        "a model folder for transformers and vLLM, or the bare adapter",
        interrupted="nothing was exported",
    ),
    "audit": Tool(
        "rlft.commands.audit.command",
        "<run or exported folder>",
        "is it what it says? chain, files, rewards and random steps",
    ),
    "plan": Tool(
        "rlft.commands.plan",
        "+recipe=<name> [...]",
        "what a run needs, and whether it fits, before any weight is loaded",
        interrupted="nothing was begun",
    ),
    "reward": Tool(
        "rlft.commands.reward",
        "try [+recipe=<name>] [...]",
        "what do the rewards pay for? tried on the run's data, before weights are loaded",
        interrupted="nothing was changed",
    ),
    "doctor": Tool(
        "rlft.commands.doctor.command",
        "[+recipe=<name>] [...]",
        "does rlft work on this machine? measured in minutes, with nothing to download",
        interrupted="no results were saved",
    ),
    "runs": Tool(
        "rlft.commands.watch.runs", "[<folder>]", "every run: how it stands, its step, reward or loss, accuracy, age"
    ),
    "watch": Tool(
        "rlft.commands.watch.watch",
        "<run>",
        "the live view of a run, from another terminal",
        interrupted="the view has ended, the run is left as it is",
    ),
    "diff": Tool("rlft.commands.watch.diff", "<run> <run>", "in which keys they differ, and what came of it"),
    "report": Tool(
        "rlft.commands.watch.report",
        "<run> ...",
        "one HTML file: curves, alarms, completions with coloured tokens",
        interrupted="no report was written",
    ),
    "recipes": Tool("rlft.commands.recipes", "", "list the recipes"),
    "algorithms": Tool(
        "rlft.commands.algorithms", "[<name>]", "list the algorithms; or of one the loss, the keys, the paper"
    ),
    "models": Tool("rlft.commands.models", "[<pattern>]", "families of models: what holds for each, which are refused"),
}

ABOUT = """\
<run> is a run's folder, a folder with one run below it, or `latest`: the run below runs/ that was started, resumed or
trained last.

First: rlft train +recipe=grpo_arithmetic         two minutes on an idle CPU, nothing to download"""
HELP_COLUMN = 50


def usage() -> str:
    """The text of `rlft --help`: one line per command, those of installed packages included."""
    lines = ["rlft: fine-tune language models with reinforcement learning on the hardware you have", ""]
    lines += [_line(name, *_usage_of(name)) for name in commands.OWN]
    lines += [_line(name, tool.usage, tool.help) for name, tool in TOOLS.items()]
    lines += ["  rlft --version", ""]
    if others := [name for name in commands.names() if name not in commands.OWN]:
        lines += ["From installed packages:", *(_line(name, *_usage_of(name)) for name in others), ""]
    return "\n".join([*lines, ABOUT])


def _line(name: str, usage: str, help: str) -> str:
    return f"  rlft {name} {usage}".ljust(HELP_COLUMN - 1) + f" {help}"


def _usage_of(name: str) -> tuple[str, str]:
    """(the words after this command's name, what it does), or why it cannot be loaded."""
    try:
        command = commands.named(name)
    except commands.UnknownCommandError as error:
        return "", error.problem
    return command.usage, command.help


def main() -> None:
    interrupt.end_the_process_on_signals()
    code = run(sys.argv[1:])
    interrupt.ignore_signals()
    code = _flushed(code)
    interrupt.end_soon(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line, prints its errors and returns its exit code."""
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(usage())
            return 0
        if arguments[0] in ("-V", "--version", "version"):
            print(f"rlft {rlft.__version__}")
            return 0
        name, rest = arguments[0], list(arguments[1:])
        check_text(arguments)
        command, interrupted = _command(name)
        _quiet()
        with interrupt.ends_promptly(interrupted):
            return _interruptible(command, rest)
    except KeyboardInterrupt:  # before or after the command itself
        print(interrupt.line(), file=sys.stderr)
        return interrupt.EXIT_CODE
    except (
        Exception
    ) as error:  # whatever escapes a command is told by its kind, and ends with the exit code of its kind
        return _failed(error, arguments)


def _command(name: str) -> tuple[Callable[[list[str]], int], str]:
    """(the function of this command, the message if it is interrupted). Raises UserError: there is no such command."""
    if name in TOOLS:
        return TOOLS[name], TOOLS[name].interrupted
    known = [*commands.names(), *TOOLS]
    if name in known:
        return partial(_make_run, name), "nothing was begun"
    close = closest(name, known)
    remedy = f"did you mean rlft {close}?" if close else f"use one of {', '.join(known)}"
    raise UserError(name, "there is no such command", remedy=remedy)


def _make_run(name: str, words: list[str]) -> int:
    from rlft.commands.launch import begin, check_resume

    command = commands.named(name)
    parsed = parse(words, name)
    make_importable(parsed.config_dir)
    parsed = check_resume(parsed)
    if command.compose is not None and (run := command.compose(parsed)) is not None:
        begin(run.plain, run.folder)
    elif parsed.asks:
        answer(name, parsed)
    elif parsed.sweep:
        from rlft.commands.sweep.command import sweep

        sweep(name, parsed)
    else:
        run = compose_run(parsed.overrides, parsed.config_dir, name)
        begin(run.plain, run.folder)
    return 0


def _interruptible(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Runs the command; after an interruption a line says what is kept."""
    try:
        return command(arguments)
    except KeyboardInterrupt as interruption:
        interrupt.ignore_signals()
        if not isinstance(interruption, interrupt.Reported):
            print(interrupt.line(), file=sys.stderr)
        return interrupt.EXIT_CODE


def _failed(error: Exception, words: Sequence[str] = ()) -> int:
    """Prints in one line what ended the command with these words; returns its exit code."""
    from rlft.system import crash, disk

    if crash.debugging():
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):  # the reader of the output, for instance `head`, has closed the pipe
        discard(sys.stdout)
        return 1
    if isinstance(error, UserError):
        place = recipe_file.place_of(error.key, words)
        print(f"rlft: {for_a_shell(crash.one_line(error))}{place}", file=sys.stderr)
        return 2
    error = disk.failure_of(error) or error
    line = crash.one_line(error) if crash.explains_itself(error) else crash.report(error)
    with suppress(OSError):  # standard error may go to the disk that is full
        print(f"rlft: stopped: {line}", file=sys.stderr, flush=True)
    return 1


def _flushed(code: int) -> int:
    """Flushes standard output, which may go to a full disk; returns the exit code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = _failed(error) if code == 0 else code
        discard(sys.stdout)  # lets Python end without writing there again
        return failed
    return code


def _quiet() -> None:
    """Turns off other libraries' progress bars and messages, unless the user has set these variables."""
    for name, value in {
        "HYDRA_FULL_ERROR": "1",  # Hydra raises its errors, so that rlft words them
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Threads of torch that wait spin for some 30 us, then sleep. Without the spinning an update takes a third more;
        # with the usual milliseconds of it, two such runs on one machine take ten times as long instead of three.
        "GOMP_SPINCOUNT": "10000",
    }.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    main()
