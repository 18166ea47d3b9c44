"""The settings of a trial of `rlft doctor`; this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a trial.

    Attributes:
        plain: the composed config, with the user's sections in it.
        typed: the keys that the user has typed, whose values the trial keeps.
        rewards: the user's `reward` section; the trial computes none of these rewards.
        runs: the folder in which the user's runs would be.
    """

    plain: dict[str, Any]
    typed: frozenset[str]
    rewards: Mapping[str, Any]
    runs: Path

    @property
    def makes_model(self) -> bool:
        """Whether the model is made for the trial, because the user has named none."""
        return "model.path" not in self.typed
