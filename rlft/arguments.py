"""What stands after a verb: options, and overrides such as key=value.

Hydra takes some mistakes too kindly: it lets the last of two equal keys win, ends the process on an option it doesn't
know, and takes a dash for an option of its own. Here every word is understood, or refused with the word that was meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlft import catalog, suggest
from rlft.types import UserError

ASKING = ("-h", "--help", "--hydra-help", "--cfg", "-c", "--info", "-i", "--resolve", "--package", "-p")
SWEEPING = ("-m", "--multirun")
CONFIG_DIR = ("--config-dir", "-cd")
WITH_VALUE = ("--cfg", "-c", "--package", "-p", *CONFIG_DIR)
OF_PRINTING = ("--resolve", "--package", "-p")
OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[A-Za-z_][\w./@:-]*)(?P<equals>=?)(?P<value>.*)", re.DOTALL)
OURS = (
    "hydra.mode",
    "hydra/launcher",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra.sweeper",
    "hydra.job.chdir",
    "hydra.searchpath",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """overrides: `key=value`, `+recipe=name`, .. as they were typed. options: the rest, for Hydra's own parser.

    config_dir: a folder of the user's with YAML beside rlft's. asks: nothing is to be trained, only printed.
    """

    overrides: tuple[str, ...]
    options: tuple[str, ...]
    config_dir: Path | None
    sweep: bool
    asks: bool

    def value(self, key: str) -> str | None:
        """The value given for a key, None where it isn't given or is null."""
        given = (o.lstrip("+").partition("=") for o in self.overrides)
        return next((value for name, _, value in given if name == key and value != "null"), None)


def check_text(words: Sequence[str]) -> None:
    """Refuses words with bytes that are no UTF-8 text, which no config, file or terminal could take."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            key, equals, value = word.partition("=")
            got = ascii(value if equals else word)
            key = key if equals and key.isprintable() else "command line"
            raise UserError(key, "is not UTF-8 text", got=got, remedy="type it in UTF-8") from None


def parse(words: Sequence[str], verb: str = "train") -> Arguments:
    """The words after the verb, sorted into options and overrides.

    Raises:
        UserError: an option that is not known, a word that is no override, a key given twice.
    """
    overrides: list[str] = []
    options: list[str] = []
    config_dir: Path | None = None
    todo = list(words)
    while todo:
        word = todo.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in (*ASKING, *SWEEPING, *CONFIG_DIR):
            raise _unknown_option(name, value if equals else _next_word(todo), verb)
        if equals and name not in WITH_VALUE:
            raise UserError(name, "takes no value", got=value or "nothing", remedy=f"write {name}")
        options.append(word)
        if name in WITH_VALUE and not equals:
            if not todo:
                raise UserError(name, "needs a value", remedy=f"write {name} {_example(name)}")
            value = todo.pop(0)
            options.append(value)
        if name in ("--cfg", "-c") and value not in ("job", "hydra", "all"):
            raise UserError(name, "is not one of its choices", got=value, remedy="use job, hydra or all")
        if name in CONFIG_DIR:
            config_dir = _checked_folder(name, value)
    _check_overrides(overrides, verb, config_dir)
    names = [option.partition("=")[0] for option in options]
    for name in (name for name in names if name in OF_PRINTING and not {"--cfg", "-c"} & {*names}):
        raise UserError(name, "says how --cfg prints, and there is no --cfg", remedy="write --cfg job with it")
    return Arguments(
        overrides=tuple(overrides),
        options=tuple(options),
        config_dir=config_dir,
        sweep=any(name in SWEEPING for name in names),
        asks=any(name in ASKING for name in names),
    )


def _check_overrides(overrides: Sequence[str], verb: str, config_dir: Path | None) -> None:
    seen: dict[str, str] = {}
    for i, override in enumerate(overrides):
        match = OVERRIDE.fullmatch(override)
        if match is None or not (match["equals"] or match["sign"] == "~"):
            raise _not_an_override(override, overrides[i + 1 : i + 2], verb)
        key, value = match["key"], match["value"]
        if value.count("[") > value.count("]") or value.count("{") > value.count("}"):
            raise UserError(
                key, "its bracket is not closed", got=value, remedy="leave no spaces, or quote it: 'key=[a, b]'"
            )
        if key == "recipe" and value:
            _check_recipe_name(value, override, config_dir)
        if key in catalog.groups(verb) and value.startswith("["):
            _check_chosen_once(key, value)
        if key == "recipe" and match["sign"] != "+":
            name = value or "<name>"
            raise UserError(
                "recipe", "a recipe is added, so it takes a plus", got=override, remedy=f"write +recipe={name}"
            )
        if key == "recipe" and not value:
            choices = ", ".join(catalog.choices("recipe", verb))
            raise UserError("+recipe", "has no name", remedy=f"choose one of {choices}")
        if key == "recipe" and value in catalog.choices("recipe") and catalog.verb_of(value) != verb:
            other = catalog.verb_of(value)
            raise UserError("+recipe", f"is for rlft {other}", got=value, remedy=f"write rlft {other} +recipe={value}")
        if key == "verb" and value != verb:
            raise UserError("verb", f"this is rlft {verb}", got=value, remedy="leave it as it is")
        if key.startswith(OURS):
            remedy = f"sweep with rlft {verb} -m, add YAML with --config-dir"
            raise UserError(key, "is not the user's to set", got=value, remedy=remedy)
        if key in ("hydra.run.dir", "hydra.sweep.dir") and value.strip("'\"") in ("", "null"):
            raise UserError(key, "is empty", remedy="name a folder, or leave it out for runs/<name>/<time>")
        if key in seen:
            remedy = f"give it once; to sweep over values use rlft {verb} -m with commas between them"
            raise UserError(key, "is given twice", got=f"{seen[key]} and {override}", remedy=remedy)
        seen[key] = override


def _check_recipe_name(value: str, override: str, config_dir: Path | None) -> None:
    """A recipe is named, not given as a file: of rlft's own by its name, of the user's by --config-dir besides."""
    file, name = Path(value.strip("'\"")).expanduser(), Path(value.strip("'\"")).name.removesuffix(".yaml")
    if "," in value or (config_dir is not None and (config_dir / "recipe" / f"{value}.yaml").is_file()):
        return
    own = file if file.is_file() else file.with_name(f"{file.name}.yaml")
    ours = catalog.recipe_folder() / f"{name}.yaml"
    if own.is_file() and not (ours.is_file() and own.samefile(ours)):
        where = own.resolve().parent
        remedy = f"write --config-dir {where.parent} +recipe={name}"
        if where.name != "recipe":
            remedy = f"put it into {where}/recipe and write --config-dir {where} +recipe={name}"

        raise UserError("+recipe", "is given by its name, not as a file", got=override, remedy=remedy)
    if value != name:
        close = difflib.get_close_matches(name, catalog.choices("recipe"), n=1)
        remedy = f"write +recipe={close[0]}" if close else "see rlft recipes for the names"
        raise UserError("+recipe", "is given by its name, not as a file", got=override, remedy=remedy)


def _check_chosen_once(group: str, value: str) -> None:
    """Each choice of a list is another one."""
    chosen = [name.strip(" '\"") for name in value.strip("[]").split(",")]
    for name in (name for name in chosen if chosen.count(name) > 1):
        remedy = f"write {group}=[{','.join(dict.fromkeys(chosen))}]"
        raise UserError(group, "has a choice twice", got=name, remedy=remedy)


def _not_an_override(word: str, following: Sequence[str], verb: str) -> UserError:
    key, value = word.strip("+~="), following[0] if following and "=" not in following[0] else ""
    if key in catalog.choices("recipe"):
        meant = f"did you mean +recipe={key}?"
    elif key == "recipe":
        meant = f"did you mean +recipe={value or '<name>'}?"
    else:
        meant = suggest.remedy_with_value(suggest.suggestions(key, verb), value)
    remedy = meant or "for instance +recipe=grpo_arithmetic steps=10"
    return UserError("command line", "must be words such as key=value", got=word or "an empty word", remedy=remedy)


def _unknown_option(name: str, value: str, verb: str) -> UserError:
    options = [*ASKING, *SWEEPING, *CONFIG_DIR]
    meant = suggest.suggestions(name.lstrip("-"), verb)
    if close := difflib.get_close_matches(name, options, n=1, cutoff=0.8):
        remedy = f"did you mean {close[0]}?"
    elif meant:
        remedy = f"keys have no dashes; {suggest.remedy_with_value(meant, value)}"
    else:
        remedy = "use --help, --cfg job, -m or --config-dir <folder>"
    return UserError("command line", "there is no such option", got=name, remedy=remedy)


def _next_word(todo: Sequence[str]) -> str:
    return todo[0] if todo and "=" not in todo[0] and not todo[0].startswith("-") else ""


def _example(option: str) -> str:
    return "job" if option in ("--cfg", "-c") else "<folder>" if option in CONFIG_DIR else "<name>"


def _checked_folder(option: str, value: str) -> Path:
    """The user's config folder; a file of rlft's own name in it would never be read."""
    folder = Path(value).expanduser()
    if not value or not folder.is_dir():
        raise UserError(
            option,
            "there is no such folder",
            got=value or "nothing",
            remedy="name a folder that holds, say, reward/mine.yaml",
        )
    own = catalog.config_folder()
    hidden = [f.relative_to(folder) for f in sorted(folder.rglob("*.yaml")) if (own / f.relative_to(folder)).exists()]
    if hidden:
        raise UserError(
            option, f"{hidden[0]} has the name of one of rlft's own, which goes first", got=value, remedy="rename it"
        )
    return folder
