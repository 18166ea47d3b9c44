"""What `tiny-chains` is taught (scripts/make_tiny_model.py --size chains): chains of four sums, step by step.

The clean lessons write each step as an equation in <think> and the last result in <answer>, always right: what goes
wrong later is what the model has not learned, for it is taught for a short time only. In the late mixture the working
is still right, but many an answer is guessed without any, and some are badly formatted: a guess keeps the format as
well as the longest working does, so that the format can be had without the task.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from rlft.data.chains import Chain, draw
from rlft.types import Split

STEPS, LARGEST = 4, 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How often a lesson is of a kind; the rest is the whole working, right and well formatted.

    Args:
        guess: well formatted, without working, and hardly ever right.
        bad_format: the whole working, and tags are missing.
    """

    guess: float = 0.0
    bad_format: float = 0.0


CLEAN = Shares()
MIXED = Shares(guess=0.15, bad_format=0.1)


def problem(rng: random.Random) -> Chain:
    """One of the training split."""
    while True:
        chain = draw(rng, STEPS, LARGEST)
        if chain.split is Split.train:
            return chain


def equations(chain: Chain) -> list[str]:
    """The working, a step each: ["47+38=85", "85-59=26", ..]."""
    values = (chain.start, *chain.results)
    return [
        f"{value}{operation}{number}={result}"
        for value, (operation, number), result in zip(values, chain.steps, chain.results, strict=False)
    ]


def well_formatted(thought: str, answer: int) -> str:
    return f"<think>{thought}</think><answer>{answer}</answer>"


def badly_formatted(thought: str, answer: int, rng: random.Random) -> str:
    return rng.choice(
        [
            f"<think>{thought}</think>{answer}",
            f"<think>{thought}</think><answer>{answer}",
            f"{thought}<answer>{answer}</answer>",
            f"<think>{thought}",
        ]
    )


def response(chain: Chain, shares: Shares, rng: random.Random) -> str:
    working, answer = equations(chain), chain.results[-1]
    draw = rng.random()
    if draw < shares.guess:
        return well_formatted("", rng.randint(0, LARGEST))
    if draw < shares.guess + shares.bad_format:
        return badly_formatted(",".join(working), answer, rng)
    return well_formatted(",".join(working), answer)


def write_lessons(file: Path, count: int, mixture: bool, rng: random.Random) -> None:
    """`count` drawn chains with a response each, one JSON object a line."""
    shares = MIXED if mixture else CLEAN
    with file.open("w", encoding="utf-8") as lessons:
        for _ in range(count):
            chain = problem(rng)
            line = {"prompt": chain.question, "completion": response(chain, shares, rng)}
            lessons.write(json.dumps(line) + "\n")
