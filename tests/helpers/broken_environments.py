"""Environments that cannot be used; worker processes import them, and so this imports little."""

from __future__ import annotations

from dataclasses import dataclass

from rlft.environment.protocol import Environment
from rlft.environment.tools import FunctionCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotStart(Environment):
    def start(self) -> None:
        raise RuntimeError("no server")

    def make(self) -> FunctionCalls:
        return FunctionCalls({})
