"""The commands that list what there is: `rlft recipes`, `models`, `keys` and `algorithms`.

Recipes are listed in groups; a recipe's YAML says which: `# Group: <name>`. Of each key, the YAML files have its
meaning, unit, default and choices. An algorithm's loss comes from the docstring of its family's module
(rlft/algorithm/formula.py).
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlft.algorithm.formula import formula_of
from rlft.commands.tables import matching, wrapped
from rlft.config import catalog, command as commands, suggest
from rlft.config.choices import choice_remedy
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate, locate
from rlft.config.keys import fields_of, options
from rlft.config.overrides import CONFIG_DIR, only_overrides, parse
from rlft.config.schema import GenerationConfig, engine_classes
from rlft.model.families import Families, Family, known
from rlft.system.terminal import command_line
from rlft.tokens.images import EXACT
from rlft.types import Mistakes, UserError, require

# -- rlft recipes ------------------------------------------------------------------------------------------------------
RECIPE_GROUP = re.compile(r"^# Group: (.+)$", re.MULTILINE)
ALGORITHMS, YOURS = "Algorithms", "Yours"  # the group that is listed by names only, and that of files without a group
GROUPS = ("Start here", ALGORITHMS, "Other tasks", "GSM8K on one GPU", "A model of 135M parameters", "RLHF", "R1",
          "Distillation", YOURS)  # fmt: skip
COLUMNS = 80
INDENT = " " * 4


def recipes(arguments: list[str]) -> None:
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
    match = RECIPE_GROUP.search(catalog.text_of(recipe))
    return match[1] if match else YOURS


def _command_of(file: Path) -> str:
    return catalog.command_of(str(file)) or "train"


def _whole(name: str, file: Path) -> list[str]:
    return [
        f"rlft {_command_of(file)} +recipe={name}",
        *wrapped(f"{catalog.first_comment(file)} [{group_of(file)}]", "    ", "    "),
    ]


# -- rlft models -------------------------------------------------------------------------------------------------------
OF_A_LANGUAGE_MODEL = (
    "reads images in prompts, and its language model is trained; rlft plan model.path=<folder> says what is adapted"
)


def models(arguments: list[str]) -> None:
    options = [word for word in arguments if word.startswith("-")]
    patterns = [word for word in arguments if word not in options]
    wrong = next((word for word in options if word != "--json"), None)
    require(wrong is None, "models", "has no such option", got=wrong, remedy="use --json")
    families = known()
    with_images = [kind for kind in EXACT if kind not in families.by_type]
    names = dict.fromkeys([*families.by_type, *with_images], "")
    named = matching(patterns, names, "models", "there is no such family of causal language models")
    chosen = {kind: families.by_type[kind] for kind in named if kind in families.by_type}
    if "--json" in options:
        facts = {kind: asdict(family) for kind, family in chosen.items()}
        facts |= {kind: {"note": OF_A_LANGUAGE_MODEL} for kind in with_images if kind in named}
        print(json.dumps(facts, indent=1))
    else:
        lines = [line for item in chosen.items() for line in family_lines(*item)]
        lines += [
            line for kind in with_images if kind in named for line in wrapped(OF_A_LANGUAGE_MODEL, f"{kind}: ", INDENT)
        ]
        print("\n".join([*lines, "", *family_notes(families)]))


def family_lines(kind: str, family: Family) -> list[str]:
    """The name of a family with what holds for it, and the layers with and without adapters."""
    if not family.is_trained:
        return wrapped(why_not(family), f"{kind}: ", INDENT)
    refused = f"refused with generation=transformers: {family.decoding}"
    decoding = "generates with transformers" if family.decoding is None else refused
    export = "merged export" if family.exported else "export with as=adapter only"
    rows = "packed training" if family.padded is None else f"training in padded rows ({family.padded})"
    facts = [rows, decoding, vllm_of(family), export]
    left = f"; not {family.not_adapted}" if family.not_adapted else ""
    return [
        *wrapped("; ".join(facts), f"{kind}: ", INDENT),
        *wrapped(f"LoRA on {family.adapted}{left}", INDENT, INDENT),
    ]


def family_notes(families: Families) -> list[str]:
    """Which families read images; where the facts come from, and a warning where transformers is of another release."""
    images = f"images in prompts: {', '.join(EXACT)}"
    tried = f"tried with transformers {families.transformers} and vLLM {families.vllm}"
    installed = metadata.version("transformers")
    if installed != families.transformers:
        tried += f"; transformers {installed} is installed, with which a run finds out at its start"
    return [images, tried]


def why_not(family: Family) -> str:
    if family.untried:
        return f"not tried: {family.untried}"
    return f"refused: {family.refused or family.wrong}"


def vllm_of(family: Family) -> str:
    return {True: "vLLM with LoRA", False: "vLLM without LoRA", None: "not in vLLM"}[family.vllm]


# -- rlft keys ---------------------------------------------------------------------------------------------------------
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


def keys(arguments: list[str]) -> None:
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
    is_told = not unnamed or unnamed < set(BOOLEAN)  # what one of the two does says what the other does
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


# -- rlft algorithms ---------------------------------------------------------------------------------------------------
GROUP = "algorithm"


def algorithms(arguments: list[str]) -> None:
    names, words = _split_names([word for word in arguments if word != "--json"])
    parsed = only_overrides(words)
    _check_words(names, parsed.overrides)
    users_files = sorted((parsed.config_dir / GROUP).glob("*.yaml")) if parsed.config_dir else []
    files = catalog.files(GROUP) | {file.stem: file for file in users_files}
    if not names:
        rows = [listed(name, file) for name, file in files.items()]
        print(json.dumps(rows, indent=1) if "--json" in arguments else table_of(rows))
        return
    page = algorithm_page(names[0], files, parsed.overrides, parsed.config_dir)
    print(json.dumps(page, indent=1) if "--json" in arguments else algorithm_text(page))


def _split_names(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names of algorithms, other words) among the arguments; the folder after --config-dir is not a name."""
    names: list[str] = []
    words: list[str] = []
    for previous, word in pairwise(["", *arguments]):
        is_name = previous not in CONFIG_DIR and "=" not in word and not word.startswith(("-", "+", "~"))
        (names if is_name else words).append(word)
    return names, words


def _check_words(names: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuses more than one name, and words that are not keys of the algorithm."""
    remedy = f"write rlft algorithms {names[0] if names else ''}"
    require(len(names) < 2, "algorithms", "takes one name", got=" ".join(names), remedy=remedy)
    mistakes = Mistakes()
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        with mistakes:
            remedy = f"write rlft algorithms {value}"
            require(key != GROUP or not value, key, "is named without its group here", got=value, remedy=remedy)
            is_a_key, remedy = override.startswith(f"{GROUP}."), "write rlft algorithms, or rlft algorithms <name>"
            require(is_a_key, key, "is not a key of rlft algorithms", got=override, remedy=remedy)
            remedy = f"write rlft algorithms <name> {override}"
            require(names, key, "is a key of an algorithm, and none is named", got=override, remedy=remedy)
    mistakes.refuse()


def listed(name: str, file: Path) -> dict[str, str]:
    """An algorithm in the list."""
    files, about = catalog.lineage(file, GROUP), catalog.first_comment(file)
    return {"name": name, "about": about, "family": catalog.family(files), "paper": catalog.paper(files)}


def algorithm_page(
    name: str, files: Mapping[str, Path], overrides: Sequence[str], config_dir: Path | None
) -> dict[str, Any]:
    """Everything that is printed about one algorithm with these overrides of its keys, which it may refuse."""
    if name not in files:
        raise UserError("algorithms", "there is no such algorithm", got=name, remedy=choice_remedy(name, files))
    plain = compose([f"{GROUP}={name}", *overrides], config_dir)[GROUP]
    algorithm = instantiate(plain, GROUP)
    target = locate(plain["_target_"], f"{GROUP}._target_")
    values = {key: value for key, value in plain.items() if key != "_target_"}
    if dataclasses.is_dataclass(algorithm):
        values = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    try:
        loss = formula_of(target, values)
    except ValueError as error:
        remedy = "write it as rlft/algorithm/formula.py explains"
        raise UserError(target.__module__, f"its docstring does not state its loss: {error}", remedy=remedy) from None
    lineage = catalog.lineage(files[name], GROUP)
    return {
        **listed(name, files[name]),
        "module": target.__module__,
        "loss": loss and asdict(loss),
        "keys": [{"key": key, "value": value, "comments": _comments(key, lineage)} for key, value in values.items()],
        "example": _example(name, config_dir),
    }


def _comments(key: str, lineage: Sequence[Path]) -> tuple[str, ...]:
    """The comments on a key: that of the first file with one explains it, the others say why they change it."""
    comments = [(file.stem, catalog.entries(file)[key].comment) for file in lineage if key in catalog.entries(file)]
    first, *others = [(stem, comment) for stem, comment in comments if comment] or [("", "")]
    return tuple(filter(None, [first[1], *(f"{stem}: {comment}" for stem, comment in others)]))


def _example(name: str, config_dir: Path | None) -> str:
    recipe = f"{name}_arithmetic"
    if recipe in catalog.recipes("train"):
        of_a_teacher = ["snapshot.teacher=<model, adapter or run>"] if name == "opd" else []
        return " ".join([command_line("rlft", "train", f"+recipe={recipe}"), *of_a_teacher])
    folder = ["--config-dir", config_dir] if config_dir else []
    return command_line("rlft", "train", *folder, "+recipe=grpo_arithmetic", f"{GROUP}={name}", f"name={name}")


def table_of(rows: Sequence[Mapping[str, str]]) -> str:
    """A line per algorithm with its name, its family and what it is; below it, its paper."""
    name, family = (max(len(row[column]) for row in rows) for column in ("name", "family"))
    indent = " " * (name + family + 4)
    lines: list[str] = []
    for row in rows:
        head = f"{row['name']:<{name}}  {row['family']:<{family}}  "
        lines += wrapped(row["about"], head, indent)
        lines += wrapped(row["paper"], indent, indent) if row["paper"] else []
    return "\n".join([*lines, "", "rlft algorithms <name> prints its loss, its keys and a command to try it."])


def algorithm_text(page: Mapping[str, Any]) -> str:
    lines = [
        *wrapped(f"{page['name']}: {page['about']}", "", "  "),
        "",
        *wrapped(f"{page['family']} ({page['module']})", "family  ", " " * 8),
        *(wrapped(page["paper"], "paper   ", " " * 8) if page["paper"] else []),
        f"try it  {page['example']}",
        "",
        "Loss, which an update makes smaller",
        "",
    ]
    if page["loss"] is None:
        lines += wrapped(f"The docstring of {page['module']} does not state it.", "  ", "  ")
    else:
        lines += [f"  {line}" for line in page["loss"]["lines"]]
        width = max(map(len, page["loss"]["symbols"]), default=0)
        lines.append("")
        for name, meaning in page["loss"]["symbols"].items():
            lines += wrapped(meaning, f"  {name:<{width}}  ", " " * (width + 4))
    lines += ["", "Keys, set as algorithm.<key>=<value>", ""]
    for one in page["keys"]:
        lines.append(f"  {one['key']}: {one['value'] if isinstance(one['value'], str) else json.dumps(one['value'])}")
        for comment in one["comments"]:
            lines += wrapped(comment, " " * 6, " " * 6)
    return "\n".join(lines)
