"""The contents of configs/: groups, their choices, and every key with its default and its comment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import rlft
from rlft.config import command as commands
from rlft.types import UserError

_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][A-Za-z_0-9]*):(?: +(?P<rest>.*))?")
_VALUE = re.compile(r"""(?P<value>(?:'[^']*'|"[^"]*"|[^'"#]|(?<=\S)#)*?)(?: *(?<!\S)# ?(?P<comment>.*))?""")
_BASES = re.compile(r"^defaults: \[(.*)\]", re.MULTILINE)
_CHOSEN = re.compile(r"^  - (\w+): (\[.*?\]|\S+)", re.MULTILINE)
_ROOT_BASES = re.compile(r"^  - base/(\w+)$", re.MULTILINE)
_COMMAND = re.compile(r"^command: *['\"]?(\w+)", re.MULTILINE)
_TARGET = re.compile(r"^_target_:", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{([a-z_.]+)\}")
_PAPER = re.compile(r"^# Paper: (.+)$", re.MULTILINE)
_NOT_KEYS = ("defaults", "hydra", "_target_")  # top-level words of YAML files that are not keys of a config


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of a YAML file: its default as written ("" for a section), and its comment ("" without one)."""

    default: str
    comment: str


def config_folder() -> Path:
    """The folder of the YAML files: inside the installed package, or at the top of a checkout."""
    installed = Path(rlft.__file__).parent / "configs"
    return installed if installed.is_dir() else Path(rlft.__file__).parents[1] / "configs"


def folders(command: str | None = None) -> list[Path]:
    """The folders of a command's YAML files: rlft's, and that of an installed package that provides the command."""
    packages_folder = None if command is None or command in commands.OWN else commands.named(command).configs
    return [config_folder(), *([] if packages_folder is None else [packages_folder])]


def groups(command: str | None = None) -> list[str]:
    """The names of all config groups, `recipe` included, or of those in a command's defaults list."""
    names = {f.name for folder in folders(command) for f in folder.iterdir() if f.is_dir()} - {"hydra", "base"}
    return sorted(names) if command is None else sorted(names & {"recipe", *chosen(command)})


def files(group: str, command: str | None = None) -> dict[str, Path]:
    """{choice: its YAML file} of a config group."""
    yaml_files = (file for folder in reversed(folders(command)) for file in (folder / group).glob("*.yaml"))
    return {file.stem: file for file in sorted(yaml_files, key=lambda file: file.stem)}


def choices(group: str, command: str | None = None) -> list[str]:
    """The names of a config group's YAML files; for recipes, only those of the command if one is given."""
    return list(recipes(command) if group == "recipe" and command else files(group, command))


def recipes(command: str) -> dict[str, Path]:
    """{recipe: its YAML file} of the recipes for this command."""
    return {name: file for name, file in files("recipe", command).items() if _command_in(file) == command}


def may_be_absent(group: str, command: str) -> bool:
    """Whether the command's defaults list chooses null for the group."""
    return chosen(command).get(group) == "null"


def chosen(command: str) -> dict[str, str]:
    """{group: its choice as on a command line} of a command's defaults list."""
    found = _CHOSEN.findall(root_files(command)[-1].read_text())
    return {group: choice.replace(" ", "") for group, choice in found}


def command_of(recipe: str) -> str | None:
    """The command of a recipe: the name of one of rlft's, or the path of a YAML file; None if there is none.

    A file of the user's own is for every command unless it names one.
    """
    if Path(recipe).suffix in (".yaml", ".yml"):
        file = Path(recipe).expanduser()
        match = _COMMAND.search(text_of(file)) if file.is_file() else None
        return match[1] if match else None
    file = files("recipe").get(recipe)
    return None if file is None else _command_in(file)


def _command_in(recipe: Path) -> str:
    match = _COMMAND.search(recipe.read_text())
    return match[1] if match else "train"


def root_files(command: str) -> list[Path]:
    """The YAML files of a command's keys: its bases, then its own."""
    file = folders(command)[-1] / f"{command}.yaml"
    return [*(config_folder() / "base" / f"{name}.yaml" for name in _ROOT_BASES.findall(file.read_text())), file]


def root_entries(command: str) -> dict[str, Entry]:
    """The keys of a command outside its groups. A key whose default it changes keeps the comment of the base."""
    result: dict[str, Entry] = {}
    for file in root_files(command):
        for key, entry in entries(file).items():
            comment = entry.comment or (result[key].comment if key in result else "")
            result[key] = Entry(default=entry.default, comment=comment)
    return result


def sections() -> set[str]:
    """The names of the sections outside the groups, of all commands, and "" for the root."""
    command_folders = (config_folder() / "base", config_folder())
    entries_of_files = (entries(file) for folder in command_folders for file in folder.glob("*.yaml"))
    return {"", *(key for keys_of_file in entries_of_files for key, entry in keys_of_file.items() if not entry.default)}


def text_of(file: Path) -> str:
    """The text of a YAML file, which may be the user's. Raises UserError: it cannot be read, or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise not_yaml(str(file), error) from None


def first_comment(file: Path) -> str:
    """The first comment line of a YAML file, except its package line: it says what the file is."""
    comments = (line.lstrip("# ") for line in text_of(file).splitlines() if line.startswith("#"))
    return next((line for line in comments if not line.startswith("@")), "")


@cache
def entries(file: Path) -> dict[str, Entry]:
    """{dotted key: entry} of a YAML file, in order. Its comment is on its line, below it, above it, or all of these.

    Comments above the first key are the file's; they are also that key's where it has no other.
    """
    result: dict[str, Entry] = {}
    path: list[tuple[int, str]] = []
    above, key = "", ""
    for line in file.read_text().splitlines():
        stripped, match = line.strip(), _LINE.fullmatch(line)
        if stripped.startswith("#"):
            text = stripped.lstrip("# ")
            if key and result[key].comment and len(line) - len(stripped) > path[-1][0]:  # it continues below the key
                result[key] = Entry(default=result[key].default, comment=f"{result[key].comment} {text}")
            else:
                above = f"{above} {text}".strip()
        elif match is None:
            above, key = "", key if stripped else ""
        else:
            value = _VALUE.fullmatch(match["rest"] or "")
            path = [level for level in path if level[0] < len(match["indent"])] + [(len(match["indent"]), match["key"])]
            if path[0][1] in _NOT_KEYS:
                above = key = ""
                continue
            key = ".".join(name for _, name in path)
            default, comment = (value["value"].strip(), value["comment"] or "") if value else ("", "")
            both = f"{comment}; {above}" if comment and above and result else comment or above
            above, result[key] = "", Entry(default=default, comment=both)
    return result


def bases(file: Path) -> list[Path]:
    """The files under `base/` that a YAML file builds on by `defaults: [base/x@_here_, _self_]`.

    Choices share them; they are not choices themselves. A base may build on others in its folder.
    """
    match = _BASES.search(file.read_text())
    names = [name.strip().partition("@")[0] for name in match[1].split(",")] if match else []
    files = [file.parent / f"{name}.yaml" for name in names]
    direct = [base for base in files if base.parent.name == "base" and base.is_file()]
    return [*direct, *(base_of_base for base in direct for base_of_base in bases(base))]


def lineage(file: Path, group: str) -> list[Path]:
    """The files that a choice builds on by its defaults list, each before the files that override it; its own last.

    The choice's file may be the user's; its defaults list may name rlft's. Raises UserError: one is not YAML.
    """
    result: list[Path] = []
    _add_lineage(file, config_folder() / group, result, ())
    return result


def _add_lineage(file: Path, rlfts_group: Path, result: list[Path], ancestors: tuple[Path, ...]) -> None:
    from yaml import YAMLError, safe_load

    try:
        content = safe_load(text_of(file))
    except (ValueError, YAMLError) as error:
        raise not_yaml(str(file), error) from None
    defaults = content.get("defaults") if isinstance(content, dict) else None
    for name in defaults if isinstance(defaults, list) else ():
        path = f"{str(name).partition('@')[0].removeprefix(f'/{rlfts_group.name}/')}.yaml"
        base = next((folder / path for folder in (file.parent, rlfts_group) if (folder / path).is_file()), None)
        if base is not None and base not in (*result, *ancestors, file):
            _add_lineage(base, rlfts_group, result, (*ancestors, file))
    result.append(file)


def not_yaml(path: str, error: Exception) -> UserError:
    """The refusal of a file whose reading as YAML has raised this error."""
    if problem := getattr(error, "problem", None):
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1} " if mark else ""
        return UserError(path, f"{line}is not YAML ({problem})", remedy="fix that line")
    if isinstance(error, OSError):
        return UserError(path, f"cannot be read ({error.strerror or error})", remedy="name a file that you may read")
    cause = getattr(error, "reason", None) or type(error).__name__
    remedy = "save it as UTF-8, without control characters"
    return UserError(path, f"cannot be read as UTF-8 text in YAML ({cause})", remedy=remedy)


def family(files_of_choice: list[Path]) -> str:
    """The name of the last file of a choice's lineage that names a class; "" where none does."""
    families = [file.stem for file in files_of_choice if _TARGET.search(file.read_text(encoding="utf-8"))]
    return families[-1] if families else ""


def paper(files_of_choice: list[Path]) -> str:
    """The text of the last `# Paper:` line in the files of a choice's lineage; "" where there is none."""
    papers = [match[1] for file in files_of_choice if (match := _PAPER.search(file.read_text(encoding="utf-8")))]
    return papers[-1] if papers else ""


def keys(group: str, command: str | None = None) -> dict[str, list[str]]:
    """{group.key: the choices whose file or base has it} of every key in the group."""
    result: dict[str, list[str]] = {}
    for choice, file in files(group, command).items():
        for key in dict.fromkeys(key for source in (file, *bases(file)) for key in entries(source)):
            result.setdefault(f"{group}.{key}", []).append(choice)
    return result


@cache
def referred_to(group: str) -> list[str]:
    """The keys that the YAML of this group's choices refers to, as in `${scoring.timeout}`."""
    return sorted({key for file in files(group).values() for key in _REFERENCE.findall(file.read_text())})


def meaning(key: str, command: str = "train") -> Entry | None:
    """The default and comment of a command's key; None if there is no comment, or if a group's files differ."""
    group, _, subkey = key.partition(".")
    if group not in groups():
        return root_entries(command).get(key)
    all_files = files(group).values()
    # Bases explain the keys that choices share, and each choice its other keys. A variant (`defaults: [grpo]`) explains
    # none: it holds only keys whose defaults differ from those of the file that it builds on.
    shared = list(dict.fromkeys(base for file in all_files for base in bases(file)))
    not_variants = [file for file in all_files if bases(file) or "defaults:" not in file.read_text()]
    for group_files in (shared, not_variants):
        candidates = [entries(file)[subkey] for file in group_files if subkey in entries(file)]
        if candidates:
            return candidates[0] if len({entry.comment for entry in candidates}) == 1 else None
    return None
