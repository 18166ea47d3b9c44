"""`rlft recipes`: lists the recipes in groups. A recipe's YAML says which: `# Group: <name>`."""

from __future__ import annotations

import re
import textwrap
from itertools import pairwise
from pathlib import Path

from rlft.commands.tables import matching, wrapped
from rlft.config import catalog, command as commands
from rlft.config.overrides import CONFIG_DIR, parse

GROUP = re.compile(r"^# Group: (.+)$", re.MULTILINE)
ALGORITHMS, YOURS = "Algorithms", "Yours"  # the group that is listed by names only, and that of files without a group
GROUPS = ("Start here", ALGORITHMS, "Other tasks", "GSM8K on one GPU", "A model of 135M parameters", "RLHF", "R1",
          "Distillation", YOURS)  # fmt: skip
COLUMNS = 80


def command(arguments: list[str]) -> None:
    words = pairwise(["", *arguments])
    patterns = [word for before, word in words if before not in CONFIG_DIR and not word.startswith("-")]
    parsed = parse([word for word in arguments if word not in patterns])
    files = {name: file for command in commands.working() for name, file in catalog.recipes(command.name).items()}
    if parsed.config_dir is not None:
        files |= {file.stem: file for file in sorted((parsed.config_dir / "recipe").glob("*.yaml"))}
    groups = {name: group_of(file) for name, file in files.items()}
    texts = {name: f"{groups[name]}\n{catalog.first_comment(file)}" for name, file in files.items()}
    found = matching(patterns, texts, "recipes", "no recipe has that in its name or text")
    if patterns:
        print("\n".join(line for name in found for line in _whole(name, files[name])))
        return
    print("rlft <command> +recipe=<name> uses one, rlft recipes <name> explains it")
    for group in sorted(set(groups.values()), key=lambda group: (*GROUPS, group).index(group)):
        names = [name for name in files if groups[name] == group]
        if group == ALGORITHMS:
            text = f"{ALGORITHMS}, each on the demo's task (rlft train): {', '.join(names)}"
            print(textwrap.fill(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False))
            continue
        print(group)
        for name in names:
            line = f"  {_command_of(files[name]):<6} {name:<25} {catalog.first_comment(files[name])}"
            print(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 2].rpartition(' ')[0]} ..")


def group_of(recipe: Path) -> str:
    match = GROUP.search(catalog.text_of(recipe))
    return match[1] if match else YOURS


def _command_of(file: Path) -> str:
    return catalog.command_of(str(file)) or "train"


def _whole(name: str, file: Path) -> list[str]:
    return [
        f"rlft {_command_of(file)} +recipe={name}",
        *wrapped(f"{catalog.first_comment(file)} [{group_of(file)}]", "    ", "    "),
    ]
