"""What a path on the command line names: a recipe in a YAML file of the user's own, or a reward in one of Python's.

`rlft train qa/run.yaml` stands for `+recipe=qa/run.yaml`, and `reward=[qa/reward.py:close]` names a function.

A recipe's file holds what rlft's recipes hold, and is written more freely: a choice in a group may stand as a key
(`data: jsonl`, `reward: [exact_match, format]`), and a key with its sections before it (`trainer.lr: 1e-3`). Its paths
are relative to its folder. Hydra gets each file under a name without characters that mean something to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rlft.config import catalog
from rlft.config.choices import closest
from rlft.config.instantiate import PYTHON, split_target
from rlft.config.keys import KEYWORDS, is_path_key, joined
from rlft.config.suggest import SEVERAL
from rlft.types import UserError, require

SUFFIXES = (".yaml", ".yml")
REWARD = re.compile(r".+\.py:(\w+)|(?!.*\.yaml$)(?:\w+\.)+(\w+)")
"""A reward that no YAML declares: a class or function in a file, or one that can be imported by its dotted name."""
SHEET_SUFFIXES = (".csv", ".tsv", ".tab")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", *SHEET_SUFFIXES, ".parquet", ".arrow", ".feather", ".xlsx")
"""Of the files with rows that the choice `jsonl` of data, demonstrations and preferences reads."""
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
FILES_OF_DATA = (*DATA_SUFFIXES, *PACKED_SUFFIXES)
GIVEN, BUILT_ON = "file:", "base:"
"""How Hydra's names begin of a file that was given, and of a file next to it that its defaults list names."""


def of_word(word: str) -> str | None:
    """The path in a word of the command line; None if the word is none, such as `data.path=rows.yaml`."""
    looks_like_one = "=" not in word and not re.match(r"[-+]|~[^/]", word)
    return word if word.endswith(SUFFIXES) and (looks_like_one or located(word).is_file()) else None


def located(path: str) -> Path:
    return Path(path).expanduser()


def lines_of(path: str) -> dict[str, int]:
    """{key with its sections: its line in the file}. UserError if the file is not there, or is not keys in YAML."""
    import yaml

    file = located(path)
    if not file.is_file():
        recipe = closest(file.stem, catalog.choices("recipe"))
        meant = meant_by(path) or (f"+recipe={recipe}" if recipe else "")
        remedy = f"did you mean {meant}?" if meant else "name a YAML file, or see rlft recipes for rlft's own"
        raise UserError(path, "is a folder" if file.is_dir() else "there is no such file", remedy=remedy)
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise catalog.not_yaml(path, error) from None
    problem = "is empty" if node is None else "must hold a section of keys"
    require(isinstance(node, yaml.MappingNode), path, problem, remedy="write it as lines of `key: value`")
    return dict(_lines(node, ""))


def _lines(section: Any, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in section.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        if isinstance(value, type(section)):
            yield from _lines(value, f"{name}.")


def meant_by(path: str) -> Path | None:
    """The YAML file that was probably meant by a path that is none: the one in a folder, or one of a like name."""
    file = located(path)
    folder = file if file.is_dir() else file.parent
    others = sorted(folder.glob("*.y*ml")) if path and folder.is_dir() else []
    by_name = {other.stem: other for other in others if other.suffix in SUFFIXES and other.is_file()}
    if file.is_dir() and len(by_name) == 1:
        return next(iter(by_name.values()))
    return by_name.get(closest(file.stem, by_name) or "")


def place_of(key: str, words: Sequence[str]) -> str:
    """ " (<file>, line <n>)" if the file among these words sets the key and no word does, else ""."""
    is_typed = any(word.lstrip("+~").partition("=")[0] == key for word in words)
    for path in filter(None, map(of_word, words)):
        with suppress(UserError):  # of the file itself
            if (line := lines_of(path).get(key)) and not is_typed:
                return f" ({path}, line {line})"
    return ""


def name_of(path: str) -> str:
    """The name of its runs: that of the file, or of its folder if it is called run.

    >>> name_of("qa/run.yaml"), name_of("qa/fast.yml")
    ('qa', 'fast')
    """
    file = located(path)
    return (file.stem if file.stem != "run" else file.resolve().parent.name) or "run"


# -- as Hydra reads it -------------------------------------------------------------------------------------------------
def encoded(path: str, kind: str = GIVEN) -> str:
    """The name of a file as a choice of Hydra's.

    >>> encoded("my qa/a=b.yaml"), decoded("recipe/file:my%20qa%2Fa%3Db.yaml")
    ('file:my%20qa%2Fa%3Db.yaml', ('file:', 'my qa/a=b.yaml'))
    """
    return kind + quote(path, safe="").replace("~", "%7E")


def decoded(config_path: str) -> tuple[str, str] | None:
    """(GIVEN or BUILT_ON, path) of a recipe's file as Hydra asks for it; None for another config."""
    name = config_path.removeprefix("recipe/")
    kind = next((kind for kind in (GIVEN, BUILT_ON) if name.startswith(kind)), None)
    return None if kind is None else (kind, unquote(name.removeprefix(kind)))


def reward_choices(names: Sequence[str], folder: Path) -> list[str]:
    """The rewards' names as choices of Hydra's; paths are relative to this folder. UserError: two have one name."""
    for file in (name for name in names if name.endswith(PYTHON)):
        raise UserError("reward", "names no function in that file", got=file, remedy=f"write {file}:<function>")
    owns = {name: next(filter(None, match.groups()), name) for name in names if (match := REWARD.fullmatch(name))}
    shown = [owns.get(name, name) for name in names]
    for name in (name for name in owns if shown.count(owns[name]) > 1):
        problem = f"has two rewards of the name {owns[name]}"
        raise UserError("reward", problem, got=name, remedy="give one of the functions another name")
    return [encoded(located_target(name, folder)) if ":" in name else name for name in names]


def reward_in(config_path: str) -> dict[str, Any]:
    """The section of a reward that no YAML declares, as Hydra asks for it; empty for another config."""
    target = unquote(config_path.removeprefix("reward/").removeprefix(GIVEN))
    match = REWARD.fullmatch(target) if config_path.startswith("reward/") else None
    return {match[1] or match[2]: {"_target_": target, "weight": 1.0}} if match else {}


def located_target(target: str, folder: Path) -> str:
    """A `_target_` whose file, if it names one, is as it is from the working directory."""
    path, colon, name = split_target(target)
    return f"{beside(folder, path)}:{name}" if colon == ":" else target


def without(
    content: Mapping[Any, Any], is_left_out: Callable[[str], bool], left_out: list[str], section: str = ""
) -> dict[Any, Any]:
    """The content of a file, or of a section of it, without keys that are left out and choices in such groups, which
    are added to `left_out`."""
    kept: dict[Any, Any] = {}
    for key, value in content.items():
        if is_left_out(name := joined(section, key)):
            left_out.append(name)
            continue
        if key == "defaults" and isinstance(value, list):
            groups = [[_group(group) for group in one] if isinstance(one, dict) else [] for one in value]
            left_out += [group for names in groups for group in names if is_left_out(group)]
            value = [one for one, names in zip(value, groups, strict=True) if not any(map(is_left_out, names))]
        kept[key] = without(value, is_left_out, left_out, name) if isinstance(value, dict) else value
    return kept


def _group(choice: object) -> str:
    return str(choice).removeprefix("override").strip().removeprefix("/")


def as_recipe(content: Mapping[Any, Any], kind: str, path: str) -> dict[str, Any]:
    """The content of a file as a recipe's, whose keys have their sections before them or around them."""
    folder, groups, defaults = located(path).parent, catalog.groups(), content.get("defaults", [])
    require(isinstance(defaults, list), path, "its defaults must be a list", got=defaults, remedy="write `- <name>`")
    chosen = {key: value for key, value in content.items() if key in groups and _is_choice(key, value)}
    defaults = [*(_found(entry, folder) for entry in defaults)]
    for group, value in chosen.items():
        names = [value] if isinstance(value, str) else value or []
        names = reward_choices(names, folder) if group == "reward" else names
        is_several = isinstance(value, list) or (group in SEVERAL and value is None)
        defaults.append({f"override /{group}": names if is_several else next(iter(names), None)})
    keys = {str(key): value for key, value in content.items() if key != "defaults" and key not in chosen}
    name = {"name": name_of(path)} if kind == GIVEN else {}
    return {"defaults": defaults, **name, **_with_paths(keys, folder)}


def _with_paths(value: Any, folder: Path, key: str = "") -> Any:
    """The value of a key, or a section, with its paths as they are from the working directory."""
    if isinstance(value, dict):
        return {name: _with_paths(inner, folder, joined(key, name)) for name, inner in value.items()}
    if isinstance(value, str) and key.endswith("_target_"):
        return located_target(value, folder)
    return beside(folder, value) if isinstance(value, str) and is_path_key(key) else value


def _is_choice(group: str, value: Any) -> bool:
    return value is None or isinstance(value, str) or (group in SEVERAL and isinstance(value, list))


def _found(entry: Any, folder: Path) -> Any:
    """An entry of a defaults list, in which names are those of files in this folder where there are such."""
    if isinstance(entry, dict):
        return {
            group: reward_choices(names, folder) if group.endswith("/reward") and isinstance(names, list) else names
            for group, names in entry.items()
        }
    file = next((file for suffix in SUFFIXES if (file := folder / f"{entry}{suffix}").is_file()), None)
    return entry if file is None else encoded(str(file), BUILT_ON)


def beside(folder: Path, path: str) -> str:
    """A path that is relative to this folder, from the working directory.

    What is not there, and may be the id of a set or model on the hub or a run's name, stays as it is.
    """
    if not path or path in KEYWORDS or path.startswith(("embedded:", "/", "~")):
        return path
    from_here = os.path.normpath(folder / path)
    is_file = path.startswith(".") or path.endswith((*FILES_OF_DATA, PYTHON)) or Path(from_here).exists()
    return from_here if is_file else path


def is_local(path: str) -> bool:
    """Whether this is the path of a file or folder, and not the id of a set or model on the hub."""
    return path.startswith(("/", ".", "~")) or path.endswith(FILES_OF_DATA) or located(path).exists()
