"""`rlft algorithms`: lists all algorithms, or prints the loss, keys and paper of one and a command to try it.

The loss comes from the docstring of the family's module (rlft/algorithm/formula.py), the keys and their comments come
from the YAML files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlft.algorithm.formula import formula_of
from rlft.commands.tables import wrapped
from rlft.config import catalog
from rlft.config.choices import choice_remedy
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate, locate
from rlft.config.overrides import CONFIG_DIR, only_overrides
from rlft.system.terminal import command_line
from rlft.types import Mistakes, UserError, require

GROUP = "algorithm"


def command(arguments: list[str]) -> None:
    names, words = _split_names([word for word in arguments if word != "--json"])
    parsed = only_overrides(words)
    _check_words(names, parsed.overrides)
    users_files = sorted((parsed.config_dir / GROUP).glob("*.yaml")) if parsed.config_dir else []
    files = catalog.files(GROUP) | {file.stem: file for file in users_files}
    if not names:
        rows = [listed(name, file) for name, file in files.items()]
        print(json.dumps(rows, indent=1) if "--json" in arguments else table_of(rows))
        return
    page = page_of(names[0], files, parsed.overrides, parsed.config_dir)
    print(json.dumps(page, indent=1) if "--json" in arguments else text_of(page))


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


def page_of(name: str, files: Mapping[str, Path], overrides: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
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


def text_of(page: Mapping[str, Any]) -> str:
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
