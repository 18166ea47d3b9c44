"""Parses the words after a command: options, and overrides such as key=value.

Hydra handles some mistakes badly: it lets the last of two equal keys win, ends the process on an unknown option, and
takes any word with a dash for an option of its own. Here every word is either understood, or refused with the word that
was probably meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlft.config import catalog, suggest
from rlft.config.choices import choice_remedy, closest
from rlft.types import UserError, require

PRINTING = ("-h", "--help", "--hydra-help", "--cfg", "-c", "--info", "-i", "--resolve", "--package", "-p")
SWEEPING = ("-m", "--multirun")
CONFIG_DIR = ("--config-dir", "-cd")
WITH_VALUE = ("--cfg", "-c", "--package", "-p", *CONFIG_DIR)
OF_CFG = ("--resolve", "--package", "-p")
"""Options that change what --cfg prints."""
OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[A-Za-z_][\w./@:-]*)(?P<equals>=?)(?P<value>.*)", re.DOTALL)
QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
"""Text in Hydra's quotes, where brackets and commas have no meaning."""
INTERVAL = re.compile(r"(?:(?:int|float|tag)\(.*)?interval\(")
"""The beginning of Hydra's value for an interval of numbers."""
FILES_OF_DATA = (".json", ".jsonl", ".gz", ".csv", ".parquet")
FIXED = ("hydra.mode", "hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper", "hydra.job.chdir",
         "hydra.searchpath")  # fmt: skip
"""Keys that rlft sets, and the user may not."""
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
"""Keys of Hydra that a user may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parsed words after a command.

    Attributes:
        overrides: `key=value`, `+recipe=name`, .. as they were typed.
        options: the other words, for Hydra's own parser.
        asks: whether the command only prints something, and runs nothing.
    """

    overrides: tuple[str, ...]
    options: tuple[str, ...]
    config_dir: Path | None
    sweep: bool
    asks: bool

    def value(self, key: str) -> str | None:
        """The value of a key, without Hydra's quotes; None if it is absent or null."""
        parts = (o.lstrip("+").partition("=") for o in self.overrides)
        return next((unquoted(value) for name, _, value in parts if name == key and value != "null"), None)


def check_no_options(parsed: Arguments) -> None:
    """Refuses options, for a command that neither sweeps nor prints its config."""
    if parsed.sweep or parsed.asks:
        remedy = "give it to rlft train, sft, rm or dpo"
        raise UserError("command line", "this command has no such option", got=parsed.options[0], remedy=remedy)


def unquoted(value: str) -> str:
    """The text that Hydra reads from a value, which may be in quotes.

    >>> unquoted("runs/a"), unquoted("'runs/first try'"), unquoted('"a"'), unquoted("'")
    ('runs/a', 'runs/first try', 'a', "'")
    """
    quote = value[:1]
    if len(value) < 2 or quote not in ("'", '"') or not value.endswith(quote):
        return value
    return value[1:-1].replace(f"\\{quote}", quote)


def check_text(words: Sequence[str]) -> None:
    """Refuses words that are not UTF-8 text, which no config, file or terminal accepts."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            key, equals, value = word.partition("=")
            got = ascii(value if equals else word)
            key = key if equals and key.isprintable() else "command line"
            raise UserError(key, "is not UTF-8 text", got=got, remedy="type it in UTF-8") from None


def parse(words: Sequence[str], command: str = "train") -> Arguments:
    """Parses the words after the command.

    Raises:
        UserError: an option is unknown, a word is not an override, or a key is given twice.
    """
    overrides: list[str] = []
    options: list[str] = []
    config_dir: Path | None = None
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in (*PRINTING, *SWEEPING, *CONFIG_DIR):
            following = remaining[0] if remaining and "=" not in remaining[0] and remaining[0][:1] != "-" else ""
            raise _unknown_option(name, value if equals else following, command)
        takes_value, got = name in WITH_VALUE, value or "nothing"
        require(takes_value or not equals, name, "takes no value", got=got, remedy=f"write {name}")
        options.append(word)
        if takes_value and not equals:
            example = "job" if name in ("--cfg", "-c") else "<folder>" if name in CONFIG_DIR else "<name>"
            require(remaining, name, "needs a value", remedy=f"write {name} {example}")
            value = remaining.pop(0)
            options.append(value)
        if name in ("--cfg", "-c"):
            known = ("job", "hydra", "all")
            remedy = choice_remedy(value, known)
            require(value in known, name, "is not one of its choices", got=value, remedy=remedy)
        if name in CONFIG_DIR:
            config_dir = _checked_folder(name, value)
    _check_overrides(overrides, command, config_dir)
    names = [option.partition("=")[0] for option in options]
    printing = next((name for name in names if name in PRINTING), None)
    if printing or not {*names} & {*SWEEPING}:
        _check_no_sweep(overrides, command, printing)
    if {*names} & {*SWEEPING}:
        for key, _, value in (override.lstrip("+~").partition("=") for override in overrides):
            remedy = "write hydra.sweep.dir=<folder>, in which each run has its own"
            problem = "is the folder of one run, and this is a sweep"
            require(key != "hydra.run.dir", key, problem, got=value, remedy=remedy)
    for name in (name for name in names if name in ("--cfg", "-c") and {*names} & {*SWEEPING}):
        raise UserError(name, "prints the config of one run, and -m is a sweep", remedy="leave -m out")
    for name in (name for name in names if name in OF_CFG and not {"--cfg", "-c"} & {*names}):
        raise UserError(name, "says how --cfg prints, and there is no --cfg", remedy="write --cfg job with it")
    return Arguments(
        overrides=tuple(overrides),
        options=tuple(options),
        config_dir=config_dir,
        sweep=any(name in SWEEPING for name in names),
        asks=any(name in PRINTING for name in names),
    )


def _check_overrides(overrides: Sequence[str], command: str, config_dir: Path | None) -> None:
    override_of: dict[str, str] = {}
    for i, override in enumerate(overrides):
        match = OVERRIDE.fullmatch(override)
        if match is None or not (match["equals"] or match["sign"] == "~"):
            raise _not_an_override(override, overrides[i + 1 : i + 2], command)
        key, value = match["key"], match["value"]
        is_closed, remedy = not _is_left_open(QUOTED.sub("", value)), "leave no spaces, or quote it: 'key=[a, b]'"
        require(is_closed, key, "its bracket is not closed", got=value, remedy=remedy)
        ends_well = not QUOTED.sub("", value).rstrip().endswith(",")
        remedy = f"write {override.rstrip(', ')}, with no comma between words"
        require(ends_well, "+recipe" if key == "recipe" else key, "ends with a comma", got=value, remedy=remedy)
        if key == "recipe" and value:
            _check_recipe_name(value, override, config_dir)
        if key in ("data", "demonstrations", "preferences") and unquoted(value).endswith(FILES_OF_DATA):
            remedy = f"write {key}=jsonl {key}.path={value}"
            raise UserError(key, "is chosen by a name, not as a file", got=value, remedy=remedy)
        if key in suggest.SEVERAL and value.startswith("["):
            chosen = [name.strip(" '\"") for name in value.strip("[]").split(",")]
            for name in (name for name in chosen if chosen.count(name) > 1):
                remedy = f"write {key}=[{','.join(dict.fromkeys(chosen))}]"
                raise UserError(key, "has a choice twice", got=name, remedy=remedy)
        if key == "recipe":
            remedy = f"write +recipe={value or '<name>'}"
            is_added = match["sign"] == "+"
            require(is_added, "recipe", "a recipe is added, so it takes a plus", got=override, remedy=remedy)
            recipes = ", ".join(catalog.choices("recipe", command))
            require(value, "+recipe", "has no name", remedy=f"choose one of {recipes}")
            other = catalog.command_of(value) if value in catalog.choices("recipe") else command
            remedy = f"write rlft {other} +recipe={value}"
            require(other == command, "+recipe", f"is for rlft {other}", got=value, remedy=remedy)
        is_of_command = key != "command" or value == command
        require(is_of_command, "command", f"this is rlft {command}", got=value, remedy="leave it as it is")
        if key.startswith(FIXED):
            remedy = f"sweep with rlft {command} -m, add YAML with --config-dir"
            raise UserError(key, "cannot be set by the user", got=value, remedy=remedy)
        _check_of_hydra(key, value)
        if key in FOLDERS and unquoted(value) in ("", "null"):
            raise UserError(key, "is empty", remedy="name a folder, or leave it out for runs/<name>/<time>")
        if key in override_of:
            remedy = f"give it once; to sweep over values use rlft {command} -m with commas between them"
            raise UserError(key, "is given twice", got=f"{override_of[key]} and {override}", remedy=remedy)
        override_of[key] = override


def _check_of_hydra(key: str, value: str) -> None:
    """Refuses keys of Hydra that change nothing here, among them misspelt ones, which Hydra or a sweep would drop."""
    if re.match(r"hydra([./]|$)", key) is None or key in FOLDERS:
        return
    if key == "hydra.sweep.subdir":
        problem, remedy = "is set by the sweep, which finds its runs again by it", "leave it out"
        raise UserError(key, problem, got=value or "nothing", remedy=remedy)
    close = closest(key, FOLDERS)
    remedy = f"did you mean {close}?" if close else f"of Hydra's keys only {' and '.join(FOLDERS)} do something here"
    raise UserError(key, "there is no such key", got=value or "nothing", remedy=remedy)


def _check_no_sweep(overrides: Sequence[str], command: str, printing: str | None) -> None:
    """Refuses keys that only a sweep reads. printing: the option that prints what one run has; None to do the run."""
    one_run = f"{printing} prints what one run has" if printing else "this is one run"
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        problem, instead = f"belongs to a sweep, and {one_run}", "leave it out"
        if key.startswith("hydra.sweep."):
            remedy = f"write rlft {command} -m to sweep, or hydra.run.dir for the folder of one run"
        elif key.partition(".")[0] == "sweep":
            remedy = f"write rlft {command} -m to sweep, or leave it out"
        elif INTERVAL.match(value):
            problem = f"has an interval of values{f', and {one_run}' if printing else ' but this is no sweep'}"
            instead = "give one value"
            remedy = f"write rlft {command} -m sweep=optuna to choose from it, or {instead}"
        else:
            continue
        raise UserError(key, problem, got=value or "nothing", remedy=instead if printing else remedy)


def _is_left_open(value: str) -> bool:
    """Whether a bracket is not closed in a value, whose quoted text has been removed."""
    return any(value.count(opened) > value.count(closed) for opened, closed in ("[]", "{}", "()"))


def _check_recipe_name(value: str, override: str, config_dir: Path | None) -> None:
    """Refuses a recipe given as a file: rlft's are chosen by name, the user's by --config-dir and name."""
    file = Path(unquoted(value)).expanduser()
    name = file.name.removesuffix(".yaml")
    if "," in value or (config_dir is not None and (config_dir / "recipe" / f"{value}.yaml").is_file()):
        return
    users_file = file if file.is_file() else file.with_name(f"{file.name}.yaml")
    rlfts_file = catalog.recipe_folder() / f"{name}.yaml"
    if users_file.is_file() and not (rlfts_file.is_file() and users_file.samefile(rlfts_file)):
        folder = users_file.resolve().parent
        remedy = f"write --config-dir {folder.parent} +recipe={name}"
        if folder.name != "recipe":
            remedy = f"put it into {folder}/recipe and write --config-dir {folder} +recipe={name}"
        raise UserError("+recipe", "is given by its name, not as a file", got=override, remedy=remedy)
    if value != name:
        close = closest(name, catalog.choices("recipe"))
        remedy = f"write +recipe={close}" if close else "see rlft recipes for the names"
        raise UserError("+recipe", "is given by its name, not as a file", got=override, remedy=remedy)


def _not_an_override(word: str, following: Sequence[str], command: str) -> UserError:
    key, value = word.strip("+~="), following[0] if following and "=" not in following[0] else ""
    if key in catalog.choices("recipe"):
        suggestion = f"did you mean +recipe={key}?"
    elif key == "recipe":
        suggestion = f"did you mean +recipe={value or '<name>'}?"
    else:
        suggestion = suggest.remedy(suggest.suggestions(key, command), value)
    remedy = suggestion or "for instance +recipe=grpo_arithmetic steps=10"
    return UserError("command line", "must be words such as key=value", got=word or "an empty word", remedy=remedy)


def _unknown_option(name: str, value: str, command: str) -> UserError:
    options = [*PRINTING, *SWEEPING, *CONFIG_DIR]
    suggested_keys = suggest.suggestions(name.lstrip("-"), command)
    if close := difflib.get_close_matches(name, options, n=1, cutoff=0.8):
        remedy = f"did you mean {close[0]}?"
    elif suggested_keys:
        remedy = f"keys have no dashes; {suggest.remedy(suggested_keys, value)}"
    else:
        remedy = "use --help, --cfg job, -m or --config-dir <folder>"
    return UserError("command line", "there is no such option", got=name, remedy=remedy)


def _checked_folder(option: str, value: str) -> Path:
    """The user's config folder; refuses a file in it with the name of one of rlft's, because it would not be read."""
    folder, remedy = Path(value).expanduser(), "name a folder that holds, say, reward/mine.yaml"
    is_there = bool(value) and folder.is_dir()
    require(is_there, option, "there is no such folder", got=value or "nothing", remedy=remedy)
    for name in (file.relative_to(folder) for file in sorted(folder.rglob("*.yaml"))):
        problem = f"{name} has the name of one of rlft's own, which takes precedence"
        is_new = not (catalog.config_folder() / name).exists()
        require(is_new, option, problem, got=value, remedy="rename it")
    return folder
