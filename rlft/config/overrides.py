"""Reads the words after a command: options, and overrides such as key=value; nothing else looks at how words are typed.

Hydra handles some mistakes badly: it lets the last of two equal keys win, ends the process on an unknown option, and
takes any word with a dash for an option of its own. Here every word is either understood, or refused with the word that
was probably meant.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlft.config import catalog, recipe_file, suggest
from rlft.config.choices import LIKE, choice_remedy, closest
from rlft.config.recipe_file import DATA_SUFFIXES, FILES_OF_DATA
from rlft.types import Mistakes, UserError, require

logger = logging.getLogger(__name__)

HELP, CFG = ("--help", "-h"), ("--cfg", "-c")
SWEEPING = ("-m", "--multirun")
CONFIG_DIR = ("--config-dir", "-cd")
OPTIONS = (*HELP, *CFG, *SWEEPING, *CONFIG_DIR)
EXAMPLES = {**dict.fromkeys(CFG, "job"), **dict.fromkeys(CONFIG_DIR, "<folder>")}
"""{option that takes a value: an example of one}."""
OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[A-Za-z_][\w./@:-]*)(?P<equals>=?)(?P<value>.*)", re.DOTALL)
QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
"""Text in Hydra's quotes, where brackets and commas have no meaning."""
INTERVAL = re.compile(r"(?:(?:int|float|tag)\(.*)?interval\(")  # how Hydra's value for an interval of numbers begins
FIXED = ("hydra.mode", "hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper", "hydra.job.chdir",
         "hydra.searchpath")  # fmt: skip
"""Keys that rlft sets, and the user may not."""
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")  # keys of Hydra that a user may set
TEMPLATE_VARIABLES = "prompts.template_variables"  # the section whose keys are the user's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parsed words after a command."""

    overrides: tuple[str, ...]  # of the config: `key=value`, `+recipe=name`, .. as they were typed
    own: tuple[str, ...]  # likewise, of the keys that the command itself has
    options: tuple[str, ...]  # the other words
    config_dir: Path | None
    sweep: bool
    asks: str | None  # "--help", or the value of --cfg, where the command only prints that, and runs nothing

    def value(self, key: str) -> str | None:
        """The value of a key, without Hydra's quotes; None if it is absent or null."""
        parts = (o.lstrip("+").partition("=") for o in (*self.own, *self.overrides))
        return next((unquoted(value) for name, _, value in parts if name == key and value != "null"), None)


def key_of(override: str) -> str:
    """The key of an override, without signs.

    >>> key_of("+recipe=a"), key_of("sweep.trials=3")
    ('recipe', 'sweep.trials')
    """
    return override.lstrip("+~").partition("=")[0]


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


def only_overrides(
    words: Sequence[str], command: str = "train", own: Sequence[str] = (), mistakes: Mistakes | None = None
) -> Arguments:
    """Parses the words of a command that neither sweeps nor prints its config; makes the user's modules importable.

    `own` are keys of the command itself next to those of the config, which has the keys of a run of `command`. Words
    that resemble them are refused, or left out and kept in `mistakes`, for the caller to refuse them with others.
    """
    parsed = parse(words, command, own)
    check_no_options(parsed)
    make_importable(parsed.config_dir)
    found, overrides = Mistakes() if mistakes is None else mistakes, []
    for override in parsed.overrides:
        with found:
            _check_against_own(override, own, command)
            overrides.append(override)
    if mistakes is None:
        found.refuse()
    return replace(parsed, overrides=tuple(overrides))


def check_no_options(parsed: Arguments) -> None:
    """Refuses options, for a command that neither sweeps nor prints its config."""
    if parsed.sweep or parsed.asks:
        remedy = "give it to rlft train, sft, rm or dpo"
        raise UserError("command line", "this command has no such option", got=parsed.options[0], remedy=remedy)


def make_importable(config_dir: Path | None) -> None:
    """Puts the working directory and the user's config folder at the end of sys.path, so that their modules import.

    Reward workers inherit the path. The folders come last: a user's folder named `datasets` must not hide the library.
    """
    for folder in (Path.cwd(), config_dir):
        if folder is not None and str(folder.resolve()) not in sys.path:
            sys.path.append(str(folder.resolve()))


def with_recipe(words: Sequence[str]) -> list[str]:
    """The words, with the path of a YAML file as the override that chooses it as the recipe.

    >>> with_recipe(["qa/run.yaml", "steps=2", "data.path=rows.yml"])
    ['+recipe=qa/run.yaml', 'steps=2', 'data.path=rows.yml']
    """
    files = [recipe_file.of_word(word) for word in words]
    return [word if file is None else f"+recipe={_quoted(file)}" for word, file in zip(words, files, strict=True)]


def recipe_in(words: Sequence[str]) -> str:
    """The name or path of the recipe that these words choose; "" without one."""
    of_recipe = (word.partition("=")[2] for word in with_recipe(words) if word.startswith("+recipe="))
    return unquoted(next(of_recipe, ""))


def parse(words: Sequence[str], command: str = "train", own: Sequence[str] = ()) -> Arguments:
    """Parses words after a command; refuses unknown options, words that are no override, and a key given twice."""
    overrides: list[str] = []
    options: list[str] = []
    names: list[str] = []
    config_dir: Path | None = None
    asks: str | None = None
    remaining = with_recipe(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in OPTIONS:
            following = remaining[0] if remaining and "=" not in remaining[0] and remaining[0][:1] != "-" else ""
            raise _unknown_option(name, value if equals else following, command)
        names.append(name)
        options.append(word)
        example = EXAMPLES.get(name)
        require(example or not equals, name, "takes no value", got=value or "nothing", remedy=f"write {name}")
        if example and not equals:
            require(remaining, name, "needs a value", remedy=f"write {name} {example}")
            value = remaining.pop(0)
            options.append(value)
        if name in CFG:
            known = ("job", "hydra", "all")
            remedy = choice_remedy(value, known)
            require(value in known, name, "is not one of its choices", got=value, remedy=remedy)
        if name in (*HELP, *CFG) and asks != HELP[0]:
            asks = value or HELP[0]
        if name in CONFIG_DIR:
            config_dir = _checked_folder(name, value)
    _check_overrides(overrides, command, config_dir)
    printing, sweeps = next((name for name in names if name in (*HELP, *CFG)), None), not {*names}.isdisjoint(SWEEPING)
    _check_use(overrides, command, printing, sweeps=sweeps)
    for name in names:
        remedy = "leave -m out"
        require(name not in CFG or not sweeps, name, "prints the config of one run, and -m is a sweep", remedy=remedy)
    return Arguments(
        overrides=tuple(o for o in overrides if o.partition("=")[0] not in own),
        own=tuple(o for o in overrides if o.partition("=")[0] in own),
        options=tuple(options),
        config_dir=config_dir,
        sweep=sweeps,
        asks=asks,
    )


def _check_overrides(overrides: Sequence[str], command: str, config_dir: Path | None) -> None:
    override_of: dict[str, str] = {}
    for i, override in enumerate(overrides):
        match = OVERRIDE.fullmatch(override)
        if match is None or not (match["equals"] or match["sign"] == "~"):
            raise _not_an_override(override, overrides[i + 1 : i + 2], command)
        key, value = match["key"], match["value"]
        bare = QUOTED.sub("", value)
        is_closed = all(bare.count(opened) <= bare.count(closed) for opened, closed in ("[]", "{}", "()"))
        remedy = "leave no spaces, or quote it: 'key=[a, b]'"
        require(is_closed, key, "its bracket is not closed", got=value, remedy=remedy)
        remedy = f"write {override.rstrip(', ')}, with no comma between words"
        ends_well = not bare.rstrip().endswith(",")
        require(ends_well, "+recipe" if key == "recipe" else key, "ends with a comma", got=value, remedy=remedy)
        if key == "recipe":
            _check_recipe(value, override, command, config_dir)
        if key in ("data", "demonstrations", "preferences"):
            _check_is_no_file(key, value, config_dir)
        if key in suggest.SEVERAL and value.startswith("["):
            chosen = [name.strip(" '\"") for name in value.strip("[]").split(",")]
            for name in (name for name in chosen if chosen.count(name) > 1):
                remedy = f"write {key}=[{','.join(dict.fromkeys(chosen))}]"
                raise UserError(key, "has a choice twice", got=name, remedy=remedy)
        is_of_command = key != "command" or value == command
        require(is_of_command, "command", f"this is rlft {command}", got=value, remedy="leave it as it is")
        _check_of_hydra(key, value, command)
        if key in override_of:
            remedy = f"give it once; to sweep over values use rlft {command} -m with commas between them"
            raise UserError(key, "is given twice", got=f"{override_of[key]} and {override}", remedy=remedy)
        override_of[key] = override


def _check_is_no_file(key: str, value: str, config_dir: Path | None) -> None:
    """Refuses a file, or a kind of file, as the choice of data: the choice `jsonl` reads all kinds."""
    kind = f".{unquoted(value).lower().removeprefix('.')}"
    is_choice = value in catalog.choices(key) or (config_dir and (config_dir / key / f"{value}.yaml").is_file())
    if kind in FILES_OF_DATA and not is_choice:
        problem = f"is a kind of file, and {key}=jsonl reads them all ({' '.join(DATA_SUFFIXES)}, packed or not)"
        raise UserError(key, problem, got=value, remedy=f"write {key}=jsonl {key}.path=<file>")
    if kind.endswith(FILES_OF_DATA) and not is_choice:
        remedy = f"write {key}=jsonl {key}.path={value}"
        raise UserError(key, "is chosen by a name, not as a file", got=value, remedy=remedy)


def _check_recipe(value: str, override: str, command: str, config_dir: Path | None) -> None:
    """Refuses a recipe without a plus, of another command, or that is no recipe's name or file."""
    name = unquoted(value)
    is_in_config_dir = config_dir is not None and (config_dir / "recipe" / f"{name}.yaml").is_file()
    file = next((f"{name}{suffix}" for suffix in recipe_file.SUFFIXES if Path(f"{name}{suffix}").is_file()), None)
    is_path = name.endswith(recipe_file.SUFFIXES)
    if is_path and ("," not in value or name != value):  # else a sweep over files
        recipe_file.lines_of(name)
    elif file is not None and name in catalog.choices("recipe"):
        logger.warning("+recipe=%s is a recipe of rlft's; to use the file of that name write %s", name, file)
    elif name and "," not in value and not is_in_config_dir and (file is not None or name != Path(name).name):
        remedy = f"write {file}" if file else "write the path of a YAML file, or see rlft recipes for rlft's own"
        raise UserError("+recipe", "is no recipe of rlft's", got=override, remedy=remedy)
    remedy = f"write +recipe={value or '<name>'}"
    require(
        override.startswith("+recipe"), "recipe", "a recipe is added, so it takes a plus", got=override, remedy=remedy
    )
    if not value:
        raise UserError("+recipe", "has no name", remedy=choose_one("recipe", command))
    other = catalog.command_of(name) or command
    remedy = f"write rlft {other} {name if is_path else override}"
    require(other == command, "+recipe", f"is for rlft {other}", got=name, remedy=remedy)


def _check_of_hydra(key: str, value: str, command: str) -> None:
    """Refuses keys of Hydra that change nothing here, among them misspelt ones, which Hydra or a sweep would drop."""
    if key.startswith(FIXED):
        remedy = f"sweep with rlft {command} -m, add YAML with --config-dir"
        raise UserError(key, "cannot be set by the user", got=value, remedy=remedy)
    if key in FOLDERS:
        remedy = "name a folder, or leave it out for runs/<name>/<time>"
        require(unquoted(value) not in ("", "null"), key, "is empty", remedy=remedy)
    elif key == "hydra.sweep.subdir":
        problem, remedy = "is set by the sweep, which finds its runs again by it", "leave it out"
        raise UserError(key, problem, got=value or "nothing", remedy=remedy)
    elif re.match(r"hydra([./]|$)", key):
        close = closest(key, FOLDERS)
        only = f"of Hydra's keys only {' and '.join(FOLDERS)} do something here"
        remedy = f"did you mean {close}?" if close else only
        raise UserError(key, "there is no such key", got=value or "nothing", remedy=remedy)


def _check_use(overrides: Sequence[str], command: str, printing: str | None, *, sweeps: bool) -> None:
    """Refuses keys that only a sweep reads, and in a sweep the one that only a single run reads.

    printing: the option that prints what one run has; None to do the run.
    """
    one_run = f"{printing} prints what one run has" if printing else "this is one run"
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        problem, instead = f"belongs to a sweep, and {one_run}", "leave it out"
        if sweeps and key == "hydra.run.dir":
            problem = "is the folder of one run, and this is a sweep"
            remedy = instead = "write hydra.sweep.dir=<folder>, in which each run has its own"
        elif sweeps and not printing:
            continue
        elif key.startswith("hydra.sweep."):
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


def _check_against_own(override: str, own: Sequence[str], command: str) -> None:
    """Refuses a key that the config has not and that resembles one of a command's own keys, such as `serve.port`."""
    key, _, value = override.lstrip("+~").partition("=")
    by_name = {name.rpartition(".")[2]: name for name in own}
    if siblings := [name for name in own if "." in key and name.rpartition(".")[0] == key.rpartition(".")[0]]:
        raise UserError(key, "there is no such key", got=value or "nothing", remedy=choice_remedy(key, siblings))
    alike = {name: difflib.SequenceMatcher(None, name, key).ratio() for name in by_name}
    most = max(alike, key=alike.__getitem__, default="")
    if not alike or alike[most] < LIKE or key in suggest.known_keys(command):
        return
    others = [difflib.SequenceMatcher(None, meant.key, key).ratio() for meant in suggest.suggestions(key, command)]
    others += [1.0] if alike[most] < 1 and suggest.of_other_commands(key, command) else []
    if alike[most] >= max(others, default=0):
        raise UserError(key, "there is no such key", got=value or "nothing", remedy=f"did you mean {by_name[most]}?")


def _not_an_override(word: str, following: Sequence[str], command: str) -> UserError:
    key, value = word.strip("+~="), following[0] if following and "=" not in following[0] else ""
    if key in catalog.choices("recipe"):
        suggestion = f"did you mean +recipe={key}?"
    elif key == "recipe":
        suggestion = f"did you mean +recipe={value or '<name>'}?"
    elif file := recipe_file.meant_by(word):
        suggestion = f"did you mean {file}?"
    else:
        suggestion = suggest.remedy(suggest.suggestions(key, command), value)
    remedy = suggestion or "for instance +recipe=grpo_arithmetic steps=10"
    return UserError("command line", "must be words such as key=value", got=word or "an empty word", remedy=remedy)


def _unknown_option(name: str, value: str, command: str) -> UserError:
    if close := difflib.get_close_matches(name, OPTIONS, n=1, cutoff=suggest.VERY_LIKE):
        remedy = f"did you mean {close[0]}?"
    elif suggested_keys := suggest.suggestions(name.lstrip("-"), command):
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


# -- values, as Hydra reads them -------------------------------------------------------------------------------------
WITH_FUNCTIONS = (
    "write interval(<low>,<high>) or tag(log,interval(<low>,<high>)) in a sweep=optuna, or range(<start>,<stop>,<step>)"
    " or values with commas; quote a text that has parentheses twice"
)
"""The remedy for a value with a function that Hydra does not have, or with other arguments."""


def parse_overrides(overrides: Sequence[str], command: str) -> list[Any]:
    """Parses these overrides with Hydra's own parser; raises UserError for the first that it cannot read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    parsed: list[Any] = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except Exception as error:  # for unexpected values also a RecursionError, a ValueError and the like
            key, value = key_of(override), override.partition("=")[2]
            if match := re.match(r"\w+ while evaluating '(.*?)': (.*)", str(error)):
                problem = f"has a function that cannot be read ({match[2]})"
                raise UserError(key, problem, got=match[1], remedy=WITH_FUNCTIONS) from None
            remedy = f"if it is a string, {_quoted_twice(override.partition('=')[0], value)}"
            raise UserError(key, "the value cannot be read", got=value, remedy=remedy) from None
    return parsed


def of_one_run(overrides: Sequence[str], command: str) -> list[Any]:
    """These overrides as Hydra's objects, with one value each; a group's `null` is the empty list that Hydra needs.

    Raises UserError: a value cannot be read, there are several, or a group's is neither a name nor a list of names, or
    is null although something must be chosen.
    """
    # Hydra refuses keys that are the user's own, unless it is told to add them.
    words = [f"++{o}" if o.startswith(TEMPLATE_VARIABLES) else o for o in overrides]
    return [_of_one_run(parsed, command) for parsed in parse_overrides(words, command)]


def _of_one_run(parsed: Any, command: str) -> Any:
    key, got = key_of(parsed.input_line), parsed.input_line.partition("=")[2]
    group, value = parsed.key_or_group, parsed.value()
    if parsed.is_sweep_override():
        remedy = f"give one value, sweep with rlft {command} -m, or write a list as '[a,b]'"
        remedy += "" if group in catalog.groups() else f"; if it is one text, {_quoted_twice(key, got)}"
        raise UserError(key, "has several values but this is no sweep", got=got, remedy=remedy)
    groups = catalog.groups(command)
    chooses = group in (*groups, "base") or "/" in group
    if parsed.is_delete() or not chooses or isinstance(value, Mapping):  # a mapping sets keys of the chosen file
        return parsed
    shown = "+recipe" if key == "recipe" else key
    if value is None:
        may_be_none = group in suggest.SEVERAL or (group in groups and catalog.may_be_absent(group, command))
        if not may_be_none:
            raise UserError(shown, "something must be chosen", got="null", remedy=choose_one(group, command))
        [nothing] = parse_overrides([f"{group}=[]"], command)
        return nothing
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        kind = "a name or a list of names" if group in suggest.SEVERAL else "a name"
        raise UserError(shown, f"must be {kind}", got=got or "nothing", remedy=choose_one(group, command))
    if isinstance(value, list) and value and group in groups and group not in suggest.SEVERAL:
        remedy = f"write {shown}={names[0]}"
        remedy += f", or for a run of each rlft {command} -m {shown}={','.join(names)}" if len(names) > 1 else ""
        raise UserError(shown, "takes one name", got=got, remedy=remedy)
    return parsed


def choose_one(group: str, command: str) -> str:
    names = catalog.choices(group, command)
    return f"choose one of {', '.join(names)}" if names else f"leave it out; `rlft {command} --cfg job` shows every key"


def _quoted(path: str) -> str:
    """A path as Hydra's value, in quotes where it has characters that mean something there."""
    return path if re.fullmatch(r"[\w./-]+", path) else "'" + path.replace("'", "\\'") + "'"


def _quoted_twice(key: str, value: str) -> str:
    return f"""quote it twice: "{key}='{value}'\" """.rstrip()
