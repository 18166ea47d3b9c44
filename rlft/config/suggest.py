"""Refuses keys that do not exist: suggests the key that was meant, or says why there is none.

A key is found by its last part, its name in another library (peer_names.yaml), or similarity. Sampling settings of
other libraries that rlft does not have are refused with a reason each: a policy's gradient is computed from its
log-probs, and settings that change the model's distribution make the engine sample from another one than the trainer
computes, so that ratios, KL and entropy would be those of a policy from which nobody samples.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlft.config import catalog, command as commands
from rlft.config.choices import LIKE, as_typed
from rlft.config.keys import joined
from rlft.types import UserError

ASSETS = Path(__file__).parents[1] / "assets"
PEER_NAMES = ASSETS / "peer_names.yaml"
SEVERAL = ("reward", "logger")
"""Groups that take several choices at once, whose keys are below the name of a choice: reward.format.weight."""
OWN_KEYS = {
    "plan": ("device_memory", "card", "price"),
    "reward try": ("rows",),
    **dict.fromkeys(("eval", "chat", "serve", "export"), ("run", "checkpoint")),
}
OWN_KEYS["chat"] += ("raw",)
OWN_KEYS["export"] += ("out", "as", "dtype", "push", "private")
OWN_KEYS |= {"runs": ("status", "name", "command", "sort"), "watch": ("price",), "report": ("out",), "diff": ("at",)}
OWN_KEYS |= {"audit": ("recompute", "replay"), "rank": ("samples", "out", "ranker", "seed", "agree")}
"""{command: the keys that it has next to those of a run's config}; `rlft serve` also has those of base/serve.yaml."""

VERY_LIKE = 0.8  # the least similarity of a suggested name where a wrong one would mislead; elsewhere `LIKE`
MOST_KEYS = 6  # if more keys than this end in the same word, none of them is suggested


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A key that may have been meant."""

    key: str  # the key's name
    value: str | None = None  # the only value that makes sense; None for the value that the user typed
    note: str = ""  # how the key differs from the one that was typed, or ""
    is_copied: bool = True  # whether the value of the one that was typed is this key's as well

    def written(self, value: str | None = None) -> str:
        """The key; with a value the override, or `<value>` in its place if it may mean something else there."""
        key = "+recipe" if self.key == "recipe" else self.key
        if self.value is not None or value is not None:
            key += f"={self.value or ('' if self.note else value) or '<value>'}"
        return f"{key} ({self.note})" if self.note else key


def suggestions(name: str, command: str, known: Collection[str] | None = None) -> list[Suggestion]:
    """The keys that `name` may have meant; several only if they are equally likely.

    `known` are the existing keys; None means all keys of the command.

    >>> [meant.key for meant in suggestions("max_rounds", "train")]
    ['dynamic_sampling.max_rounds']
    """
    keys = list(known_keys(command) if known is None else known)
    name = name.lower().replace("-", "_")
    last = name.rpartition(".")[2]
    if meant := of_peers(name, command, keys):
        return [meant]
    if name in peer_names():
        return []  # the command has no such key, and a key that merely looks like it means something else
    if name == last and name in keys:
        return [Suggestion(name)]
    if last != name and (close := _like(name, keys)):
        return [Suggestion(close)]
    same_end = _same_end(last, keys)
    if 0 < len(same_end) <= MOST_KEYS:
        return [Suggestion(key) for key in same_end]
    if last != name and (meant := of_peers(last, command, keys)):
        return [meant]
    if last == name and (close := _like(name, keys)):
        return [Suggestion(close)]
    for similar in difflib.get_close_matches(name, peer_names(), n=3, cutoff=VERY_LIKE):
        if meant := of_peers(similar, command, keys):
            return [meant]
    return []


def remedy(meant: Sequence[Suggestion], value: str | None = None) -> str:
    """The question "did you mean ..?" with the suggestions, and with the user's value if there is one; else ""."""
    *others, last = [suggestion.written(value) for suggestion in meant] or [""]
    return f"did you mean {' or '.join(filter(None, [', '.join(others), last]))}?" if meant else ""


def of_peers(name: str, command: str, known: Collection[str]) -> Suggestion | None:
    """The key that another library's name means, if the command has it.

    A dotted name may leave out its first parts: `rollout.n` for `actor_rollout_ref.rollout.n`.
    """
    table = peer_names()
    full_names = [name] if name in table else [n for n in table if "." in name and n.endswith(f".{name}")]
    return next(filter(None, (target_of(table[n], command, known) for n in full_names)), None)


def target_of(targets: Any, command: str, known: Collection[str]) -> Suggestion | None:
    """The first of a name's targets, as peer_names.yaml has them, that the command has."""
    of_command = targets.get(command, []) if isinstance(targets, dict) else targets
    for target in [of_command] if isinstance(of_command, str) else of_command:
        written, mark, note = next(
            filter(lambda parts: parts[1], map(target.partition, (" ! ", "; "))), (target, "", "")
        )
        key, equals, value = written.partition("=")
        if key in known:
            return Suggestion(key, value if equals else None, note, is_copied=mark != " ! ")
    return None


@cache
def peer_table() -> dict[str, Any]:
    """{library: its part of peer_names.yaml, whose first comment has its form}."""
    from yaml import CSafeLoader, load

    return load(PEER_NAMES.read_text(encoding="utf-8"), CSafeLoader)


def translated_peers() -> list[str]:
    """The libraries whose runs are translated as a whole."""
    return [name for name, part in peer_table().items() if "title" in part]


@cache
def peer_names() -> dict[str, Any]:
    """{name: target, targets in order, or {command: target}} of all libraries; the first one with a name decides."""
    libraries = list(reversed(peer_table().values()))
    names = {name: targets for library in libraries for name, targets in library.get("names", {}).items()}
    aliases = {alias: name for library in libraries for alias, name in library.get("aliases", {}).items()}
    return {alias: names[name] for alias, name in aliases.items() if name in names} | names


@cache
def known_keys(command: str) -> tuple[str, ...]:
    """All that may be set on the command line of a command: keys, groups, and keys of every choice of a group."""
    groups = catalog.groups(command)
    keys_of_choices = (key for group in groups if group != "recipe" for key in catalog.keys(group, command))
    return tuple(dict.fromkeys((*catalog.root_entries(command), *groups, *keys_of_choices, "hydra.run.dir")))


def unknown_key(
    key: str, command: str = "train", known: Collection[str] | None = None, got: str | None = None
) -> UserError:
    """The refusal of a key (with its section) that the composed config lacks, with the most likely suggestion.

    `known` are the existing keys, None means all keys of the command; `got` is the value as it was typed, if known.
    """
    if refused := refused_setting(key):
        return UserError(key, refused[0], got=got, remedy=refused[1])
    group, _, subkey = key.partition(".")
    if group in catalog.groups(command) and key in (choices := catalog.keys(group)):
        if group in SEVERAL:
            name = subkey.partition(".")[0]
            added = f"add it: {group}={name if group == 'logger' else f'[...,{name}]'}"
            return UserError(key, f"{group} has no {name} here", got=got, remedy=added)
        belongs = f"it belongs to {' and '.join(f'{group}={choice}' for choice in choices[key])}"
        return UserError(key, f"the {group} chosen here has no such key", got=got, remedy=belongs)
    if subkey and key in catalog.root_entries(command):
        remedies = f"leave out {group}=null, or this key"
        return UserError(key, f"belongs to the section {group}, which is null here", got=got, remedy=remedies)
    of_others = of_other_commands(key, command)
    meant = suggestions(key, command, known)
    if of_others and key not in peer_names():  # whoever knows a key by its whole name did not mean one that looks alike
        meant = [one for one in meant if one.key.rpartition(".")[2] == key]
    otherwise = "leave it out here" if of_others else f"`rlft {command} --cfg job` shows every key"
    return UserError(key, of_others or "there is no such key", got=got, remedy=remedy(meant) or otherwise)


def of_other_commands(key: str, command: str) -> str:
    """What is wrong with a key of this command if others have it, or have its section and this one has not; else "".

    >>> of_other_commands("group_size", "sft"), of_other_commands("serve.prt", "train")
    ('is a key of rlft train, and not of this command', 'is in a section of rlft serve, and not of this command')
    """
    serves = (*OWN_KEYS["serve"], *catalog.entries(catalog.config_folder() / "base" / "serve.yaml"))
    keys_of = {**{name: known_keys(name) for name in commands.OWN}, **OWN_KEYS, "serve": serves}
    section = key.partition(".")[0]
    of_run = known_keys(command) if command in commands.names() else ()
    for what, name in ("a key", key), ("in a section", section):
        names = [other for other, keys in keys_of.items() if other != command and name in keys]
        if names and (name == key or name not in of_run):
            listed = f"{', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}"
            return f"is {what} of rlft {listed}, and not of this command"
    return ""


def is_of_others(key: str, command: str) -> bool:
    """Whether other commands know a key, a section or a group of this name, and this one does not."""
    known, section = known_keys(command), f"{key}."
    return not any(one == key or one.startswith(section) for one in known) and bool(of_other_commands(key, command))


def unknown_in_section(
    name: object, value: object, names: list[str], section: str, command: str = "train"
) -> UserError:
    """The refusal of a key that a section or a component with these keys does not have."""
    key, keys = joined(section, name), [joined(section, known) for known in names]
    if refused := refused_setting(key):
        return UserError(key, refused[0], got=as_typed(value), remedy=refused[1])
    here, all_keys = remedy(suggestions(key, command, keys)), f"known here: {', '.join(names) or 'none'}"
    if section in catalog.sections():  # a section of rlft's, so that a key of another section may have been meant
        meant = here or remedy(suggestions(key, command)) or all_keys
    else:
        meant = " ".join(filter(None, [here, all_keys]))
    problem = "" if here else of_other_commands(key, command)
    return UserError(key, problem or "there is no such key", got=as_typed(value), remedy=meant)


def _like(name: str, keys: Sequence[str]) -> str | None:
    """The key most similar to the name: within the named section if it exists, else by the whole name."""
    section, dot, last = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if dot and siblings:
        close = difflib.get_close_matches(last, siblings, n=1, cutoff=LIKE)
        return siblings[close[0]] if close else None
    close = difflib.get_close_matches(name, keys, n=1, cutoff=VERY_LIKE if dot else LIKE)
    return close[0] if close else None


def _same_end(last: str, keys: Sequence[str]) -> list[str]:
    """The keys with this last part; keys of several rewards or loggers become one, reward.<name>.weight."""
    matches = [key.split(".") for key in keys if key.rpartition(".")[2] == last]
    num_alike = {parts[0]: sum(other[0] == parts[0] for other in matches) for parts in matches if parts[0] in SEVERAL}
    shown = [
        [parts[0], "<name>", *parts[2:]] if len(parts) > 2 and num_alike.get(parts[0], 0) > 1 else parts
        for parts in matches
    ]
    return list(dict.fromkeys(".".join(parts) for parts in shown))


SECTIONS = ("", "generation", "eval", "sampling", "sampling_params")
"""Sections, besides those of engines, whose keys are sampling settings; `algorithm.length_penalty` is not one."""


@cache
def refused_settings(section: str) -> Mapping[str, tuple[str, str]]:
    """{name: (what is wrong with it, what to do instead)} of `sampling` or `vllm`, in assets/refused.yaml."""
    from yaml import safe_load

    rows = safe_load((ASSETS / "refused.yaml").read_text(encoding="utf-8"))[section]
    return {
        name: (row.get("problem", "is set by rlft"), row.get("remedy", "leave it out"))
        for row in rows
        for name in row["names"]
    }


def refused_setting(key: str) -> tuple[str, str] | None:
    """(what is wrong, what to do) for a key that would change how tokens are drawn; None for any other key.

    >>> refused_setting("generation.stop_strings")[1]
    'write the text or the token id into the list generation.stop'
    >>> refused_setting("algorithm.length_penalty") is None
    True
    """
    section, _, name = key.rpartition(".")
    is_of_sampling = section in SECTIONS or section.rpartition(".")[0] == "generation"
    return refused_settings("sampling").get(name.lower().replace("-", "_")) if is_of_sampling else None
