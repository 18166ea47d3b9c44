"""Composes YAML and overrides into a plain config, and words the errors of Hydra and OmegaConf as rlft's own.

`overrides.py` reads what was typed, `resolved.py` types the config. Only this file imports OmegaConf.
"""

from __future__ import annotations

import itertools
import logging
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rlft.config import catalog, command as commands, recipe_file, suggest
from rlft.config.choices import choice_remedy
from rlft.config.instantiate import locate
from rlft.config.keys import fields_of
from rlft.config.overrides import HELP, TEMPLATE_VARIABLES, Arguments, choose_one, of_one_run, parse_overrides
from rlft.config.suggest import SEVERAL, known_keys, unknown_in_section, unknown_key
from rlft.types import Mistakes, UserError

logger = logging.getLogger(__name__)
USUAL = "train"
"""The command of a config that names none. Its YAML gives every key a value: other commands compose groups with it."""

FILES = {  # {key of a file that must be given: what the file holds, with {command} for the command that needs it}
    "demonstrations.path": 'a file with rows such as {"prompt": "What is 1 + 1?", "completion": "2"}; '
    "to try it without one: rlft {command} +recipe={command}_arithmetic",
    "preferences.path": 'a file with rows such as {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}; '
    "to try it without one: rlft {command} +recipe={command}_arithmetic",
    "data.path": 'a file with rows such as {"prompt": "What is 1 + 1?", "answer": "2"}; data=arithmetic needs none',
}


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
    from omegaconf import OmegaConf, open_dict

    composed, choices, keys = _with_overrides(overrides, config_dir, command, requires=requires)
    try:
        _replace_values(composed, REQUIRED, MISSING)
        OmegaConf.select(composed, "name", throw_on_missing=True)  # a part of the folder
        folder = Path(composed.hydra.run.dir)
        with open_dict(composed):
            del composed["hydra"]
            for group in catalog.groups(command):
                # A group is set to null, and none of its keys is typed: keys that a recipe sets in it are dropped, too.
                empties = f"{group}=[]" in choices and group not in SEVERAL
                if empties and not any(key.key_or_group.startswith(f"{group}.") for key in keys):
                    composed.pop(group, None)
    except Exception as error:
        raise refusal(error, command) or error from None
    return Composed(plain=plain(composed), folder=folder)


def _with_overrides(
    overrides: Sequence[str], config_dir: str | Path | None, command: str, *, requires: bool = True
) -> tuple[Any, list[str], list[Any]]:
    """(the config with Hydra's section, in which keys may still lack values; the choices; the keys that were set)."""
    from hydra import compose as hydra_compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    read = of_one_run(overrides, command)
    extend_hydra(requires=requires, command=command)
    GlobalHydra.instance().clear()
    primary, *others = [folder.resolve() for folder in reversed(catalog.folders(command))]
    others += [Path(config_dir).resolve()] if config_dir else []
    keys = [one for one in read if _sets_a_key(one, (primary, *others))]
    mistakes, choices, groups = Mistakes(), [], {*catalog.groups(command)}
    for one in (one for one in read if one not in keys):
        with mistakes:
            if one.key_or_group in {*catalog.groups()} - groups:
                raise unknown_key(one.key_or_group, command, got=one.input_line.partition("=")[2])
            choices.append(_choice(one, command))
    try:
        with initialize_config_dir(str(primary), version_base="1.3"):
            composed = hydra_compose(command, [*choices, *_search_path(others)], return_hydra_config=True)
            is_open = "data" in groups and not any(choice.startswith("data=") for choice in choices)
            if is_open and _has_a_file_of_data(composed, keys):
                choices.append("data=jsonl")
                composed = hydra_compose(command, [*choices, *_search_path(others)], return_hydra_config=True)
        for key in keys:
            with mistakes:
                _set_key(composed, key, command)
    except Exception as error:
        raise refusal(error, command) or error from None
    mistakes.refuse()
    return composed, choices, keys


def answer(command: str, parsed: Arguments) -> str:
    """The help of a command, or the config as --cfg asks for it, with what refers to other keys as it is written."""
    from omegaconf import OmegaConf, open_dict

    composed, _, _ = _with_overrides(parsed.overrides, parsed.config_dir, command)
    if parsed.asks == HELP[0]:
        return str(composed.hydra.help.template)
    with open_dict(composed):
        hydra = composed.pop("hydra")
    parts = {"job": [composed], "hydra": [OmegaConf.create({"hydra": hydra})]}
    parts["all"] = [*parts["hydra"], *parts["job"]]
    return "".join(map(OmegaConf.to_yaml, parts[str(parsed.asks)]))


def _has_a_file_of_data(composed: Any, keys: Iterable[Any]) -> bool:
    """Whether data.path names a local file or folder, where the source of the data that is chosen reads none."""
    from omegaconf import OmegaConf

    typed = next((one.value() for one in keys if one.key_or_group == "data.path" and not one.is_delete()), None)
    path = typed or OmegaConf.select(composed, "data.path", throw_on_missing=False)
    choice = OmegaConf.select(composed, "hydra.runtime.choices.data")
    if not choice:
        return isinstance(path, str) and recipe_file.is_local(path) and "_target_" not in (composed.get("data") or ())
    file = catalog.files("data").get(choice)
    is_read = file is None or any("path" in catalog.entries(source) for source in (file, *catalog.bases(file)))
    return isinstance(path, str) and not is_read and recipe_file.is_local(path)


def _search_path(folders: Sequence[Path]) -> list[str]:
    """The override that makes Hydra look for choices in these folders, too; none for no folders."""
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []


def _sets_a_key(override: Any, folders: Iterable[Path]) -> bool:
    """Whether the override is of a key, and not a choice in a group, which has a folder, or one of Hydra's own keys."""
    name = override.key_or_group
    if override.package is not None or "/" in name or name.partition(".")[0] == "hydra":
        return False
    return isinstance(override.value(), Mapping) or not any((folder / name).is_dir() for folder in folders)


def _choice(override: Any, command: str) -> str:
    """The override for Hydra, in which files have names that Hydra reads as one word."""
    value, group = None if override.is_delete() else override.value(), override.key_or_group
    if group == "recipe" and str(value).endswith(recipe_file.SUFFIXES):
        recipe_file.lines_of(str(value))  # refuses a file that is not there, with all other mistakes
        return f"+recipe={recipe_file.encoded(str(value))}"
    if group != "reward" or not isinstance(value, str | list):
        return override.input_line
    names = recipe_file.reward_choices([value] if isinstance(value, str) else value, Path())
    return f"reward={names[0] if isinstance(value, str) else '[' + ','.join(names) + ']'}"


def _set_key(config: Any, override: Any, command: str, *, recorded: bool = False) -> None:
    """Does to the config what an override says; refuses a key that the config has not, or has already.

    recorded: whether the config is a run's, which keeps its keys, but for variables of its chat template, and of whose
    keys alone one is suggested.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.errors import ConfigCompositionException

    key, got = override.key_or_group, override.input_line.partition("=")[2]
    may_add = not recorded or key.startswith(f"{TEMPLATE_VARIABLES}.")
    has_key, adds = _has(config, key), may_add and (override.is_force_add() or override.is_add())
    if recorded and override.is_delete():
        problem, remedy = "cannot be taken out of the config of a run", f"write {key}=<value>, or leave it out"
        raise UserError(key, problem, got=f"~{key}", remedy=remedy)
    if not (recorded or has_key or adds or override.is_delete()) and _is_argument(key, config):
        [override] = parse_overrides([f"++{override.input_line}"], command)
    elif not (has_key or adds):
        raise _unknown(key, config, command, None if override.is_delete() else got or "nothing", recorded=recorded)
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except ConfigCompositionException as error:
        if override.is_add() and has_key:
            problem, remedy = "a plus adds a key, and this one exists", f"write {key}=<value>"
            raise UserError(f"+{key}", problem, remedy=remedy) from None
        if (inner := str(getattr(error.__cause__, "full_key", ""))).startswith(f"{key}."):  # of `reward={a: 1}`
            raise _unknown(inner, config, command, None, recorded=recorded) from None
        raise refusal(error, command, key) or error from None


def _is_argument(key: str, config: Any) -> bool:
    """Whether the key may be an argument of a reward of the user's own, which is refused by its signature if not."""
    from omegaconf import OmegaConf

    target = OmegaConf.select(config, f"{key.rpartition('.')[0]}._target_") if key.startswith("reward.") else None
    return isinstance(target, str) and not target.startswith("rlft.")


def _unknown(key: str, config: Any, command: str, got: str | None, *, recorded: bool) -> UserError:
    """The refusal of a key that the config has not, with the keys that its section has if only the user's YAML does."""
    from omegaconf import DictConfig, OmegaConf

    refused = unknown_key(key, command, [k for k in known_keys(command) if _has(config, k)] if recorded else None, got)
    section, _, name = refused.key.rpartition(".")
    keys = OmegaConf.select(config, section) if "." in section else None
    of_rlft = any(known.startswith(f"{section}.") for known in known_keys(command))
    if of_rlft or not isinstance(keys, DictConfig) or name in keys:
        return refused
    names = [str(known) for known in keys if known != "_target_"]
    with_keys = unknown_in_section(name, None, names, section, command)
    return UserError(with_keys.key, with_keys.problem, got=got, remedy=with_keys.remedy)


def new_folder(name: str, below: str = "runs") -> str:
    """The default folder, which does not exist yet, of a run (or of a sweep, below `sweeps`) that starts now."""
    from datetime import datetime

    folder = Path(below, name, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    # Runs that start within the same second get different folders.
    choices = itertools.chain([folder], (folder.with_name(f"{folder.name}_{n}") for n in itertools.count(2)))
    return str(next(choice for choice in choices if not choice.exists()))


def extend_hydra(*, requires: bool = True, command: str = USUAL) -> None:
    """Adds to Hydra what rlft's YAML needs.

    These are the resolvers of the commands' help and of `rlft_run_dir` (a resumed run's folder, or runs/<name>/<time>),
    and, if `requires`, `???` as a value that requires its key: merging would keep the value of a file that comes
    before. Hydra's own keys are left to Hydra. Of a recipe's file, keys of other commands than this are left out.
    """
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import DictConfig, OmegaConf
    from yaml import YAMLError

    groups = catalog.groups()

    class YamlFiles(FileConfigSource):
        requires_keys: ClassVar[bool] = requires

        def is_config(self, config_path: str) -> bool:
            own = recipe_file.decoded(config_path) or recipe_file.reward_in(config_path)
            return bool(own) or super().is_config(config_path)

        def load_config(self, config_path: str) -> ConfigResult:
            named = recipe_file.decoded(config_path)
            try:
                loaded = self._of_the_user(config_path) or super().load_config(config_path)
            except (UnicodeDecodeError, YAMLError, OSError) as error:
                path = named[1] if named else str(Path(self.path, self._normalize_file_name(config_path)))
                raise catalog.not_yaml(path, error) from None
            if not self.requires_keys:
                return loaded
            for key in loaded.config if isinstance(loaded.config, DictConfig) else ():
                if key in groups and OmegaConf.is_missing(loaded.config, key):
                    problem, remedy = "is chosen in a list of defaults", f"write `- override /{key}: ???` there"
                    raise UserError(str(key), problem, got=MISSING, remedy=remedy)
            _replace_values(loaded.config, MISSING, REQUIRED)
            return loaded

        def _of_the_user(self, config_path: str) -> ConfigResult | None:
            """The content of a recipe's file, or the section of a reward without YAML; None for another config."""
            content, named = recipe_file.reward_in(config_path), recipe_file.decoded(config_path)
            if named is not None:
                recipe_file.lines_of(named[1])
                read: Any = OmegaConf.to_container(OmegaConf.load(recipe_file.located(named[1])), resolve=False)
                left_out: list[str] = []
                read = recipe_file.without(read, lambda key: suggest.is_of_others(key, command), left_out)
                if left_out:
                    _warn_once(
                        f"{named[1]} has keys that rlft {command} does not read: {', '.join(dict.fromkeys(left_out))}"
                    )
                content = recipe_file.as_recipe(read, *named)
            elif not content:
                return None
            for reward in () if named else content.values():
                locate(reward["_target_"], "reward")
            config = OmegaConf.create()
            for key, value in content.items():
                OmegaConf.update(config, key, value, force_add=True)
            header = {"package": "_global_" if named else None}
            return ConfigResult(config=config, path=self.path, provider=self.provider, header=header)

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


@cache
def _warn_once(text: str) -> None:
    """Logs a warning once per process: a file is read for each composition of each job of a sweep."""
    logger.warning(text)


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

    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise refusal(error, str(composed.get("command", USUAL))) or error from None


def changed(
    config: dict[str, Any], overrides: Sequence[str], config_dir: Path | None, command: str = USUAL
) -> dict[str, Any]:
    """A run's config with `key=value` changes of existing keys; `data=<choice>` replaces the whole section."""
    from omegaconf import OmegaConf

    read, result = of_one_run(overrides, command), OmegaConf.create(config)
    # Sections that its root does not require, and the run has not, get their defaults.
    added = {field.name for field in fields_of(commands.named(command).root) if field.has_default}
    if missing := {one.key_or_group.partition(".")[0] for one in read} & added - config.keys():
        defaults = compose([], config_dir, command)
        result.update({section: defaults[section] for section in missing if section in defaults})
    # Plain keys come first, because a group's YAML may refer to them; then groups; then keys of the chosen files.
    mistakes = Mistakes()
    for one in sorted(read, key=lambda one: _rank(one.key_or_group, command)):
        key = one.key_or_group
        if key in catalog.groups(command) and (key in config or key in added):
            # The section is composed by the command whose keys all have defaults if it has the group, else by this one.
            composer = USUAL if key in catalog.groups(USUAL) else command
            required = [f"{name}=unread" for name in FILES if composer != USUAL and name.partition(".")[0] in config]
            of_section = [o for o in overrides if o.startswith(f"{key}.")]
            words = [one.input_line, *(o for o in required if not o.startswith(f"{key}.")), *of_section]
            referred = {name: OmegaConf.select(result, name) for name in catalog.referred_to(key)}
            words += [f"{name}={value}" for name, value in referred.items() if value is not None]
            section = compose(words, config_dir, composer).get(key, {})
            if key == "generation":
                engine = result[key]["engine"] = section["engine"]  # the sampling keys stay unchanged
                if engine in section:  # only the engine's own section is added
                    result[key].setdefault(engine, section[engine])
            else:
                result[key] = section
        else:
            with mistakes:
                _set_key(result, one, command, recorded=True)
    mistakes.refuse()
    return plain(result)


def _rank(key: str, command: str) -> int:
    """Position of a key in the order in which changes are applied."""
    groups = [group for group in catalog.groups(command) if group != "recipe"]  # no choice of a section
    return 0 if any(key in catalog.referred_to(group) for group in groups) else 1 if key in groups else 2


def _has(config: Any, key: str) -> bool:
    """Whether the config has the key, be it without a value yet."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    missing = object()
    try:
        return OmegaConf.select(config, key, default=missing, throw_on_missing=True) is not missing
    except MissingMandatoryValue:
        return True


# -- Hydra's errors in rlft's words ----------------------------------------------------------------------------------
def refusal(error: BaseException, command: str = USUAL, key: str = "command line") -> UserError | None:
    """The user's mistake behind an error of Hydra, OmegaConf or the YAML parser; None for an error of rlft's own code.

    For unexpected values and YAML, these libraries also raise TypeErrors, ValueErrors, RecursionErrors and the like.
    """
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

    text = str(error)
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        frames = traceback.extract_tb(error.__traceback__)
        if not frames or Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1]):
            return None
        return UserError(key, f"cannot be understood ({_first_line(error)})", remedy=f"see rlft {command} --help")
    wrong = str(getattr(error, "full_key", None) or "")
    if isinstance(error, MissingMandatoryValue) and wrong:
        meaning = catalog.meaning(wrong, command)
        about = f" ({meaning.comment})" if meaning and meaning.comment else ""
        about = f", {FILES[wrong].replace('{command}', command)}" if wrong in FILES else about
        return UserError(wrong, "has no value yet", remedy=f"give {wrong}=<value>{about}")
    if isinstance(error, InterpolationKeyError):
        missing = match[1] if (match := re.search(r"'([^']+)' not found", text)) else "?"
        problem = f"refers to a key that does not exist, ${{{missing}}}"
        return UserError(wrong or "config", problem, remedy="name an existing key")
    if wrong == "hydra.run.dir" and "resolving interpolation" in text:  # its default has the name
        return UserError("name", "must be a text that can name a folder", remedy="for instance name=my_run")
    if isinstance(error, MissingConfigException) and (
        match := re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    ):
        group, _, name = match[1].rpartition("/")
        return _unknown_choice(group, name, command)
    if match := re.search(r"Could not override[^']*'([^'=@]+)(?:.* use \+[^=]*=(.*))?", text, re.DOTALL):
        return unknown_key(match[1], command, got=match[2])  # a group in which no file chooses
    if match := re.search(r"You must specify '([^']+)'", text):
        return UserError(match[1], "something must be chosen", got="nothing", remedy=choose_one(match[1], command))
    if match := re.search(r"Multiple values for (\S+?)\.? ", text):
        problem = "a plus adds a choice, and one is chosen already"
        return UserError(f"+{match[1]}", problem, remedy=f"write {match[1]}=<choice>")
    if match := re.search(r"In '([^']+)': (\w+) raised while composing config", text):
        problem = "must hold a section of keys" if match[2] == "ConfigTypeError" else f"cannot be used ({match[2]})"
        return UserError(f"{match[1]}.yaml", problem, remedy="write it as lines of `key: value`")
    problem = f"cannot be understood ({_first_line(error)})"
    return UserError(wrong or key, problem, remedy=f"see rlft {command} --help")


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:200]


def _unknown_choice(group: str, name: str, command: str) -> UserError:
    known = catalog.choices(group, command)
    if not known:
        return unknown_key(group, command)
    remedy = choice_remedy(name, known)
    if name.lower() in ("none", "off") and (group == "logger" or catalog.may_be_absent(group, command)):
        remedy = f"write {group}=null for none"
    remedy += "; for one of your own write file.py:function" if group == "reward" else ""
    shown = "+recipe" if group == "recipe" else group
    return UserError(shown, "is not one of its choices", got=name or "nothing", remedy=remedy)
