"""The keys of a sweep whose values Optuna chooses: sweep=optuna, sweep.trials=20, .."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from rlft.config import catalog
from rlft.config import compose as configs
from rlft.config.bounds import PositiveInt, Seed
from rlft.config.instantiate import from_mapping
from rlft.config.overrides import OVERRIDE
from rlft.types import UserError

SECTION, SWEEPER = "sweep", "optuna"
NEEDED = ("optuna", "matplotlib")
USUAL_TRIALS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """The keys of configs/base/sweep.yaml, which has their meanings and defaults."""

    trials: PositiveInt | Literal["auto"]
    sampler: Literal["tpe", "random", "grid"]
    seeds: PositiveInt
    metric: str
    direction: Literal["auto", "max", "min"]
    pruner: Literal["none", "median", "hyperband"]
    startup: PositiveInt
    seed: Seed


def key_of(word: str) -> str:
    """The key of an override, without signs.

    >>> key_of("+recipe=a"), key_of("sweep.trials=3")
    ('recipe', 'sweep.trials')
    """
    match = OVERRIDE.fullmatch(word)
    return match["key"] if match else word


def is_own(word: str) -> bool:
    """Whether an override is of the sweep itself, not of its runs."""
    return key_of(word).partition(".")[0] == SECTION


def read_config(words: Sequence[str], verb: str) -> StudyConfig:
    """The keys from words such as sweep.trials=20, and else from configs/base/sweep.yaml.

    Raises:
        UserError: there is no such sweeper or key, or a value is wrong.
    """
    file = catalog.config_folder() / "base" / f"{SECTION}.yaml"
    values = yaml.safe_load(file.read_text())[SECTION]
    sweeper = None
    for parsed in configs.parse_overrides(words, verb):
        key = parsed.key_or_group
        if parsed.input_line.startswith(("+", "~")):
            line = parsed.input_line
            raise UserError(key, "takes no sign", got=line, remedy=f"write {line.lstrip('+~')}, or leave it out")
        if parsed.is_sweep_override():
            raise UserError(key, "is one for the whole sweep", got=parsed.input_line, remedy="give one value")
        if key == SECTION:
            sweeper = parsed.value()
        else:
            values[key.partition(".")[2]] = parsed.value()
    if sweeper is None:
        remedy = f"write {SECTION}={SWEEPER}, or leave every {SECTION} key out to try all values"
        raise UserError(SECTION, "no sampler is chosen", got="nothing", remedy=remedy)
    if sweeper != SWEEPER:
        problem = "names who chooses the values, and this is not one of its choices"
        remedy = f"write {SECTION}={SWEEPER}, or leave every {SECTION} key out to try all values"
        raise UserError(SECTION, problem, got=sweeper, remedy=remedy)
    try:
        return from_mapping(StudyConfig, values, SECTION, verb)
    except UserError as error:
        entry = catalog.entries(file).get(error.key)
        if entry is None or error.remedy.startswith("use "):
            raise
        remedy = f"for instance {entry.default} ({entry.comment})"
        raise UserError(error.key, error.problem, got=error.got, remedy=remedy) from None


def check_installed() -> None:
    """Refuses a study without the libraries that it needs."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise UserError(SECTION, problem, got=SWEEPER, remedy="pip install 'rlft[sweep]'")
