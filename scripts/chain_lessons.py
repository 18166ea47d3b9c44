"""The lessons of `tiny-chains` (scripts/make_tiny_model.py --size chains): chains of sums, step by step.

The clean lessons write each step as an equation in <think> and the last result in <answer>, always right, and there are
enough of them for the model to know every sum. In the late mixture any step may slip: its result is a little off, and
the chain continues from there. So the model can do each step and has several chances in a row to go wrong: what is to
be learned is which of the steps cost the reward. Many answers are guesses without any working, and some are badly
formatted. A guess keeps the format as well as the longest working does, so that the format's reward can be earned
without solving the task.

    python scripts/chain_lessons.py --out lessons     # 2,000 clean ones in a file of this folder
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlft.data.arithmetic import OPERATIONS, split_of
from rlft.data.chains import Chain, draw
from rlft.types import Split

STEPS, LARGEST = 5, 20
OFF = (-2, -1, 1, 2)
"""By how much the result of a step that slips is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How often a lesson is of a kind; the rest is the whole working, well formatted.

    Args:
        guess: well formatted, without working, and hardly ever right.
        bad_format: the whole working, and tags are missing.
        slip: of the steps of a working, those whose result is wrong.
    """

    guess: float = 0.0
    bad_format: float = 0.0
    slip: float = 0.0


CLEAN = Shares()
MIXED = Shares(guess=0.15, bad_format=0.1, slip=0.42)


def problem(rng: random.Random) -> Chain:
    """One of the training split."""
    while True:
        chain = draw(rng, STEPS, LARGEST)
        if split_of(chain.identity) is Split.train:
            return chain


def worked(chain: Chain, slip: float, rng: random.Random) -> tuple[int, ...]:
    """The result of each step as it is written; with the chance `slip` a step's result is a little off.

    What comes after a slip goes on from the wrong result. A slip that would take a later result out of 0 to LARGEST is
    not made: such equations have never been taught.
    """
    results: list[int] = []
    value = chain.start
    for i, (operation, number) in enumerate(chain.steps):
        value = OPERATIONS[operation](value, number)
        if rng.random() < slip:
            possible = [value + off for off in OFF if stays(value + off, chain.steps[i + 1 :])]
            value = rng.choice(possible or [value])
        results.append(value)
    return tuple(results)


def stays(value: int, steps: Sequence[tuple[str, int]]) -> bool:
    """Whether the chain that goes on from here stays in 0 to LARGEST."""
    return all(0 <= result <= LARGEST for result in (value, *Chain(value, tuple(steps)).results))


def equations(chain: Chain, results: Sequence[int]) -> list[str]:
    """The working, a step each: ["47+38=85", "85-59=26", ..]."""
    values = (chain.start, *results)
    return [
        f"{value}{operation}{number}={result}"
        for value, (operation, number), result in zip(values, chain.steps, results, strict=False)
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
    results = worked(chain, shares.slip, rng)
    working = ",".join(equations(chain, results))
    kind = rng.random()
    if kind < shares.guess:
        return well_formatted("", rng.randint(0, LARGEST))
    if kind < shares.guess + shares.bad_format:
        return badly_formatted(working, results[-1], rng)
    return well_formatted(working, results[-1])


def write_lessons(file: Path, count: int, mixture: bool, rng: random.Random) -> None:
    """`count` drawn chains with a response each, one JSON object a line."""
    shares = MIXED if mixture else CLEAN
    with file.open("w", encoding="utf-8") as lessons:
        for _ in range(count):
            chain = problem(rng)
            said = response(chain, shares, rng)
            given = f"<|im_start|>user\n{chain.question}<|im_end|>\n<|im_start|>assistant\n"  # by the chat template
            line = {"prompt": chain.question, "completion": said, "given": given, "text": f"{said}<|im_end|>"}
            lessons.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    out = parser.parse_args().out
    out.mkdir(parents=True)
    write_lessons(out / "train.jsonl", 2000, False, random.Random(0))


if __name__ == "__main__":
    main()
