"""`rlft recipes`: prints each recipe's name with the first comment line of its YAML."""

from __future__ import annotations

from rlft.config import catalog
from rlft.config import command as commands
from rlft.types import UserError

USAGE = """\
usage: rlft recipes

Every recipe with the command that it is for, and what it is.

  rlft recipes"""


def command(arguments: list[str]) -> None:
    if arguments:
        raise UserError("recipes", "takes no further words", got=arguments[0], remedy="write rlft recipes")
    recipes = [
        (command, name, file) for command in commands.working() for name, file in catalog.recipes(command.name).items()
    ]
    width = max(len(name) for _, name, _ in recipes)
    for command, name, file in recipes:
        print(f"rlft {command.name:<6} +recipe={name:<{width}}  {catalog.first_comment(file)}")
