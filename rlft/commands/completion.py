"""`rlft completion bash|zsh|fish`: prints the script that a shell sources, and makes the list that the script reads.

The list has commands, their keys with choices, recipes, and the files it is made of. What a command takes is what its
usage line names: `<key>=<value>`, `+recipe=<name>`, `<run>`, `at=common|last`. Values that it leaves out are in
`CHOICES`. A choice in angle brackets is a kind of path (`tab.offered`)."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlft
from rlft.commands import tab
from rlft.commands.lists import OF_SERVE, OF_SWEEPS, all_keys
from rlft.commands.watch import runs
from rlft.config import catalog, command as commands
from rlft.config.choices import choice_remedy
from rlft.config.keys import is_path_key
from rlft.config.model import DTYPES
from rlft.config.overrides import OPTIONS
from rlft.config.resolved import AUTO
from rlft.config.suggest import ASSETS
from rlft.plan.cards import CARDS
from rlft.types import require

ROOT = Path(rlft.__file__).parent
WORD = re.compile(r"[\s\[]((?:<[^>]+>|[^\s\[\]<>])+)")  # of a usage line, without its brackets
CHOICES = {"runs": runs.CHOICES, "export": {"dtype": (AUTO, *DTYPES)}, "plan": {"card": CARDS}}
"""{command: {key: its values}} where its usage line only says what they are."""
PATHS = {"<run>": r"<.*\b(run|checkpoint|sweep)\b", "<path>": r"<.*\b(file|folder|model)\b"}
"""{kind of path: what in a usage line means it}."""


def listed() -> dict[str, Any]:
    """The list as JSON: `commands`, `keys` of commands that make runs, `recipes`, `watched` files with their times."""
    recipes = {name: command.name for command in commands.working() for name in catalog.recipes(command.name)}
    keys = {command.name: _keys_of(command.name) for command in commands.working()}
    takes = {}
    for name in keys:
        meant = {"+recipe": [*catalog.recipes(name), "<yaml>"]}
        takes[name] = _taken(f"[+recipe=<name>] [<key>=<value>] [{'] ['.join(OPTIONS)}]", meant)
    for file in sorted((ASSETS / "usage").iterdir()):
        _, _, line = file.read_text(encoding="utf-8").partition("\n\n")[0].partition("\nusage:")
        meant = {"+recipe": [*recipes, "<yaml>"], "<command>": [*keys], "command": [*keys]}
        takes[file.stem] = _taken(line.replace(f"rlft {file.stem}", ""), meant | CHOICES.get(file.stem, {}))
    takes["recipes"]["words"], takes["keys"]["words"] = [*recipes], sorted({row.key for row in all_keys()})
    takes["algorithms"]["words"] = catalog.choices("algorithm")
    folders = dict.fromkeys(folder for name in keys for folder in catalog.folders(name))
    watched = [ROOT / "__init__.py"]  # the version
    watched += [path for path in map(Path, sys.path) if any(path.glob("*.dist-info"))]  # a package may bring a command
    watched += [Path(at, name) for folder in folders for at, _, files in os.walk(folder, followlinks=True)
                for name in ("", *files)]  # fmt: skip
    times = {str(path): path.stat().st_mtime_ns for path in watched}
    return {"commands": takes, "keys": keys, "recipes": recipes, "watched": times}


def _taken(line: str, choices: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What a command with this usage line takes; `choices` are those of keys and words whose values it leaves out."""
    own: dict[str, list[str]] = {}
    words: dict[str, None] = {}
    prefix = None
    for word in WORD.findall(f" {line}"):
        key, equals, value = word.partition("=")
        if key.endswith("<key>"):
            prefix = key.removesuffix("<key>")
        elif equals:
            own[key] = [*choices.get(key, ["<path>"] if is_path_key(key) else _named(value))]
        elif not word.startswith("-"):
            words |= dict.fromkeys(choices.get(word, _named(word)))
    if "serve.port" in own:
        own |= {row.key: row.choices for row in all_keys() if OF_SERVE in row.owners}
    words |= {"<yaml>": None} if "+recipe" in own else {}
    options = {"--help", *re.findall(r"(?<=\[)-[\w-]+", line)}
    return {"own": own, "words": [*words], "prefix": prefix, "options": sorted(options)}


def _named(text: str) -> list[str]:
    """The words that a part of a usage line names: `common|last`; or the kind of path that it means: `<run>`."""
    if text.startswith("<"):
        return [kind for kind, means in PATHS.items() if re.match(means, text)][:1]
    return text.split("|") if re.fullmatch(r"[a-z]+(\|[a-z]+)*", text) else []


def _keys_of(command: str) -> dict[str, list[str]]:
    """{key: its choices; [] where it has no list} of a command that makes runs."""
    groups = {*catalog.groups(command)} - {"recipe"}
    owners = {command, OF_SWEEPS, *(f"{group}={name}" for group in groups for name in catalog.choices(group, command))}
    keys: dict[str, list[str]] = {}
    for row in all_keys():
        if not owners.isdisjoint(row.owners):
            known = keys.setdefault(row.key, ["<path>"] if is_path_key(row.key) else [])
            keys[row.key] = [*dict.fromkeys([*known, *row.choices])]
    return keys


if __name__ == "__main__":
    json.dump(listed(), sys.stdout)


SHELLS = ("bash", "zsh", "fish")


def command(arguments: list[str]) -> None:
    shell = " ".join(arguments)
    remedy = choice_remedy(shell, SHELLS)
    require(shell in SHELLS, "completion", "takes the name of your shell", got=shell or "nothing", remedy=remedy)
    tab.cached()  # so that the first TAB need not wait
    script = (ASSETS / "completion" / f"rlft.{shell}").read_text(encoding="utf-8")
    print(script.replace("PYTHON TAB", shlex.join([sys.executable, "-I", "-S", tab.__file__])), end="")
