"""The command line of `rlft plan`; a config that is wrong by itself is refused before torch is imported."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from rlft.commands.arguments import only_overrides
from rlft.commands.launch import import_libraries, settled
from rlft.config import catalog
from rlft.config import command as commands
from rlft.config.compose import compose_run
from rlft.config.resolved import resolve
from rlft.logger.forecast import read_price
from rlft.types import UserError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

USAGE = """\
usage: rlft plan [<command>] [+recipe=<name>] [<key>=<value>] ... [device_memory=24GiB] [card=H100] [price=2.5/h]
                 [--json]

Everything that is known of a run before a weight is loaded: its sizes, the memory it takes by part, whether it fits,
which key to change where it does not, how long it may take, how long the data are, what every reward says of right and
wrong answers, and in two lines what rlft reward try finds where all rewards are rules of rlft's own.
Whatever the run itself would refuse is refused here.

  <command>       of the run: by default the recipe's, else train
  device_memory   of the device that the run is planned for; by default that of this machine
  card            the GPU that it would run on, to say how long it may take: H200, H100, A100, 4090 or L4
  price           of an hour of the machine, in any currency, as 2.5/h or 2.5EUR/h: what the run may cost
  --json          the same as one JSON object of at most 64 KiB, for scripts

An environment is tried with a policy that calls its first tool once. The exit code is 0 where it fits, its rewards can
be computed and its environment begins, and 1 otherwise.

  rlft plan +recipe=grpo_arithmetic
  rlft plan sft demonstrations.path=mine.jsonl model.path=<folder>
  rlft plan +recipe=grpo_gsm8k model.path=<folder> device_memory=24GiB"""


def command(arguments: list[str]) -> int:
    """Prints the plan of this config's run; returns 0 if the run fits and its rewards can be computed, else 1."""
    words = [word for word in arguments if word != "--json"]
    if words and words[0].isidentifier() and words[0] not in commands.names():
        remedy = f"name one of {', '.join(commands.names())}, or none for rlft train"
        raise UserError("plan", "there is no plan of this command", got=words[0], remedy=remedy)
    command = words.pop(0) if words and words[0] in commands.names() else command_of(words)
    parsed = only_overrides(words, command, ("device_memory", "card", "price"))
    overrides = [o for o in parsed.overrides if not o.startswith(("device_memory=", "card=", "price="))]
    price, card = read_price(parsed.value("price")), parsed.value("card")
    if card is not None:
        from rlft.plan.roofline import read_card  # it imports torch

        card = read_card(card)
    with contextlib.redirect_stdout(sys.stderr):  # rewards and environments may print while they are built
        run = compose_run(overrides, parsed.config_dir, command)
        plain, device_memory = settled(run.plain), parsed.value("device_memory")
        memory = None if device_memory is None else read_bytes(device_memory)
        resolved = resolve(plain, command)
        import_libraries()
        from rlft.commands import plan
        from rlft.plan.sizes import note_of_disk

        planned = replace(plan.plan_of(resolved, memory, card), price=price)
    if disk_note := note_of_disk(planned.disk, run.folder):
        planned = replace(planned, notes=[*planned.notes, disk_note])
    if "--json" in arguments:
        print(json.dumps(plan.as_dict(planned), indent=1))
    else:
        plan.print_plan(planned)
    failed = any(trial.score is None for trial in planned.rewards.trials)
    failed |= planned.conversation is not None and planned.conversation.error is not None
    return 0 if planned.fits and not failed else 1


def command_of(words: Sequence[str]) -> str:
    """The command of the named recipe, or `train`."""
    recipe = next((word.partition("=")[2] for word in words if word.startswith("+recipe=")), None)
    return catalog.command_of(recipe) if recipe in catalog.choices("recipe") else "train"


def read_bytes(text: str) -> int:
    """The number of bytes in `24GiB`, `512 MB` or a bare number of bytes.

    >>> read_bytes("24GiB"), read_bytes("0.5 GB"), read_bytes("8000000000")
    (25769803776, 500000000, 8000000000)

    Raises:
        UserError: the text is not a size, or is one below 1 MiB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    unit = UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise UserError("device_memory", "must be a size", got=text, remedy="write it as 24GiB")
    if float(match[1]) * unit < UNITS["MIB"]:
        problem = "no device has so little memory" if match[2] else "has no unit, and no device has so few bytes"
        raise UserError("device_memory", problem, got=text, remedy=f"write {match[1]}GiB")
    return int(float(match[1]) * unit)
