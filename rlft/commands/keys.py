"""`rlft keys`: what each key means, its unit, default and choices, and where it is set; read from the YAML files."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from rlft.commands.tables import matching, wrapped
from rlft.config import catalog, command as commands, suggest
from rlft.config.instantiate import locate
from rlft.config.keys import fields_of, options
from rlft.config.schema import GenerationConfig, engine_classes
from rlft.types import require

INDENT = "    "
OF_SERVE, OF_SWEEPS = "rlft serve", "sweeps (-m)"
OF_OTHERS = {
    "serve": (OF_SERVE, "rlft.commands.serve.ServeConfig"),
    "sweep": (OF_SWEEPS, "rlft.commands.sweep.space.StudyConfig"),
}
"""{file of base/: (what has its keys, the class of its section)} of files that no command's defaults list names."""
TARGET = re.compile(r"^ *_target_: *(\S+)", re.MULTILINE)
BOOLEAN = ("true", "false")


@dataclass(slots=True)
class Listed:
    """A key as one file sets it, with all that have it: commands, or choices of its group."""

    key: str
    default: str
    meaning: str
    file: str
    choices: list[str] = field(default_factory=list)  # the values that it may have, where there is such a list
    owners: list[str] = field(default_factory=list)


def command(arguments: list[str]) -> None:
    wrong = next((word for word in arguments if word.startswith("-")), None)
    require(wrong is None, "keys", "has no such option", got=wrong, remedy="write rlft keys <pattern>")
    texts: dict[str, str] = {}
    for row in all_keys():
        texts[row.key] = f"{texts.get(row.key, '')}\n{row.meaning}"

    def meant(wanted: str) -> str:
        return suggest.remedy(suggest.suggestions(wanted, "train"))

    found = matching(arguments, texts, "keys", "no key has that in its name or meaning", meant)
    for listed in (row for row in all_keys() if row.key in found):
        default = f" = {listed.default}" if listed.default else ""
        print("\n".join(wrapped(f"{listed.key}{default}", "", INDENT)))
        print("\n".join(wrapped(listed.meaning, INDENT, INDENT)))
        print("\n".join(wrapped(f"[{listed.file}: {', '.join(listed.owners)}]", INDENT, INDENT)))


@cache
def all_keys() -> list[Listed]:
    """Every key of every command and of every choice of a group, those that are set alike once."""
    rows: dict[tuple[str, ...], Listed] = {}
    for owner, row in [*_outside_groups(), *_of_groups()]:
        same = rows.setdefault((row.key, row.default, row.meaning, row.file), row)
        same.owners += [owner] * (owner not in same.owners)
    return sorted(rows.values(), key=lambda row: row.key)


def _outside_groups() -> Iterator[tuple[str, Listed]]:
    for command in commands.working():
        files = catalog.root_files(command.name)
        for key, entry in catalog.root_entries(command.name).items():
            file = [file for file in files if key in catalog.entries(file)][-1]
            if _is_key(key, entry, catalog.root_entries(command.name)):
                yield command.name, _listed(key, entry, file, _choices(command.root, key))
        for group in (group for group in catalog.groups(command.name) if group != "recipe"):
            chosen, names = catalog.chosen(command.name).get(group, ""), catalog.choices(group, command.name)
            meaning = f"a group; its choices: {', '.join(names)}"
            yield command.name, Listed(group, chosen, meaning, _shown(files[-1]), names)
    for name, (owner, section) in OF_OTHERS.items():
        file = catalog.config_folder() / "base" / f"{name}.yaml"
        for key, entry in catalog.entries(file).items():
            if _is_key(key, entry, catalog.entries(file)):
                yield owner, _listed(key, entry, file, _choices(locate(section, name), key.removeprefix(f"{name}.")))


def _of_groups() -> Iterator[tuple[str, Listed]]:
    """Keys of the choices. A choice that changes only a default keeps the meaning of the file that it builds on."""
    for command in commands.working():
        for group in {*catalog.groups(command.name)} - {"recipe"}:
            for choice, own in catalog.files(group, command.name).items():
                files = catalog.lineage(own, group)
                set_by = {key: (entry, file) for file in files for key, entry in catalog.entries(file).items()}
                meanings = {key: entry.comment for file in files
                            for key, entry in reversed(catalog.entries(file).items()) if entry.comment}  # fmt: skip
                targets = [target for file in files for target in TARGET.findall(file.read_text())]
                target = locate(targets[-1], group) if targets else None
                for key, (entry, file) in set_by.items():
                    if _is_key(key, entry, set_by):
                        about = catalog.Entry(default=entry.default, comment=entry.comment or meanings.get(key, ""))
                        choices = _choices(target, key.rpartition(".")[2]) or _choices(command.root, f"{group}.{key}")
                        yield f"{group}={choice}", _listed(f"{group}.{key}", about, file, choices)


def _is_key(key: str, entry: catalog.Entry, all_keys: Iterable[str]) -> bool:
    """Whether it has a value, and is not a section above other keys, nor the class of a choice."""
    is_section = not entry.default and any(other.startswith(f"{key}.") for other in all_keys)
    return not is_section and not key.endswith("_target_")


def _listed(key: str, entry: catalog.Entry, file: Path, choices: list[str]) -> Listed:
    """The key of a file; its meaning ends with the choices that its comment leaves out."""
    unnamed = {choice for choice in choices if not re.search(rf"\b{re.escape(choice)}\b", entry.comment)}
    is_told = not unnamed or unnamed < {*BOOLEAN}  # what one of the two does says what the other does
    meaning = entry.comment if is_told else f"{entry.comment} ({' | '.join(choices)})".strip()
    return Listed(key, entry.default, meaning, _shown(file), choices)


def _shown(file: Path) -> str:
    """The path of a YAML file from the folder above its configs."""
    parent = next((folder.parent for folder in file.parents if folder.name == "configs"), file.parent)
    return str(file.relative_to(parent))


def _choices(target: Any, key: str) -> list[str]:
    """The values that a key of this class of a section, or of what a `_target_` names, may have; [] without a list."""
    *sections, name = key.split(".")
    for section in sections:
        of_engine = engine_classes({}).get(section) if target is GenerationConfig else None
        target = next((f.section for f in fields_of(target) if f.name == section), None) or of_engine
        if target is None:
            return []
    values, hints = [], {}
    with suppress(NameError, TypeError):  # a type that is imported for type checkers alone; no class or function
        is_section = is_dataclass(target)
        hints = typing.get_type_hints(target.__init__ if isinstance(target, type) and not is_section else target)
    for option in options(hints.get(name)):
        if typing.get_origin(option) is typing.Literal:
            values += map(str, typing.get_args(option))
        elif isinstance(option, type) and issubclass(option, Enum):
            values += [str(each.value) for each in option]
        elif option is bool:
            values += BOOLEAN
    return values
