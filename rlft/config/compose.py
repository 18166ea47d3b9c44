"""Composes YAML into a plain config, and words the errors of Hydra and OmegaConf as rlft's own.

`resolved.py` types the config. Only this file and commands/arguments.py import Hydra, and this one alone OmegaConf.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from rlft.config import catalog, suggest
from rlft.config import command as commands
from rlft.config.choices import choice_remedy
from rlft.config.suggest import SEVERAL, unknown_in_section, unknown_key
from rlft.types import UserError

USUAL = "train"
"""The command of a config that names none. Its YAML gives every key a value: other commands compose groups with it."""

FILES = {
    "demonstrations.path": 'a file with rows such as {"prompt": "What is 1 + 1?", "completion": "2"}; '
    "to try it without one: rlft {command} +recipe={command}_arithmetic",
    "preferences.path": 'a file with rows such as {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}; '
    "to try it without one: rlft {command} +recipe={command}_arithmetic",
    "data.path": 'a file with rows such as {"prompt": "What is 1 + 1?", "answer": "2"}; data=arithmetic needs none',
}
"""{key of a file that must be given: what the file holds, with {command} for the command that needs it}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A plain, resolved config, and the folder that hydra.run.dir gives the run."""

    plain: dict[str, Any]
    folder: Path


def compose(
    overrides: Sequence[str], config_dir: str | Path | None = None, command: str = USUAL, *, requires: bool = True
) -> dict[str, Any]:
    """The plain, resolved config of this command with these overrides; raises UserError if Hydra refuses one.

    `requires`: whether a key that a recipe requires must be given although a file before it has a value; False for what
    trains nothing, and takes that value.
    """
    return compose_run(overrides, config_dir, command, requires=requires).plain


def compose_run(
    overrides: Sequence[str], config_dir: str | Path | None = None, command: str = USUAL, *, requires: bool = True
) -> Composed:
    """As `compose`, with the run's folder, which is not created."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf, open_dict

    # Hydra refuses keys that are the user's own, unless it is told to add them.
    overrides = [f"++{o}" if o.startswith(TEMPLATE_VARIABLES) else o for o in named_choices(overrides, command)]
    extend_hydra(requires=requires)
    GlobalHydra.instance().clear()
    primary, *more_folders = primary_folders(command)
    more_folders += [Path(config_dir).resolve()] if config_dir else []
    search = [search_path(more_folders)] if more_folders else []
    try:
        with initialize_config_dir(str(primary), version_base="1.3"):
            composed = hydra_compose(command, [*overrides, *search], return_hydra_config=True)
        _replace_values(composed, REQUIRED, MISSING)
        OmegaConf.select(composed, "name", throw_on_missing=True)  # a part of the folder
        folder = Path(composed.hydra.run.dir)
        with open_dict(composed):
            del composed["hydra"]
            for group in catalog.groups(command):
                # A group is set to null, and none of its keys is typed: keys that a recipe sets in it are dropped, too.
                empties = f"{group}=[]" in overrides and group not in SEVERAL
                if empties and not any(override.startswith(f"{group}.") for override in overrides):
                    composed.pop(group, None)
    except UnicodeDecodeError as error:
        raise _not_utf8(config_dir) or error from None
    except Exception as error:
        refused = refusal(error, command)
        choices = [override for override in overrides if _is_of_a_group(override, command)]
        if refused is not None and len(choices) < len(overrides) and _is_of_another_library(refused.key, command):
            with contextlib.suppress(UserError):  # if more is wrong, the first problem is reported
                plain_choices = compose(choices, config_dir, command, requires=requires)
                refused = _with_keys_of_section(refused, plain_choices, command)
        raise refused or error from None
    return Composed(plain=plain(composed), folder=folder)


def _not_utf8(config_dir: str | Path | None) -> UserError | None:
    """The refusal of the first of the user's YAML files that is not UTF-8 text; None if all are."""
    for file in sorted(Path(config_dir).rglob("*.yaml")) if config_dir else ():
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            return UserError(str(file), f"is not UTF-8 text ({error.reason})", remedy="save it as UTF-8")
        except OSError:
            continue
    return None


def primary_folders(command: str) -> list[Path]:
    """The folder of a command's own YAML, then the other folders in which Hydra looks for choices."""
    return [folder.resolve() for folder in reversed(catalog.folders(command))]


def search_path(folders: Sequence[Path]) -> str:
    """The override that makes Hydra look for choices in these folders, too."""
    return f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"


def _is_of_another_library(key: str, command: str) -> bool:
    """Whether a key may belong to a section of the user's own YAML: `generation.mine.url`, `reward.mine.limit`."""
    section = key.rpartition(".")[0]
    return "." in section and not any(known.startswith(f"{section}.") for known in suggest.known_keys(command))


def _with_keys_of_section(refused: UserError, plain: Mapping[str, Any], command: str) -> UserError:
    """The refusal of a key, with the keys that its section has in this config; unchanged if it has no such section."""
    section: Any = plain
    for name in (path := refused.key.split("."))[:-1]:
        section = section.get(name) if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or path[-1] in section:
        return refused
    names = [name for name in section if name != "_target_"]
    with_keys = unknown_in_section(path[-1], None, names, ".".join(path[:-1]), command)
    return UserError(with_keys.key, with_keys.problem, got=refused.got, remedy=with_keys.remedy)


TEMPLATE_VARIABLES = "prompts.template_variables"
OWN_FILES = "logger=[jsonl]"
"""What `logger=null` means: only the logger that writes the run's own files."""


def named_choices(overrides: Sequence[str], command: str) -> list[str]:
    """Checks that every group's value names choices, and replaces `null` by an empty list, which Hydra needs.

    Raises:
        UserError: a group's value is neither a name nor a list of names, or is null although something must be chosen.
    """
    return [
        _named_choice(override, command) if _is_of_a_group(override, command) else override for override in overrides
    ]


def _is_of_a_group(override: str, command: str) -> bool:
    """Whether the override chooses YAML files: `reward=..`, `+recipe=..`, `hydra/help=..`, `base=..`."""
    key, equals, _ = override.lstrip("+").partition("=")
    group = key.partition("@")[0]
    return bool(equals) and not key.startswith("~") and (group in (*catalog.groups(command), "base") or "/" in group)


def _named_choice(override: str, command: str) -> str:
    key, _, written = override.partition("=")
    group = key.lstrip("+").partition("@")[0]
    [parsed] = parse_overrides([override], command)
    value = parsed.value()
    # In a sweep, Hydra expands the values and each job is checked; otherwise it refuses them.
    if parsed.is_sweep_override():
        if None not in getattr(value, "list", ()):
            return override
        nothing = _nothing_chosen(key, group, command).partition("=")[2]
        return re.sub(r"(?<=[=,])null(?=,|$)", nothing, override)
    if value is None:
        return _nothing_chosen(key, group, command)
    names = value if isinstance(value, list) else [value]
    are_names = all(isinstance(name, str) and name for name in names)
    if isinstance(value, list) and value and are_names and group in catalog.groups(command) and group not in SEVERAL:
        remedy = f"write {key}={names[0]}"
        remedy += f", or for a run of each rlft {command} -m {key}={','.join(names)}" if len(names) > 1 else ""
        raise UserError(_shown_group(key), "takes one name", got=written, remedy=remedy)
    if isinstance(value, Mapping) or are_names:
        return override  # a mapping sets keys of the chosen file
    kind = "a name or a list of names" if group in SEVERAL else "a name"
    raise UserError(_shown_group(key), f"must be {kind}", got=written or "nothing", remedy=_choose(group, command))


def parse_overrides(overrides: Sequence[str], command: str) -> list[Any]:
    """Parses these overrides with Hydra's own parser; raises UserError for the first that it cannot read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    parsed: list[Any] = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except Exception as error:
            key = override.lstrip("+~").partition("=")[0]
            raise refusal(error, command, key) or error from None
    return parsed


def _nothing_chosen(key: str, group: str, command: str) -> str:
    """The override that chooses nothing in a group; raises UserError if something must be chosen."""
    if group == "logger":
        return OWN_FILES
    if group == "reward" or (group in catalog.groups(command) and catalog.may_be_absent(group, command)):
        return f"{group}=[]"
    raise UserError(_shown_group(key), "something must be chosen", got="null", remedy=_choose(group, command))


def _shown_group(key: str) -> str:
    return "+recipe" if key.lstrip("+") == "recipe" else key.lstrip("+")


def _choose(group: str, command: str) -> str:
    names = catalog.choices(group, command)
    return f"choose one of {', '.join(names)}" if names else f"leave it out; `rlft {command} --cfg job` shows every key"


WITH_FUNCTIONS = (
    "write interval(<low>,<high>) or tag(log,interval(<low>,<high>)) in a sweep=optuna, or range(<start>,<stop>,<step>)"
    " or values with commas; quote a text that has parentheses twice"
)
"""The remedy for a value with a function that Hydra does not have, or with other arguments."""


def refusal(error: Exception, command: str, key: str = "command line") -> UserError | None:
    """The user's mistake behind an error of Hydra, OmegaConf or their parsers; None for an error of rlft's own code.

    For unexpected values and YAML, these libraries also raise TypeErrors, ValueErrors, RecursionErrors and the like.
    """
    if match := re.match(r"\w+ while evaluating '(.*?)': (.*)", str(error)):
        problem = f"has a function that cannot be read ({match[2]})"
        return UserError(key, problem, got=match[1], remedy=WITH_FUNCTIONS)
    if (explained := explain(error, command)) is not None:
        return explained
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1]):
        return None
    return UserError(key, f"cannot be understood ({_first_line(error)})", remedy=f"see rlft {command} --help")


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:200]


def new_folder(name: str, below: str = "runs") -> str:
    """The default folder, which does not exist yet, of a run (or of a sweep, below `sweeps`) that starts now."""
    from datetime import datetime

    folder = Path(below, name, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    # Runs that start within the same second get different folders.
    choices = itertools.chain([folder], (folder.with_name(f"{folder.name}_{n}") for n in itertools.count(2)))
    return str(next(choice for choice in choices if not choice.exists()))


def extend_hydra(*, requires: bool = True) -> None:
    """Adds to Hydra what rlft's YAML needs.

    These are the resolvers of the commands' help and of `rlft_run_dir` (a resumed run's folder, or runs/<name>/<time>),
    and, if `requires`, `???` as a value that requires its key: merging would keep the value of a file that comes
    before. Hydra's own keys are left to Hydra.
    """
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import DictConfig, OmegaConf

    groups = catalog.groups()

    class YamlFiles(FileConfigSource):
        requires_keys: ClassVar[bool] = requires

        def load_config(self, config_path: str) -> ConfigResult:
            loaded = super().load_config(config_path)
            if not self.requires_keys:
                return loaded
            for key in loaded.config if isinstance(loaded.config, DictConfig) else ():
                if key in groups and OmegaConf.is_missing(loaded.config, key):
                    problem, remedy = "is chosen in a list of defaults", f"write `- override /{key}: ???` there"
                    raise UserError(str(key), problem, got=MISSING, remedy=remedy)
            _replace_values(loaded.config, MISSING, REQUIRED)
            return loaded

    Plugins.instance()  # registers Hydra's own sources, of which this one replaces one
    SourcesRegistry.instance().types[YamlFiles.scheme()] = YamlFiles

    def run_dir(resume: str | None, name: str) -> str:
        return resume if resume not in (None, "auto") else new_folder(name)

    def choices(command: str) -> str:
        groups = {group: catalog.choices(group, command) for group in catalog.groups(command)}
        return "\n".join(f"{group}: {', '.join(names)}" for group, names in groups.items() if names)

    OmegaConf.register_new_resolver("rlft_choices", choices, replace=True)
    OmegaConf.register_new_resolver("rlft_help", lambda command: commands.named(command).help, replace=True)
    OmegaConf.register_new_resolver("rlft_usage", lambda command: commands.named(command).usage, replace=True)
    OmegaConf.register_new_resolver("rlft_run_dir", run_dir, replace=True, use_cache=True)


MISSING, REQUIRED = "???", "??? (required)"
"""A value that must be given, as a YAML has it, and as it is while files are merged and in `--cfg job`."""


def _replace_values(section: Any, old: str, new: str) -> None:
    """Replaces each value `old` in a section and the sections below it, but not in lists, nor in Hydra's section."""
    from omegaconf import DictConfig
    from omegaconf.nodes import AnyNode

    for key in section if isinstance(section, DictConfig) and isinstance(section._content, dict) else ():
        node = section._get_node(key)
        if key == "hydra":
            continue
        if isinstance(node, AnyNode) and node._value() == old:
            node._set_value(new)
        else:
            _replace_values(node, old, new)


def plain(composed: Any) -> dict[str, Any]:
    """The config as ordinary dicts and lists, with interpolations resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    command = str(composed.get("command", USUAL))
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise explain(error, command) or error from None


def changed(
    config: dict[str, Any], overrides: Sequence[str], config_dir: Path | None, command: str = USUAL
) -> dict[str, Any]:
    """A run's config with `key=value` changes of existing keys; `data=<choice>` replaces the whole section."""
    from omegaconf import OmegaConf

    result = OmegaConf.create(config)
    # Sections that were added after the run started, and which its root does not require, get their defaults.
    added = {field.name for field in fields(commands.named(command).root) if field.default is None}
    missing = {o.partition("=")[0].partition(".")[0] for o in overrides} & added - config.keys()
    if missing:
        defaults = compose([], config_dir, command)
        result.update({section: defaults[section] for section in missing if section in defaults})
    # Plain keys come first, because a group's YAML may refer to them; then groups; then keys of the chosen files.
    for override in sorted(overrides, key=lambda o: _rank(o.partition("=")[0], command)):
        key = override.partition("=")[0]
        if key in catalog.groups(command) and (key in config or key in added):
            # The section is composed by the command whose keys all have defaults if it has the group, else by this one.
            composer = USUAL if key in catalog.groups(USUAL) else command
            required = [f"{name}=unread" for name in FILES if composer != USUAL and name.partition(".")[0] in config]
            of_section = [o for o in overrides if o.startswith(f"{key}.")]
            words = [override, *(o for o in required if not o.startswith(f"{key}.")), *of_section]
            referred = {name: OmegaConf.select(result, name) for name in catalog.referred_to(key)}
            words += [f"{name}={value}" for name, value in referred.items() if value is not None]
            section = compose(words, config_dir, composer).get(key, {})
            if key == "generation":
                engine = result[key]["engine"] = section["engine"]  # the sampling keys stay unchanged
                if engine in section:  # only the engine's own section is added
                    result[key].setdefault(engine, section[engine])
            else:
                result[key] = section
        elif not _has(result, key):
            known = [name for name in suggest.known_keys(command) if _has(result, name)]
            refused = unknown_key(key, command, known, got=override.partition("=")[2] or "nothing")
            raise _with_keys_of_section(refused, config, command) if _is_of_another_library(key, command) else refused
        else:
            [parsed] = parse_overrides([override], command)
            if parsed.is_sweep_override():
                problem = "has several values but this is no sweep"
                raise UserError(key, problem, got=override.partition("=")[2], remedy="give one value")
            try:
                OmegaConf.update(result, key, parsed.value())
            except Exception as error:
                raise refusal(error, command, key) or error from None
    return plain(result)


def _rank(key: str, command: str) -> int:
    """Position of a key in the order in which changes are applied."""
    groups = [group for group in catalog.groups(command) if group != "recipe"]  # no choice of a section
    return 0 if any(key in catalog.referred_to(group) for group in groups) else 1 if key in groups else 2


def _has(config: Any, key: str) -> bool:
    from omegaconf import OmegaConf

    missing = object()
    return OmegaConf.select(config, key, default=missing) is not missing


# -- Hydra's errors in rlft's words ----------------------------------------------------------------------------------
def explain(error: BaseException, command: str = USUAL) -> UserError | None:
    """The user's mistake behind an error of Hydra, OmegaConf or the YAML parser; None for any other error."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
    from yaml import MarkedYAMLError

    text = str(error)
    if isinstance(error, MissingConfigException) and (
        match := re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    ):
        group, _, name = match[1].rpartition("/")
        return _unknown_choice(group, name, command)
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        line = f"line {error.problem_mark.line + 1}"
        return UserError(error.problem_mark.name, f"{line} is not YAML ({error.problem})", remedy="fix that line")
    if isinstance(error, OSError) and error.filename is not None:
        problem = f"cannot be written ({error.strerror})"
        return UserError("hydra.run.dir", problem, got=error.filename, remedy="choose another folder")
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    key = getattr(error, "full_key", None)
    if isinstance(error, MissingMandatoryValue) and key:
        meaning = catalog.meaning(key, command)
        remedy = f"give {key}=<value>" + (f" ({meaning.comment})" if meaning and meaning.comment else "")
        remedy = f"give {key}=<value>, {FILES[key].replace('{command}', command)}" if key in FILES else remedy
        return UserError(key, "has no value yet", remedy=remedy)
    if isinstance(error, InterpolationKeyError):
        missing = match[1] if (match := re.search(r"'([^']+)' not found", text)) else "?"
        problem = f"refers to a key that does not exist, ${{{missing}}}"
        return UserError(str(key or "config"), problem, remedy="name an existing key")
    if match := re.search(r"Could not override[^']*'([^'=@]+)", text):
        inner_key = str(getattr(error.__cause__, "full_key", ""))  # of `reward={a: 1}`
        typed = re.search(r"To append to your config use \+[^=]*=(.*)", text)
        key = inner_key if inner_key.startswith(f"{match[1]}.") else match[1]
        return unknown_key(key, command, got=typed[1] or "nothing" if typed and key == match[1] else None)
    if match := re.search(r"Could not append to config[^']*'([^'=@]+)|Could not append '([^'=@]+)", text):
        added_key = match[1] or match[2]
        return UserError(f"+{added_key}", "a plus adds a key, and this one exists", remedy=f"write {added_key}=<value>")
    if match := re.search(r"Could not delete[^']*'([^'=@]+)", text):
        return unknown_key(match[1], command)
    if match := re.search(r"You must specify '([^']+)'", text):
        return UserError(match[1], "something must be chosen", got="nothing", remedy=_choose(match[1], command))
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*?)'", text):
        remedy = f"sweep with rlft {command} -m, or write a list as '[a,b]'"
        if match[1] not in catalog.groups():
            remedy += f"""; if it is one text, quote it twice: "{match[1]}='{match[2]}'\" """.rstrip()
        return UserError(match[1], "has several values but this is no sweep", got=match[2], remedy=remedy)
    if match := re.search(r"Multiple values for (\S+?)\.? ", text):
        problem = "a plus adds a choice, and one is chosen already"
        return UserError(f"+{match[1]}", problem, remedy=f"write {match[1]}=<choice>")
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"""if it is a string, quote it twice: "{key}='{value}'\" """.strip()
        return UserError(key.lstrip("+~"), "the value cannot be read", got=value, remedy=remedy)
    if match := re.search(r"In '([^']+)': (\w+) raised while composing config", text):
        problem = "must hold a section of keys" if match[2] == "ConfigTypeError" else f"cannot be used ({match[2]})"
        return UserError(f"{match[1]}.yaml", problem, remedy="write it as lines of `key: value`")
    if str(key) == "hydra.run.dir" and "resolving interpolation" in text:  # its default has the name
        return UserError("name", "must be a text that can name a folder", remedy="for instance name=my_run")
    problem = f"cannot be understood ({_first_line(error)})"
    return UserError(str(key or "command line"), problem, remedy=f"see rlft {command} --help")


def _unknown_choice(group: str, name: str, command: str) -> UserError:
    known = catalog.choices(group, command)
    if not known:
        return unknown_key(group, command)
    if name.lower() in ("none", "off") and (group == "logger" or catalog.may_be_absent(group, command)):
        return UserError(group, "is not one of its choices", got=name, remedy=f"write {group}=null for none")
    remedy = choice_remedy(name, known)
    return UserError(_shown_group(group), "is not one of its choices", got=name or "nothing", remedy=remedy)
