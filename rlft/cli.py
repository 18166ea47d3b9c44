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
from itertools import chain, repeat

import rlft
from rlft.config import command as commands, recipe_file, suggest
from rlft.config.choices import closest
from rlft.config.compose import answer, compose_run
from rlft.config.overrides import check_text, make_importable, parse
from rlft.system import interrupt
from rlft.system.lazy import collect_garbage
from rlft.system.terminal import discard, for_a_shell
from rlft.types import UserError

TRAIN, INSPECT, USE, HELP, PACKAGES = PARTS = ("Train", "Inspect", "Use", "Help", "Packages")  # of `rlft --help`


@dataclass(frozen=True, slots=True)
class Tool:
    """A command that makes no run. What it does and takes is in assets/usage/<its name>.txt."""

    target: str  # `module:function` in rlft.commands, called with the arguments; returns an exit code, or None for 0
    part: str  # where `rlft --help` lists it
    interrupted: str = "nothing was changed"  # said of an interruption before the command has set a more precise text

    def __call__(self, arguments: list[str]) -> int:
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(f"rlft.commands.{module}"), function or "command")(arguments) or 0


TOOLS = {
    "init": Tool("init", TRAIN, "the folder may lack a file"),
    "resume": Tool("resume", TRAIN, "the run is as it was"),
    "rank": Tool("rank", TRAIN, "nothing was ranked"),
    "plan": Tool("plan", INSPECT, "nothing was begun"),
    "reward": Tool("reward", INSPECT),
    "runs": Tool("watch.runs", INSPECT),
    "watch": Tool("watch.watch", INSPECT, "the view has ended, the run is left as it is"),
    "report": Tool("watch.report", INSPECT, "no report was written"),
    "diff": Tool("watch.diff", INSPECT),
    "audit": Tool("audit.command", INSPECT),
    "eval": Tool("eval", USE, "nothing was written"),
    "chat": Tool("chat", USE, "the conversation has ended"),
    "serve": Tool("serve", USE, "the server has ended"),
    "export": Tool("export.command", USE, "nothing was exported"),
    "translate": Tool("translate", HELP),
    "recipes": Tool("lists:recipes", HELP),
    "keys": Tool("lists:keys", HELP),
    "completion": Tool("completion", HELP),
    "algorithms": Tool("lists:algorithms", HELP),
    "models": Tool("lists:models", HELP),
    "doctor": Tool("doctor.command", HELP, "no results were saved"),
}

OF_SHELLS = ("-sc", "--shell-completion", "--shell_completion", "--install-completion", "--show-completion")
"""Options that install completion in programs made with Hydra, Click or Typer."""

FIRST = """\
rlft train +recipe=grpo_arithmetic   two minutes on a CPU, nothing to download
rlft init qa                         a folder for your own data and rewards
"""
LAST = """
A run is named by its folder or by `latest`. More: rlft <command> --help
rlft {version} fine-tunes language models with reinforcement learning."""


def usage() -> str:
    """The text of `rlft --help`: one line per command, those of installed packages included."""
    rows = [(TRAIN if name in commands.OWN else PACKAGES, name, _help_of(name)) for name in commands.names()]
    rows += [(tool.part, name, usage_of(name)[0]) for name, tool in TOOLS.items()]
    lines = []
    for part in PARTS:
        titles = chain([part], repeat(""))
        lines += [f"{next(titles):<9}{name:<12}{help}" for of, name, help in rows if of == part]
    return "\n".join([FIRST, *lines, LAST.format(version=rlft.__version__)])


def usage_of(tool: str) -> tuple[str, str]:
    """(what it does, in one line of at most 59 characters; its whole usage)."""
    text = (suggest.ASSETS / "usage" / f"{tool}.txt").read_text(encoding="utf-8")
    help, _, whole = text.partition("\n")
    return help, whole


def _print_help(tool: str) -> int:
    help, whole = usage_of(tool)
    example = next(line for line in whole.splitlines() if line.startswith("  rlft "))
    print(f"rlft {tool}: {help}\n\n{example}\n\n{whole}", end="")
    return 0


def _help_of(name: str) -> str:
    """What this command does, or why it cannot be loaded."""
    try:
        return commands.named(name).help
    except commands.UnknownCommandError as error:
        return error.problem


def main() -> None:
    collect_garbage(seldom=True)
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
        if asked := [word for word in arguments if word.partition("=")[0] in OF_SHELLS]:
            remedy = "source what rlft completion bash (or zsh, or fish) prints"
            raise UserError("command line", "there is no such option", got=asked[0], remedy=remedy)
        if name in TOOLS and not {"-h", "--help"}.isdisjoint(rest):
            return _print_help(name)
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
    if name in commands.OWN or name in (known := [*commands.names(), *TOOLS]):
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
        print(answer(name, parsed), end="")
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
        for each in (error, *error.more):
            place = recipe_file.place_of(each.key, words)
            print(f"rlft: {for_a_shell(crash.escaped(each))}{place}", file=sys.stderr)
        return 2
    error = disk.failure_of(error) or error
    line = crash.escaped(error) if crash.explains_itself(error) else crash.report(error)
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
