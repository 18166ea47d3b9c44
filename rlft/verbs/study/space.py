"""What a study chooses among: keys with several values, as in a plain sweep, and keys with an interval of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlft.config import compose as configs
from rlft.keys import catalog
from rlft.types import UserError
from rlft.verbs.study.config import key_of

WIDE = 10.0
"""An interval of positive numbers whose end is at least so many times its start is drawn from by logarithms."""
TAGS = ("log", "linear")

NO_NUMBER = ("name", "resume", "hydra", "logger", "rollouts", "token_values", "checkpoint", "cluster", "alarms")
"""Sections and keys that say where a run is, what is kept of it or where it computes: none of them makes it better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A key with several values, as they are typed."""

    key: str
    values: tuple[str, ...]

    def word(self, value: Any) -> str:
        return f"{self.key}={value}"

    @property
    def extremes(self) -> tuple[str, ...]:
        """The values that are checked before the first run."""
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A key with all numbers from `low` to `high`; whole ones alone if `whole`, drawn by their logarithms if `log`."""

    key: str
    low: float
    high: float
    whole: bool
    log: bool

    def word(self, value: Any) -> str:
        return f"{self.key}={value!r}"

    @property
    def extremes(self) -> tuple[float, ...]:
        return (self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The words of a study's runs: `fixed` ones as they are typed, and the keys whose values are chosen."""

    fixed: tuple[str, ...]
    varied: tuple[Choice | Interval, ...]

    @property
    def size(self) -> int | None:
        """The number of combinations; None with an interval."""
        counts = [len(one.values) for one in self.varied if isinstance(one, Choice)]
        return math.prod(counts) if len(counts) == len(self.varied) else None

    def words(self, params: Mapping[str, Any]) -> list[str]:
        """The overrides of a run with these values, {key: value}."""
        return [*self.fixed, *self.chosen(params)]

    def chosen(self, params: Mapping[str, Any]) -> list[str]:
        return [one.word(params[one.key]) for one in self.varied]

    def corners(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(the word that is tried, {key: value}): each value and end of an interval once, the others at their first.

        So many configs as there are values are checked before the first run, not their product.
        """
        first = {one.key: one.extremes[0] for one in self.varied}
        yield " ".join(self.chosen(first)), first
        for one in self.varied:
            for value in one.extremes[1:]:
                yield one.word(value), {**first, one.key: value}


def read_space(words: Sequence[str], verb: str) -> Space:
    """The space that these overrides of a study span.

    Raises:
        UserError: nothing is chosen, an interval is wrong, or a key cannot be swept.
    """
    fixed, varied = [], []
    for word, parsed in zip(words, configs.parse_overrides(words, verb), strict=True):
        if not parsed.is_sweep_override():
            fixed.append(word)
            continue
        key, full = parsed.get_key_element(), key_of(word)
        _check_key(full, word.partition("=")[2])
        _check_named_in_order(word, parsed, verb)
        if parsed.is_interval_sweep():
            varied.append(_interval(key, parsed.value(), word.partition("=")[2]))
        else:
            varied.append(Choice(key=key, values=_values(full, list(parsed.sweep_string_iterator()))))
    for word in (word for word in fixed if key_of(word) == "hydra.sweep.subdir"):
        problem = "is set by the sweep: a folder a trial, in it one a seed"
        raise UserError("hydra.sweep.subdir", problem, got=word.partition("=")[2], remedy="leave it out")
    if not varied:
        problem = "has nothing to choose: no key has an interval or several values"
        remedy = "give one, such as 'trainer.lr=interval(1e-5,1e-3)' or lora.rank=4,16"
        raise UserError("sweep", problem, got="optuna", remedy=remedy)
    if any(key_of(word) == "resume" and word.partition("=")[2] != "null" for word in fixed):
        remedy = "go on with a sweep by rlft resume <its folder>"
        raise UserError("resume", "cannot be used in a sweep", remedy=remedy)
    return Space(fixed=tuple(fixed), varied=tuple(varied))


def check_one_by_one(words: Sequence[str], verb: str) -> None:
    """Refuses what a plain sweep cannot go through one by one, in the same order each time."""
    for word, parsed in zip(words, configs.parse_overrides(words, verb), strict=True):
        _check_named_in_order(word, parsed, verb)
        if parsed.is_interval_sweep():
            problem = "an interval has no values to go through one by one"
            remedy = "add sweep=optuna, which draws from it, or give values with commas between them"
            raise UserError(key_of(word), problem, got=word.partition("=")[2], remedy=remedy)


def _check_named_in_order(word: str, parsed: Any, verb: str) -> None:
    """Refuses glob(..), which rlft does not expand, and shuffle(..), whose order is another one at each reading.

    Args:
        word: an override.
        parsed: what Hydra has read from it.
        verb: of the runs.
    """
    if not parsed.is_sweep_override():
        return
    key, value, got = key_of(word), parsed.value(), word.partition("=")[2]
    if parsed.value_type.name == "GLOB_CHOICE_SWEEP":
        found = value.filter(catalog.choices(key, verb))
        remedy = f"write {key}={','.join(found)}" if found else f"give {key} values with commas between them"
        raise UserError(key, "a pattern does not say which values there are", got=got, remedy=remedy)
    if getattr(value, "shuffle", False):
        problem = "shuffle(..) gives another order each time that a sweep goes on, and jobs go by their numbers"
        raise UserError(key, problem, got=got, remedy="leave shuffle(..) out")


def _check_key(key: str, got: str) -> None:
    section, _, last = key.partition(".")
    if key == "seed":
        problem = "is that of a trial's runs, and no setting that one could choose for being lucky"
        raise UserError(key, problem, got=got, remedy="write sweep.seeds=3 for three runs of each trial")
    if last == "seed":
        problem = f"is the seed of the {section}: trials on other data cannot be compared"
        raise UserError(key, problem, got=got, remedy="give it one value")
    if key == "steps":
        problem = "is one for all trials, which are compared at the same steps"
        raise UserError(key, problem, got=got, remedy="give it one value")
    if section in NO_NUMBER:
        problem = "cannot be chosen by what a run measures, which it does not change"
        raise UserError(key, problem, got=got, remedy="give it one value")


def _interval(key: str, value: Any, got: str) -> Interval:
    """The interval of Hydra's `value`, with its tag or without."""
    name = key.lstrip("+")
    tags = sorted(value.tags)
    if set(tags) - {*TAGS} or len(tags) > 1:
        remedy = "write tag(log,interval(..)), tag(linear,interval(..)) or interval(..)"
        raise UserError(name, "an interval is tagged log, linear or not at all", got=got, remedy=remedy)
    low, high = value.start, value.end
    if low == high:
        remedy = f"leave int(..) out, or write {name}={low}" if isinstance(low, int) else f"write {name}={low}"
        raise UserError(name, "an interval goes from a number to a larger one", got=got, remedy=remedy)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(name, "an interval goes from a number to a larger one", got=got, remedy="swap its ends")
    if tags == ["log"] and low <= 0:
        raise UserError(
            name, "only positive numbers have logarithms", got=got, remedy="begin above 0, or leave log out"
        )
    log = tags == ["log"] or (not tags and low > 0 and high >= WIDE * low)
    return Interval(key=key, low=low, high=high, whole=isinstance(low, int) and isinstance(high, int), log=log)


def _values(key: str, values: Sequence[str]) -> tuple[str, ...]:
    for value in (value for value in values if list(values).count(value) > 1):
        raise UserError(key, "has a value twice", got=value, remedy="give every value once")
    return tuple(values)
