"""The command line of `rlft plan`; a config that is wrong by itself is refused before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from rlft.commands.arguments import only_overrides
from rlft.commands.launch import import_libraries
from rlft.config import catalog
from rlft.config import command as verbs
from rlft.config.compose import compose_run
from rlft.plan.checks import check_early
from rlft.plan.device_memory import read_bytes
from rlft.runs import references

USAGE = """\
usage: rlft plan [<verb>] [+recipe=<name>] [<key>=<value>] ... [device_memory=24GiB] [--json]

Everything that is known of a run before a weight is loaded: its sizes, the memory it takes by part, whether it fits,
which key to change where it does not, how long the data are, and what every reward says of right and wrong answers.
Whatever the run itself would refuse is refused here.

  <verb>          of the run: by default the recipe's, else train
  device_memory   of the device that the run is planned for; by default that of this machine
  --json          the same as one JSON object of at most 64 KiB, for scripts

An environment is tried with a policy that calls its first tool once. The exit code is 0 where it fits, its rewards can
be computed and its environment begins, and 1 otherwise.

  rlft plan +recipe=grpo_arithmetic
  rlft plan sft demonstrations.path=mine.jsonl model.path=<folder>
  rlft plan +recipe=grpo_gsm8k model.path=<folder> device_memory=24GiB"""


def command(arguments: list[str]) -> int:
    """Prints the plan of this config's run; returns 0 if the run fits and its rewards can be computed, else 1."""
    words = [word for word in arguments if word != "--json"]
    verb = words.pop(0) if words and words[0] in verbs.names() else verb_of(words)
    parsed = only_overrides(words, verb)
    overrides = [o for o in parsed.overrides if not o.startswith("device_memory=")]
    run = compose_run(overrides, parsed.config_dir, verb)
    plain, device_memory = references.resolved(run.plain), parsed.value("device_memory")
    memory = None if device_memory is None else read_bytes(device_memory)
    check_early(plain, verb)
    import_libraries()
    from rlft.commands import plan
    from rlft.commands.plan_page import print_plan
    from rlft.plan import disk_space

    planned = plan.plan_of(plain, memory)
    if disk_note := disk_space.note(planned.disk, run.folder):
        planned = replace(planned, notes=[*planned.notes, disk_note])
    if "--json" in arguments:
        print(json.dumps(plan.as_dict(planned), indent=1))
    else:
        print_plan(planned)
    failed = planned.failed_rewards or (planned.conversation is not None and planned.conversation.error)
    return 0 if planned.fits and not failed else 1


def verb_of(words: Sequence[str]) -> str:
    """The verb of the named recipe, or `train`."""
    recipe = next((word.partition("=")[2] for word in words if word.startswith("+recipe=")), None)
    return catalog.verb_of(recipe) if recipe in catalog.choices("recipe") else "train"
