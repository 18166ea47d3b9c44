"""Suggests the key that was meant, by its last part, its name in another library (peer_names.yaml), or similarity."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlft.config import catalog

PEER_NAMES = Path(__file__).parents[1] / "assets" / "peer_names.yaml"
NAMED_BY_CHOICE = ("reward", "logger")
"""Groups whose keys are below the name of a choice: reward.format.weight."""
LIKE, VERY_LIKE = 0.6, 0.8
"""The least similarity (difflib's ratio) of a suggested name, and a stricter one."""
MOST_KEYS = 6
"""If more keys than this end in the same word, none of them is suggested."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A key that may have been meant.

    Attributes:
        key: the key's name.
        value: the only value that makes sense; None for the value that the user typed.
        note: how the key differs from the one that was typed, or "".
    """

    key: str
    value: str | None = None
    note: str = ""

    def written(self, value: str = "") -> str:
        """The override with the user's value, or with `<value>` if the user's may mean something else there."""
        shown_value = self.value or ("" if self.note else value) or "<value>"
        return f"{_typed(self.key)}={shown_value}{self._explained}"

    def __str__(self) -> str:
        key = _typed(self.key)
        return f"{key if self.value is None else f'{key}={self.value}'}{self._explained}"

    @property
    def _explained(self) -> str:
        return f" ({self.note})" if self.note else ""


def suggestions(name: str, verb: str, known: Collection[str] | None = None) -> list[Suggestion]:
    """The keys that `name` may have meant; several only if they are equally likely.

    `known` are the existing keys; None means all keys of the verb.

    >>> [str(meant) for meant in suggestions("lr", "train")]
    ['trainer.lr']
    >>> [str(meant) for meant in suggestions("max_rounds", "train")]
    ['dynamic_sampling.max_rounds']
    """
    keys = list(known_keys(verb) if known is None else known)
    name = name.lower().replace("-", "_")
    last = name.rpartition(".")[2]
    if meant := of_peers(name, verb, keys):
        return [meant]
    if name in peer_names():
        return []  # the verb has no such key, and a key that merely looks like it means something else
    if name == last and name in keys:
        return [Suggestion(name)]
    if last != name and (close := _like(name, keys)):
        return [Suggestion(close)]
    same_end = _same_end(last, keys)
    if 0 < len(same_end) <= MOST_KEYS:
        return [Suggestion(key) for key in same_end]
    if last != name and (meant := of_peers(last, verb, keys)):
        return [meant]
    if last == name and (close := _like(name, keys)):
        return [Suggestion(close)]
    for similar in difflib.get_close_matches(name, peer_names(), n=3, cutoff=VERY_LIKE):
        if meant := of_peers(similar, verb, keys):
            return [meant]
    return []


def remedy(meant: Sequence[Suggestion]) -> str:
    """The question "did you mean ..?" with the suggestions; "" without any."""
    return f"did you mean {_joined([str(suggestion) for suggestion in meant])}?" if meant else ""


def remedy_with_value(meant: Sequence[Suggestion], value: str) -> str:
    """As `remedy`, with the user's value."""
    return f"did you mean {_joined([suggestion.written(value) for suggestion in meant])}?" if meant else ""


def of_peers(name: str, verb: str, known: Collection[str]) -> Suggestion | None:
    """The key that another library's name means, if the verb has it.

    A dotted name may leave out its first parts: `rollout.n` for `actor_rollout_ref.rollout.n`.
    """
    table = peer_names()
    full_names = [name] if name in table else [n for n in table if "." in name and n.endswith(f".{name}")]
    for targets in (table[n] for n in full_names):
        verbs_targets = targets.get(verb, []) if isinstance(targets, dict) else targets
        for target in [verbs_targets] if isinstance(verbs_targets, str) else verbs_targets:
            written, _, note = target.partition("; ")
            key, equals, value = written.partition("=")
            if key in known:
                return Suggestion(key, value if equals else None, note)
    return None


@cache
def peer_names() -> dict[str, Any]:
    """{name: target, targets in order, or {verb: target}} of all libraries; the first library with a name decides."""
    from yaml import safe_load

    libraries = safe_load(PEER_NAMES.read_text())
    return {name: targets for names in reversed(list(libraries.values())) for name, targets in names.items()}


@cache
def known_keys(verb: str) -> tuple[str, ...]:
    """Everything that may be set on the command line of a verb: keys, groups, and keys of every choice of a group."""
    groups = catalog.groups(verb)
    keys_of_choices = (key for group in groups if group != "recipe" for key in catalog.keys(group, verb))
    return tuple(dict.fromkeys((*catalog.root_entries(verb), *groups, *keys_of_choices, "hydra.run.dir")))


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
    num_alike = {
        parts[0]: sum(other[0] == parts[0] for other in matches) for parts in matches if parts[0] in NAMED_BY_CHOICE
    }
    shown = [
        [parts[0], "<name>", *parts[2:]] if len(parts) > 2 and num_alike.get(parts[0], 0) > 1 else parts
        for parts in matches
    ]
    return list(dict.fromkeys(".".join(parts) for parts in shown))


def _typed(key: str) -> str:
    return "+recipe" if key == "recipe" else key


def _joined(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
