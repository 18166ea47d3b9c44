"""What is known of a key besides its type: it stands at the key, in the typed section, and is looked up here.

`steps: Annotated[PositiveInt, Key(free=True)]` is a key that a resume may change.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from operator import getitem
from typing import Any, Literal

from rlft.config import command as commands

PATH_NAMES = ("path", "held_out_path")
"""Keys whose last part is one of these, and keys that may name a role of a run, may name a local file or folder."""
KEYWORDS = ("auto", "none", "base", "copy", "ema", "reward")
"""Values of these keys that are never a folder, whatever folders the working directory has."""

ABSENT = object()  # the value of a key that is not there; null is a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is known of a key or a section. Those of a section have what it has where they say nothing else."""

    free: bool | None = None  # whether a resume may change it: length, logging, and how the run fits the machine
    measured: bool | None = None  # whether what a run measures depends on it; None: unless it is free
    in_state: bool | None = None  # whether the tensors of a checkpoint depend on it
    of_data: bool | None = None  # whether it decides which data are read
    only_trains: bool | None = None  # whether an evaluation does not read it
    # Whether the run that `rlft doctor` tries has the user's value: always, or if it was typed.
    in_trial: Literal["always", "typed"] | None = None
    free_in_sweep: bool | None = None  # whether it may change when a sweep is resumed
    # The value of runs that were recorded before there was such a key: what rlft did then.
    before: Any = field(default=ABSENT, hash=False)
    # The condition under which a key of an algorithm has an effect, as `rlft/algorithm/formula.py` reads it; "":
    # always. Besides the algorithm's keys it may ask `moved` and `Objective.facts`.
    acts: str = ""
    # The roles of another run that its value may name, in order of preference; a path, as well.
    roles: tuple[str, ...] = ()
    # What is known of keys of this section, before what its own class says: {key: what}.
    inside: Mapping[str, Key] = field(default_factory=dict, hash=False)

    def over(self, section: Key) -> Key:
        """This, with what its section says where it says nothing itself; without what is the section's own."""
        own = ("before", "acts", "roles", "inside")
        inherited = {f.name: getattr(section, f.name) for f in fields(Key) if f.name not in own}
        return replace(self, **{name: value for name, value in inherited.items() if getattr(self, name) is None})


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedField:
    """A field of a config's dataclass: its type without its `Key`, and the class of a typed section."""

    name: str
    hint: Any
    key: Key
    section: type | None
    has_default: bool


@cache
def fields_of(cls: type) -> tuple[TypedField, ...]:
    """The fields of a config's dataclass, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        TypedField(
            name=f.name,
            hint=(hint := without_key(hints[f.name])),
            key=written_at(hints[f.name]),
            section=next((k for k in options(hint) if isinstance(k, type) and dataclasses.is_dataclass(k)), None),
            has_default=not (f.default is f.default_factory is dataclasses.MISSING),
        )
        for f in fields(cls)
    )


@cache
def keys_of(root: type) -> Mapping[str, Key]:
    """{key with its sections: what is known} of every section and key of a command's root, in order."""
    return dict(_keys(root, "", Key()))


def known(root: type, key: str) -> Key:
    """What is known of a key, also of one that only a component has, such as `reward.exact_match.weight`."""
    table = keys_of(root)
    while key and key not in table:
        key = key.rpartition(".")[0]
    return table.get(key, Key())


def written_at(hint: Any) -> Key:
    """The `Key` in the type of a field."""
    return next((other for other in getattr(hint, "__metadata__", ()) if isinstance(other, Key)), Key())


def is_below(key: str, names: Iterable[str]) -> bool:
    """Whether a key is one of these, or in one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def without_key(hint: Any) -> Any:
    """The type of a field without its `Key`.

    >>> without_key(typing.Annotated[int, Key(free=True)])
    <class 'int'>
    """
    if typing.get_origin(hint) is not typing.Annotated:
        return hint
    kind, *others = typing.get_args(hint)
    others = [other for other in others if not isinstance(other, Key)]
    return typing.Annotated[kind, *others] if others else kind


def options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the only type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _keys(cls: type, prefix: str, section: Key) -> Iterator[tuple[str, Key]]:
    for field_of in fields_of(cls):
        name, written = f"{prefix}{field_of.name}", field_of.key
        key = section.inside.get(field_of.name, Key()).over(written).over(section)
        key = replace(key, before=written.before, roles=key.roles or written.roles, inside=written.inside)
        yield name, key
        if field_of.section is not None:
            yield from _keys(field_of.section, f"{name}.", key)
        else:
            yield from ((f"{name}.{inner}", inner_key.over(key)) for inner, inner_key in key.inside.items())


def joined(section: str, name: object) -> str:
    return f"{section}.{name}" if section else str(name)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer.lr": 1e-5, ..}.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def is_path_key(key: str) -> bool:
    """Whether values of this key may name a local file or folder.

    >>> is_path_key("data.path"), is_path_key("trainer.lr")
    (True, False)
    """
    return key.rpartition(".")[2] in PATH_NAMES or key in _keys_of_roles()


@cache
def _keys_of_roles() -> set[str]:
    roots = (commands.named(command).root for command in commands.OWN)
    return {key for root in roots for key, known in keys_of(root).items() if known.roles}


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the nested config with other values at these full keys, such as {"lora.rank": 4}."""
    result = copy.deepcopy(dict(config))
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, result)[name] = value
    return result
