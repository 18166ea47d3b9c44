"""What a study chooses among: keys with several values, as in a plain sweep, and keys with an interval of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlft.commands.sweep.config import key_of
from rlft.config import catalog
from rlft.config import command as verbs
from rlft.config import compose as configs
from rlft.config import generation as engines
from rlft.runs import run_folder
from rlft.runs.paths import is_path_key
from rlft.types import UserError

WIDE = 10.0
"""An interval of positive numbers whose end is at least so many times its start is sampled on a log scale."""
TAGS = ("log", "linear")
ENDS = re.compile(r"interval\(\s*(?:start\s*=\s*)?(?P<low>[^,\s]+)\s*,\s*(?:end\s*=\s*)?(?P<high>[^)\s]+)\s*\)")

NO_NUMBER = ("cluster", "alarms")
"""Sections that change no number beside the keys that a resume may change: where a run computes, what it warns of."""
COMPARED_BY = ("steps", "eval")
"""What a resume may change, but decides how trials are compared."""


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
    """A key with all numbers from `low` to `high`; whole ones alone if `whole`, sampled on a log scale if `log`."""

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
        _check_is_a_setting(full, word.partition("=")[2])
        _check_named_in_order(word, parsed, verb)
        if parsed.is_interval_sweep():
            varied.append(_interval(key, parsed.value(), word.partition("=")[2]))
        else:
            varied.append(
                Choice(key=key, values=_values(full, list(parsed.sweep_string_iterator()), word.partition("=")[2]))
            )
    if not varied:
        problem = "has nothing to choose: no key has an interval or several values"
        remedy = "give one, such as 'trainer.lr=interval(1e-5,1e-3)' or lora.rank=4,16"
        raise UserError("sweep", problem, got="optuna", remedy=remedy)
    for word in (word for word in fixed if key_of(word) == "resume" and word.partition("=")[2] != "null"):
        remedy = "resume a sweep with rlft resume <its folder>"
        raise UserError("resume", "cannot be used in a sweep", got=word.partition("=")[2], remedy=remedy)
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
        choices = value.filter(catalog.choices(key, verb))
        remedy = f"write {key}={','.join(choices)}" if choices else f"give {key} values with commas between them"
        raise UserError(key, "a pattern does not say which values there are", got=got, remedy=remedy)
    if getattr(value, "shuffle", False):
        problem = "shuffle(..) gives another order each time that a sweep is resumed, and jobs go by their numbers"
        raise UserError(key, problem, got=got, remedy="leave shuffle(..) out")


def changes_no_number(key: str, verb: str, generation: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether what a run measures does not depend on a key: a resume may change it, or it says where a run computes.

    Paths are not among them: a resume may name where the same file is now, and a trial another file.

    Args:
        key: with its section.
        verb: of the run.
        generation: the plain section, whose engine may be one from outside the tree.
    """
    section = key.partition(".")[0]
    if section in NO_NUMBER:
        return True
    free = {*run_folder.FREE, *verbs.named(verb).free_keys, *engines.free_keys(generation)}
    is_free = any(key == name or key.startswith(f"{name}.") for name in free)
    return is_free and section not in COMPARED_BY and not is_path_key(key)


def check_changes_numbers(space: Space, plain: Mapping[str, Any]) -> None:
    """Refuses keys that no measurement depends on. plain: the config of a corner."""
    for one in space.varied:
        key = key_of(one.key)
        if changes_no_number(key, plain["verb"], plain.get("generation") or {}):
            got = ", ".join(map(str, one.extremes))
            problem = "cannot be swept: it does not change what a run measures"
            raise UserError(key, problem, got=got, remedy="give it one value")


def _check_is_a_setting(key: str, got: str) -> None:
    """Refuses keys that are no setting of a run, but of the comparison."""
    if key == "seed":
        problem = "cannot be swept by sweep=optuna: the best seed would only be a lucky one"
        raise UserError(key, problem, got=got, remedy="write sweep.seeds=3 for three runs of each trial")
    if key == "data.seed":
        problem = "is the seed of the data: trials on other data cannot be compared"
        raise UserError(key, problem, got=got, remedy="give it one value")
    if key == "steps":
        problem = "is one for all trials, which are compared at the same steps"
        raise UserError(key, problem, got=got, remedy="give it one value")
    if key == "hydra.sweep.dir":
        raise UserError(key, "is one for the whole sweep", got=got, remedy="give it one value")


def _interval(key: str, value: Any, got: str) -> Interval:
    """The interval of Hydra's `value`, with its tag or without."""
    name, low, high = key.lstrip("+"), value.start, value.end
    tags = sorted(value.tags)
    if set(tags) - {*TAGS} or len(tags) > 1:
        remedy = "write tag(log,interval(..)), tag(linear,interval(..)) or interval(..)"
        raise UserError(name, "an interval is tagged log, linear or not at all", got=got, remedy=remedy)
    whole = isinstance(low, int) and isinstance(high, int)
    if whole and (ends := ENDS.search(got)) and not all(float(end).is_integer() for end in ends.group("low", "high")):
        remedy = "round them, or leave int(..) out"
        raise UserError(name, "an interval of whole numbers has ends that are not whole", got=got, remedy=remedy)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(name, "an interval has two finite ends", got=got, remedy="give finite ends")
    if low >= high:
        remedy = "swap its ends" if low > high else f"write {name}={low}"
        raise UserError(name, "an interval goes from a number to a larger one", got=got, remedy=remedy)
    if tags == ["log"] and low <= 0:
        remedy = "begin above 0, or leave log out"
        raise UserError(name, "only positive numbers have logarithms", got=got, remedy=remedy)
    log = tags == ["log"] or (not tags and low > 0 and high >= WIDE * low)
    return Interval(key=key, low=low, high=high, whole=whole, log=log)


def _values(key: str, values: Sequence[str], got: str) -> tuple[str, ...]:
    if len(values) == 1:
        raise UserError(key, "is a choice of one value", got=got, remedy=f"give several, or {key}={values[0]}")
    for value in (value for value in values if list(values).count(value) > 1):
        raise UserError(key, "has a value twice", got=value, remedy="give every value once")
    return tuple(values)
