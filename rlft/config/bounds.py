"""Bounded numbers as types of config fields (`rlft.config.instantiate` checks the bounds)."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]  # the seeds that torch takes
PositiveFloat = Annotated[float, Gt(0)]
AboveOne = Annotated[float, Gt(1)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
BelowHalf = Annotated[float, Ge(0), Lt(0.5)]
Decay = Annotated[float, Ge(0), Lt(1)]
Port = Annotated[int, Ge(0), Le(2**16 - 1)]  # 0 means any free port
