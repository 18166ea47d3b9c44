"""YAML in, frozen dataclasses out; and everything that can be refused without loading a weight.

`build` turns a composed config into its verb's root (rlft.roots): every key is known, has its type and its bounds.
`rlft.check` holds the rules between parts. This file, multirun.py and cli.py are the only ones that know Hydra
and OmegaConf.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft import catalog, sampling_keys, suggest
from rlft.auto import resolved
from rlft.catalog import config_folder
from rlft.roots import ADDED_KEYS, ROOTS, RmConfig, Root, RunConfig, SampleConfig, SftConfig, Verb
from rlft.targets import from_mapping, instantiate
from rlft.types import UserError, lone_surrogate

if TYPE_CHECKING:
    from rlft.algorithm.protocol import Algorithm


REFERRED_TO = ("generation.max_tokens", "scoring.timeout", "token_budget")
"""Keys that the YAML of rewards refers to."""


FILES = {
    "demonstrations.path": 'a JSONL file with lines such as {"prompt": "What is 1 + 1?", "completion": "2"}; '
    "to try it without one: rlft sft +recipe=sft_arithmetic",
    "preferences.path": 'a JSONL file with lines such as {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}; '
    "to try it without one: rlft rm +recipe=rm_arithmetic",
    "data.path": 'a JSONL file with lines such as {"prompt": "What is 1 + 1?", "answer": "2"}; '
    "data=arithmetic needs none",
}
"""What a file that must be named holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A plain, resolved config, and the folder that hydra.run.dir gives the run."""

    plain: dict[str, Any]
    folder: Path


def compose(overrides: Sequence[str], config_dir: str | Path | None = None, verb: Verb = Verb.train) -> dict[str, Any]:
    """The plain, resolved config of this verb that these command-line overrides give.

    Raises:
        UserError: for whatever Hydra refuses in them.
    """
    return compose_run(overrides, config_dir, verb).plain


def compose_run(overrides: Sequence[str], config_dir: str | Path | None = None, verb: Verb = Verb.train) -> Composed:
    """As `compose`, with the run's folder, which is not made."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import open_dict

    overrides = named_choices(overrides, verb)
    register_resolvers()
    GlobalHydra.instance().clear()
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
            composed = hydra_compose(str(verb), [*overrides, *search], return_hydra_config=True)
        folder = Path(composed.hydra.run.dir)
        with open_dict(composed):
            del composed["hydra"]
    except Exception as error:
        raise refusal(error, verb) or error from None
    return Composed(plain=plain(composed), folder=folder)


OWN_FILES = "logger=[jsonl]"
"""What `logger=null` means: no logger but the one that writes the run's own files."""


def named_choices(overrides: Sequence[str], verb: Verb) -> list[str]:
    """The overrides, with every group's value checked to name choices, and `null` as a list of none, as Hydra takes it.

    Raises:
        UserError: a group's value that is neither a name nor a list of names, or null where something must be chosen.
    """
    return [_named_choice(override, verb) if _is_of_a_group(override, verb) else override for override in overrides]


def _is_of_a_group(override: str, verb: Verb) -> bool:
    """Whether the override chooses among YAML files: `reward=..`, `+recipe=..`, `hydra/help=..`, `base=..`."""
    key, equals, _ = override.lstrip("+").partition("=")
    group = key.partition("@")[0]
    return bool(equals) and not key.startswith("~") and (group in (*catalog.groups(verb), "base") or "/" in group)


def _named_choice(override: str, verb: Verb) -> str:
    key, _, written = override.partition("=")
    group = key.lstrip("+").partition("@")[0]
    [parsed] = parse_overrides([override], verb)
    value = parsed.value()
    if parsed.is_sweep_override():  # Hydra expands it in a sweep, whose jobs are looked at one by one, or refuses it
        has_null = None in getattr(value, "list", ())
        return _with_null_written_as(_nothing_chosen(key, group, verb), override) if has_null else override
    if value is None:
        return _nothing_chosen(key, group, verb)
    names = value if isinstance(value, list) else [value]
    if isinstance(value, Mapping) or all(isinstance(name, str) and name for name in names):
        return override  # a mapping sets keys of what is chosen
    kind = "a name or a list of names" if group in SEVERAL else "a name"
    raise UserError(_shown_group(key), f"must be {kind}", got=written or "nothing", remedy=_choose(group, verb))


def parse_overrides(overrides: Sequence[str], verb: Verb) -> list[Any]:
    """Hydra's own reading of these overrides.

    Raises:
        UserError: for the first that it cannot read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    parsed: list[Any] = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except Exception as error:
            key = override.lstrip("+~").partition("=")[0]
            raise refusal(error, verb, key) or error from None
    return parsed


SEVERAL = ("reward", "logger")
"""Groups of which several may be chosen at once."""


def _nothing_chosen(key: str, group: str, verb: Verb) -> str:
    """The override that chooses nothing of a group, where nothing may be chosen."""
    if group == "logger":
        return OWN_FILES
    if group == "reward" or (group in catalog.groups(verb) and catalog.may_be_absent(group, verb)):
        return f"{group}=[]"
    raise UserError(_shown_group(key), "something must be chosen", got="null", remedy=_choose(group, verb))


def _with_null_written_as(choice: str, override: str) -> str:
    """A sweep's override, `logger=null,console`, with the value of this one, `logger=[jsonl]`, for each null."""
    return re.sub(r"(?<=[=,])null(?=,|$)", choice.partition("=")[2], override)


def _shown_group(key: str) -> str:
    return "+recipe" if key.lstrip("+") == "recipe" else key.lstrip("+")


def _choose(group: str, verb: Verb) -> str:
    known = catalog.choices(group, verb)
    return f"choose one of {', '.join(known)}" if known else f"leave it out; `rlft {verb} --cfg job` shows every key"


def refusal(error: Exception, verb: Verb, key: str = "command line") -> UserError | None:
    """What a user got wrong when Hydra, OmegaConf or a parser of theirs raised this; None for an error of our own code.

    For values and YAML that they don't expect they also raise TypeErrors, ValueErrors, RecursionErrors and the like.
    """
    told = explain(error, verb)
    if told is not None:
        return told
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
        return None
    return UserError(key, f"cannot be understood ({_first_line(error)})", remedy=f"see rlft {verb} --help")


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:200]


def new_folder(name: str) -> str:
    """Where a run of this name begins now, if no folder is given for it."""
    from datetime import datetime

    return f"runs/{name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"


def register_resolvers() -> None:
    """`rlft_run_dir`: a resumed run's folder, or runs/<name>/<time>. `rlft_choices`: a verb's choices, for its help."""
    from omegaconf import OmegaConf

    def run_dir(resume: str | None, name: str) -> str:
        return resume if resume not in (None, "auto") else new_folder(name)

    def choices(verb: str) -> str:
        groups = {group: catalog.choices(group, verb) for group in catalog.groups(verb)}
        return "\n".join(f"{group}: {', '.join(names)}" for group, names in groups.items() if names)

    OmegaConf.register_new_resolver("rlft_choices", choices, replace=True)
    OmegaConf.register_new_resolver("rlft_run_dir", run_dir, replace=True, use_cache=True)


def plain(composed: Any) -> dict[str, Any]:
    """Interpolations resolved, as ordinary dicts and lists."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise explain(error) or error from None


SINCE_ADDED = {"alarms", "token_values"}
"""Sections that runs of older versions have not."""


def changed(
    config: dict[str, Any], overrides: Sequence[str], config_dir: Path | None, verb: Verb = Verb.train
) -> dict[str, Any]:
    """A run's config with `key=value` changes, of keys that are there; `data=<choice>` changes the whole section."""
    from omegaconf import OmegaConf

    result = OmegaConf.create(config)
    if verb is Verb.train:  # sections that there were not when the run began, with their defaults
        missing = {o.partition("=")[0].partition(".")[0] for o in overrides} & SINCE_ADDED - config.keys()
        if missing:
            defaults = compose([], config_dir)
            result.update({section: defaults[section] for section in missing})
    # Plain keys first, that a group's YAML may refer to; then groups; then keys of what was chosen.
    for override in sorted(overrides, key=lambda o: _turn(o.partition("=")[0], verb)):
        key = override.partition("=")[0]
        if key in catalog.groups(verb) and key in config:
            # By the verb that has no key without a default; with the section's own keys, which may be among those.
            whose = Verb.train if key in catalog.groups(Verb.train) else verb
            words = [override, *(o for o in overrides if o.startswith(f"{key}."))]
            given = {name: OmegaConf.select(result, name) for name in REFERRED_TO}
            words += [f"{name}={value}" for name, value in given.items() if value is not None and key == "reward"]
            section = compose(words, config_dir, whose).get(key, {})
            if key == "generation":
                result[key]["engine"] = section["engine"]  # how the run samples stays as it was
            else:
                result[key] = section
        elif OmegaConf.select(result, key, default=_MISSING) is _MISSING and not _was_added(key, config):
            raise unknown_key(key, verb, [name for name in suggest.known_keys(verb) if _has(result, name)])
        else:
            [parsed] = parse_overrides([override], verb)
            if parsed.is_sweep_override():
                problem = "has several values but this is no sweep"
                raise UserError(key, problem, got=override.partition("=")[2], remedy="give one value")
            try:
                OmegaConf.update(result, key, parsed.value())
            except Exception as error:
                raise refusal(error, verb, key) or error from None
    return plain(result)


def _was_added(key: str, config: Mapping[str, Any]) -> bool:
    """Whether the run is older than this key of a section that it has."""
    return key in ADDED_KEYS and isinstance(config.get(key.partition(".")[0]), Mapping)


def _turn(key: str, verb: Verb) -> int:
    groups = catalog.groups(verb)
    return 0 if key in REFERRED_TO else 1 if key in groups else 2


_MISSING = object()


def _has(config: Any, key: str) -> bool:
    from omegaconf import OmegaConf

    return OmegaConf.select(config, key, default=_MISSING) is not _MISSING


def build(config: Mapping[str, Any]) -> RunConfig:
    """The typed root of `rlft train` from a plain config; refuses unknown keys, wrong types, values out of bounds."""
    return _build(config, Verb.train)


def build_sft(config: Mapping[str, Any]) -> SftConfig:
    """As `build`, of `rlft sft`."""
    return _build(config, Verb.sft)


def build_rm(config: Mapping[str, Any]) -> RmConfig:
    """As `build`, of `rlft rm`."""
    return _build(config, Verb.rm)


def build_sample(config: Mapping[str, Any]) -> SampleConfig:
    """As `build`, of `rlft sample`."""
    return _build(config, Verb.sample)


def _build(config: Mapping[str, Any], verb: Verb) -> Any:
    root: type[Root] = ROOTS[verb]
    names = [field.name for field in fields(root)]
    # `+recpie=x` is a new key to Hydra; `recipe` itself is a group, not a key.
    for key in config:
        if isinstance(config[key], Mapping) and key == "recipe":
            problem = "its keys stay below `recipe` and would set nothing"
            raise UserError("+recipe", problem, remedy="make `# @package _global_` the first line of the recipe's file")
        if key not in names and difflib.get_close_matches(key, [*names, "recipe"], 1) == ["recipe"]:
            raise UserError(key, "there is no such key", got=config[key], remedy=f"did you mean +recipe={config[key]}?")
    if config.get("verb", verb) != verb:
        raise UserError("verb", f"this is rlft {verb}", got=config["verb"], remedy="leave it as it is")
    for group in ("algorithm", "data", "demonstrations", "preferences"):
        if group in names and group not in config and not catalog.may_be_absent(group, verb):
            raise UserError(group, "is missing", remedy=f"choose {group}={' or '.join(catalog.choices(group))}")
    _check_text(config, "")
    # An empty list of rewards or loggers composes to no section at all, and so does a group of which nothing is chosen.
    empty = {name: {} for name in ("reward", "logger", "data") if name in names}
    return from_mapping(root, {**empty, **resolved(config)}, "", verb)


def _check_text(value: Any, key: str) -> None:
    """Refuses texts and keys with half a character, which a recipe's YAML may hold as `"\\ud800"`."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_text(str(name), key)
            _check_text(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_text(inner, key)
    elif isinstance(value, str) and (found := lone_surrogate(value)):
        problem = f"holds half a character, the lone surrogate {found}, which is no text"
        raise UserError(key or "config", problem, remedy="take it out, or write the whole character")


def load_algorithm(name: str, **overrides: Any) -> Algorithm:
    """The algorithm of configs/algorithm/<name>.yaml with these keys overridden; needs no model.

    >>> rlft.load_algorithm("grpo", clip_high=0.28).clip_high
    0.28
    """
    return instantiate({**compose([f"algorithm={name}"])["algorithm"], **overrides}, "algorithm")


# -- Hydra's errors in our words -------------------------------------------------------------------------------------
def explain(error: BaseException, verb: Verb = Verb.train) -> UserError | None:
    """What a user got wrong when Hydra, OmegaConf or the YAML parser complains; None for anything else."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
    from yaml import MarkedYAMLError

    text = str(error)
    if isinstance(error, MissingConfigException) and (
        match := re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    ):
        group, _, name = match[1].rpartition("/")
        return _unknown_choice(group, name, verb)
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        place = f"line {error.problem_mark.line + 1}"
        return UserError(error.problem_mark.name, f"{place} is not YAML ({error.problem})", remedy="mend that line")
    if isinstance(error, OSError) and error.filename is not None:
        problem = f"cannot be written ({error.strerror})"
        return UserError("hydra.run.dir", problem, got=error.filename, remedy="choose another folder")
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    key = getattr(error, "full_key", None)
    if isinstance(error, MissingMandatoryValue) and key:
        told = catalog.meaning(key, verb)
        remedy = f"give {key}=<value>" + (f" ({told.comment})" if told and told.comment else "")
        remedy = f"give {key}=<value>, {FILES[key]}" if key in FILES else remedy
        return UserError(key, "has no value yet", remedy=remedy)
    if isinstance(error, InterpolationKeyError):
        absent = match[1] if (match := re.search(r"'([^']+)' not found", text)) else "?"
        return UserError(
            str(key or "config"), f"refers to a key that is not there, ${{{absent}}}", remedy="name a key that is"
        )
    if match := re.search(r"Could not override[^']*'([^'=@]+)", text):
        inner = str(getattr(error.__cause__, "full_key", ""))  # of `reward={a: 1}`
        return unknown_key(inner if inner.startswith(f"{match[1]}.") else match[1], verb)
    if match := re.search(r"Could not append to config[^']*'([^'=@]+)|Could not append '([^'=@]+)", text):
        given = match[1] or match[2]
        return UserError(f"+{given}", "a plus adds a key, and this one is there", remedy=f"write {given}=<value>")
    if match := re.search(r"Could not delete[^']*'([^'=@]+)", text):
        return unknown_key(match[1], verb)
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*?)'", text):
        remedy = "sweep with rlft train -m, or write a list as '[a,b]'"
        return UserError(match[1], "has several values but this is no sweep", got=match[2], remedy=remedy)
    if match := re.search(r"Multiple values for (\S+?)\.? ", text):
        return UserError(f"+{match[1]}", "a plus adds, and one is chosen already", remedy=f"write {match[1]}=<choice>")
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"""if it is a text, quote it twice: "{key}='{value}'\" """.strip()
        return UserError(key.lstrip("+~"), "the value cannot be read", got=value, remedy=remedy)
    problem = f"cannot be understood ({_first_line(error)})"
    return UserError(str(key or "command line"), problem, remedy=f"see rlft {verb} --help")


def _unknown_choice(group: str, name: str, verb: Verb) -> UserError:
    known = catalog.choices(group, verb)
    if not known:
        return unknown_key(group, verb)
    close = difflib.get_close_matches(name, known, n=1)
    remedy = (f"did you mean {close[0]}? All: " if close else "choose one of ") + ", ".join(known)
    return UserError(
        f"+{group}" if group == "recipe" else group, "is not one of its choices", got=name or "nothing", remedy=remedy
    )


def unknown_key(key: str, verb: Verb = Verb.train, known: Collection[str] | None = None) -> UserError:
    """The refusal of a key that the composed config doesn't have, with the most likely cure.

    known: the keys that there are; None for all of the verb.
    """
    if refused := sampling_keys.refusal(key):
        return UserError(key, refused[0], remedy=refused[1])
    group, _, rest = key.partition(".")
    if group in catalog.groups(verb) and key in (choices := catalog.keys(group)):
        if group in suggest.NAMED_BY_CHOICE:
            name = rest.partition(".")[0]
            return UserError(key, f"{group} has no {name} here", remedy=f"put it in: {group}=[...,{name}]")
        has = " and ".join(f"{group}={choice}" for choice in choices[key])
        return UserError(key, f"the {group} chosen here has no such key", remedy=f"it belongs to {has}")
    meant = suggest.remedy(suggest.suggestions(key, verb, known))
    return UserError(key, "there is no such key", remedy=meant or f"`rlft {verb} --cfg job` shows every key")
