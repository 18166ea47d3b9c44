"""What configs/ holds: groups, their choices, and every key with its default and the comment that explains it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import rlft

_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][A-Za-z_0-9]*):(?: +(?P<rest>.*))?")
_VALUE = re.compile(r"""(?P<value>(?:'[^']*'|"[^"]*"|[^'"#]|(?<=\S)#)*?)(?: *(?<!\S)# ?(?P<comment>.*))?""")
_BASES = re.compile(r"^defaults: \[(.*)\]", re.MULTILINE)
_CHOSEN = re.compile(r"^  - (\w+): (\S+)", re.MULTILINE)
_ROOT_BASES = re.compile(r"^  - base/(\w+)$", re.MULTILINE)
_VERB = re.compile(r"^verb: (\w+)", re.MULTILINE)
_NOT_KEYS = ("defaults", "hydra", "_target_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of a YAML file: its default as it is written there ("" for a section), and its comment ("" for none)."""

    default: str
    comment: str


def config_folder() -> Path:
    """Where the YAML lives: inside the installed package, or at the top of a checkout."""
    installed = Path(rlft.__file__).parent / "configs"
    return installed if installed.is_dir() else Path(rlft.__file__).parents[1] / "configs"


def recipe_folder() -> Path:
    return config_folder() / "recipe"


def groups(verb: str | None = None) -> list[str]:
    """Names of the config groups, `recipe` among them; of a verb: those that its defaults list has."""
    found = sorted(f.name for f in config_folder().iterdir() if f.is_dir() and f.name not in ("hydra", "base"))
    return found if verb is None else [group for group in found if group == "recipe" or group in _chosen(verb)]


def choices(group: str, verb: str | None = None) -> list[str]:
    """Names of the YAML files of a config group; of recipes, where a verb is given, those for it."""
    found = sorted(f.stem for f in (config_folder() / group).glob("*.yaml"))
    return [name for name in found if verb_of(name) == verb] if group == "recipe" and verb else found


def may_be_absent(group: str, verb: str) -> bool:
    """Whether the verb's own defaults list chooses nothing of the group."""
    return _chosen(verb).get(group) == "null"


def _chosen(verb: str) -> dict[str, str]:
    """{group: its choice as it is written} of a verb's defaults list."""
    return dict(_CHOSEN.findall((config_folder() / f"{verb}.yaml").read_text()))


def verb_of(recipe: str) -> str:
    """The verb that a recipe of ours is for."""
    match = _VERB.search((recipe_folder() / f"{recipe}.yaml").read_text())
    return match[1] if match else "train"


def root_files(verb: str) -> list[Path]:
    """The YAML files of a verb's own keys: those it builds on, then its own."""
    file = config_folder() / f"{verb}.yaml"
    return [*(config_folder() / "base" / f"{name}.yaml" for name in _ROOT_BASES.findall(file.read_text())), file]


def root_entries(verb: str) -> dict[str, Entry]:
    """The keys of a verb outside its groups; a default that it changes is told as it is there, meant as it was."""
    found: dict[str, Entry] = {}
    for file in root_files(verb):
        for key, entry in entries(file).items():
            told = entry.comment or (found[key].comment if key in found else "")
            found[key] = Entry(default=entry.default, comment=told)
    return found


def sections() -> set[str]:
    """Names of the sections outside the groups, of whatever verb, and "" for the root."""
    files = (config_folder() / "base", config_folder())
    found = (entries(file) for folder in files for file in folder.glob("*.yaml"))
    return {"", *(key for keys_of_file in found for key, entry in keys_of_file.items() if not entry.default)}


def first_comment(file: Path) -> str:
    """The first comment line of a YAML file, its package line apart: what the file is."""
    comments = (line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#"))
    return next((line for line in comments if not line.startswith("@")), "")


@cache
def entries(file: Path) -> dict[str, Entry]:
    """The keys of a YAML file by dotted name, in order. A comment stands beside its key, below it, or above it."""
    found: dict[str, Entry] = {}
    path: list[tuple[int, str]] = []
    above, key = "", ""
    for line in file.read_text().splitlines():
        bare, match = line.strip(), _LINE.fullmatch(line)
        if bare.startswith("#"):
            if key and found[key].comment and len(line) - len(bare) > path[-1][0]:  # it goes on below the key's line
                found[key] = Entry(default=found[key].default, comment=f"{found[key].comment} {bare.lstrip('# ')}")
            else:
                above = f"{above} {bare.lstrip('# ')}".strip()
        elif match is None:
            above, key = "", key if bare else ""
        else:
            value = _VALUE.fullmatch(match["rest"] or "")
            path = [step for step in path if step[0] < len(match["indent"])] + [(len(match["indent"]), match["key"])]
            if path[0][1] in _NOT_KEYS:
                above = key = ""
                continue
            key = ".".join(name for _, name in path)
            default, comment = (value["value"].strip(), value["comment"] or "") if value else ("", "")
            found[key] = Entry(default=default, comment=comment or above)
            above = ""
    return found


def bases(file: Path) -> list[Path]:
    """The files under `base/` that a YAML file builds on, by `defaults: [base/x@_here_, _self_]`: what choices share.

    They are no choices themselves. A base may build on others beside it.
    """
    match = _BASES.search(file.read_text())
    names = [name.strip().partition("@")[0] for name in match[1].split(",")] if match else []
    found = [file.parent / f"{name}.yaml" for name in names]
    direct = [base for base in found if base.parent.name == "base" and base.is_file()]
    return [*direct, *(inner for base in direct for inner in bases(base))]


def keys(group: str) -> dict[str, list[str]]:
    """Every key that a choice of the group has, as `group.key`, with the choices whose file or base has it."""
    found: dict[str, list[str]] = {}
    for choice in choices(group):
        file = config_folder() / group / f"{choice}.yaml"
        for key in dict.fromkeys(key for source in (file, *bases(file)) for key in entries(source)):
            found.setdefault(f"{group}.{key}", []).append(choice)
    return found


def meaning(key: str, verb: str = "train") -> Entry | None:
    """Default and comment of a verb's key; None where nothing is written, or unlike things in a group's files."""
    group, _, rest = key.partition(".")
    if group not in groups():
        return root_entries(verb).get(key)
    files = [config_folder() / group / f"{choice}.yaml" for choice in choices(group)]
    # A variant (`defaults: [grpo]`) only says how it differs from the file that explains its keys, and so does a choice
    # of the keys of its base.
    shared = list(dict.fromkeys(base for file in files for base in bases(file)))
    own = [file for file in files if bases(file) or "defaults:" not in file.read_text()]
    for explaining in (shared, own):
        told = [entries(file)[rest] for file in explaining if rest in entries(file)]
        if told:
            return told[0] if len({entry.comment for entry in told}) == 1 else None
    return None
