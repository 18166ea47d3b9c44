"""The commands that make runs: rlft's own, and those that installed packages provide.

A command is one object. rlft's own are in `rlft.commands.training` and `sample`; a package provides one by an entry
point of the group `rlft.commands`, `<name> = "<module>:<Command>"`. Its module is imported when the command is used,
or listed by `rlft --help`; so it must import torch only inside functions, or name them with `lazy`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rlft.config.choices import choice_remedy
from rlft.types import UserError

GROUP = "rlft.commands"
OWN = ("train", "sft", "rm", "dpo", "sample")

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The most important metric of a run: `rlft runs` shows it, `rlft watch` draws it."""

    label: str
    metric: str
    lower_is_better: bool = False


LOSS = Headline(label="loss", metric="loss/total", lower_is_better=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that makes runs."""

    name: str  # the word after `rlft`, which is also the value of the key `command` in the config of each run
    usage: str  # the words after the name, for `rlft <command> --help`
    help: str  # what the command does, in one line
    # The dataclass of its config, a `rlft.config.schema.Root`, with what is known of its keys (`rlft.config.keys.Key`),
    # such as that a resume may change them.
    root: type
    # (`rlft.config.resolved.Resolved`, *, runs_here) -> a `rlft.plan.run_plan.Plan`, or a UserError. It loads no
    # weight.
    make_plan: Step
    run: Step  # (plan, folder, engines, say) -> `rlft.loop.driver.Outcome`
    # (typed config) -> what it has made of the config and the plan goes on with (`Resolved.parts`); raises a UserError
    # if the config alone is wrong. It imports no torch. None means that only the types and bounds of the root are
    # checked.
    check: Step | None = None
    # The folder of `<name>.yaml`, which has its keys with their defaults; its own groups and recipes are folders in it.
    # None means rlft's own folder.
    configs: Path | None = None
    headline: Headline | None = LOSS  # the most important metric; None if a run writes no metrics
    has_policy: bool = False  # whether a run saves a policy in the role `policy`, which `rlft eval` can evaluate
    compose: Step | None = None  # (arguments) -> the config if words such as run=<run> determine it, else None
    # (folder, plan) -> number of saved steps. None means those of the newest undamaged checkpoint.
    steps_done: Step | None = None
    # (folder) -> the message about a run that was stopped inside a step. None means the usual one.
    stopped: Step | None = None
    # (plan, folder); prints the page at the end. None means the curves and the last evaluation.
    print_summary: Step | None = None


class UnknownCommandError(UserError):
    """There is no command of that name, or it cannot be loaded."""


def lazy(target: str) -> Step:
    """A function that calls `module:function`, whose module is imported at the first call."""

    def call(*args: Any, **keywords: Any) -> Any:
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)(*args, **keywords)

    return call


@cache
def named(name: str) -> Command:
    """The command of this name. Raises UnknownCommandError: there is none, or its package cannot be loaded."""
    if name in OWN:
        module = importlib.import_module(f"rlft.commands.{'sample' if name == 'sample' else 'training'}")
        return getattr(module, name.upper())
    points = plugins().get(name, ())
    if not points:
        remedy = f"{choice_remedy(name, names())}, or install the package that provides it"
        raise UnknownCommandError("command", "there is no such command", got=name, remedy=remedy)
    point, *duplicates = points
    if duplicates:
        packages = " and ".join(sorted(package_of(provider) for provider in points))
        raise UnknownCommandError(
            "command", f"is provided by {packages}", got=name, remedy="remove one of these packages"
        )
    return _loaded(point)


def names() -> list[str]:
    """The names of all commands that make runs, rlft's own first."""
    return [*OWN, *sorted(plugins())]


def working() -> list[Command]:
    """All commands that make runs, except those whose package cannot be loaded."""
    loaded = []
    for name in names():
        with suppress(UnknownCommandError):
            loaded.append(named(name))
    return loaded


@cache
def plugins() -> Mapping[str, list[EntryPoint]]:
    """{command: its entry points} of the commands that installed packages provide; they cannot replace rlft's own."""
    by_name: dict[str, list[EntryPoint]] = {}
    for point in dict.fromkeys(entry_points(group=GROUP)):
        if point.name not in OWN:
            by_name.setdefault(point.name, []).append(point)
    return by_name


def package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _loaded(point: EntryPoint) -> Command:
    package, command, cause = f"its package {package_of(point)}", None, None
    try:
        command = point.load()
    except Exception as error:  # the package's own code runs at its import, and may raise anything
        cause, problem = error, f"{package} cannot be imported ({type(error).__name__}: {error})"
    else:
        problem = f"{point.value} of {package} is no rlft.config.command.Command of that name"
    if isinstance(command, Command) and command.name == point.name:
        if command.configs is not None and (command.configs / f"{command.name}.yaml").is_file():
            return command
        problem = f"{package} has no {command.name}.yaml in the folder that it names"
    remedy = "repair that package, or remove it"
    raise UnknownCommandError("command", problem, got=point.name, remedy=remedy) from cause
