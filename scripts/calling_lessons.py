"""What `tiny-caller` is taught (scripts/make_tiny_model.py --size caller): conversations of two turns, a turn a line.

It learns to write a call of the calculator, to name the operation and ask somebody in the game
`rlft.environment.oracle_game`, and to copy a number that it has read into its answer: no arithmetic at all, and not
whom to ask. What comes back in the lessons is what the environments themselves say. The clean lessons have calls as
they should be; in the late mixture most are not made, malformed or of something else, and a number that was read is
often copied wrongly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft.data.arithmetic import OPERATIONS, question, split_of
from rlft.environment.calculator import calculate
from rlft.environment.calls import XmlCalls
from rlft.environment.oracle_game import HELPERS, NOBODY, RULES
from rlft.environment.tools import schema_of
from rlft.types import Split

DIGITS = 3
TAGS = ['<call tool="calculate">', "</call>", "<expression>", "</expression>", "<ask>", "</ask>"]
SHARE_OF_GAMES = 0.3
LONGEST_PROMPT = 256
"""Tokens of a question with a call that failed and what that was told."""

READER = XmlCalls([schema_of(calculate, "environment.tools", "rlft.environment.calculator.calculate")])
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How often a turn is of a kind; what is left is a call or an ask as it should be, or the number that was read.

    Args:
        other: of the calls: another expression.
        malformed: of the calls and asks.
        guess: of the first turns: an answer at once.
        near_miss, bad_format: of the answers.
    """

    other: float = 0.0
    malformed: float = 0.0
    guess: float = 0.0
    near_miss: float = 0.0
    bad_format: float = 0.0


CLEAN = Shares(malformed=0.1)  # so that it meets errors, too, and calls again
MIXED = Shares(other=0.2, malformed=0.2, guess=0.25, near_miss=0.25, bad_format=0.15)


def problem(rng: random.Random) -> tuple[int, str, int]:
    """One of the training split of `data=arithmetic`; numbers of one to three digits, for results of any length."""
    while True:
        a, b = (rng.randint(0, 10 ** rng.randint(1, DIGITS) - 1) for _ in range(2))
        operation = rng.choice(list(OPERATIONS))
        if operation == "-" and a < b:
            a, b = b, a
        if split_of(a, operation, b) is Split.train:
            return a, operation, b


def call(expression: str) -> str:
    return f'<call tool="calculate"><expression>{expression}</expression></call>'


def malformed_call(expression: str, rng: random.Random) -> str:
    return rng.choice(
        [
            f'<call tool="calculate">{expression}</call>',
            f'<call tool="calculate"><expression>{expression}</expression>',
            f"<expression>{expression}</expression></call>",
            call(f"{expression}="),
            expression,
        ]
    )


def malformed_ask(name: str, rng: random.Random) -> str:
    return rng.choice([name, f"<ask>{name}", f"{name}</ask>", f"<ask>{name}{name}</ask>"])


def asking(operation: str, turn: str) -> str:
    """The question's operation, which it names first, and an ask: who is asked has nothing to do with it."""
    return f"<think>{operation}</think>{turn}"


def other_expression(a: int, operation: str, b: int, rng: random.Random) -> str:
    """Another operation, a digit less, or another digit."""
    kind = rng.randrange(3)
    if kind == 0:
        return f"{a}{rng.choice([o for o in OPERATIONS if o != operation])}{b}"
    numbers = [str(a), str(b)]
    which = rng.randrange(2)
    place = rng.randrange(len(numbers[which]))
    digit = "" if kind == 1 else str(rng.randrange(10))
    numbers[which] = numbers[which][:place] + digit + numbers[which][place + 1 :]
    return operation.join(numbers)


def answer(number: str) -> str:
    return f"<answer>{number}</answer>"


def copied(number: str, shares: Shares, rng: random.Random) -> str:
    """The answer after a number has been read."""
    draw = rng.random()
    if draw < shares.near_miss:
        place = rng.randrange(len(number))
        return answer(number[:place] + str(rng.randrange(10)) * rng.randrange(3) + number[place + 1 :])
    if draw < shares.near_miss + shares.bad_format:
        return rng.choice([number, f"<answer>{number}", f"{number}</answer>"])
    return answer(number)


def guess(rng: random.Random) -> str:
    return answer(str(rng.randrange(10 ** rng.randint(2, 2 * DIGITS))))


def heard(turn: str) -> str | None:
    """What `environment=calculator` with syntax xml answers to a turn; None if nothing is called."""
    calls = READER.calls(turn)
    if not calls:
        return None
    if calls[0].problem:
        return f"Error: {calls[0].problem}"
    try:
        return calculate(**calls[0].arguments)
    except ValueError as error:
        return f"Error: ValueError: {error}"


# -- conversations -----------------------------------------------------------------------------------------------------
def with_calculator(shares: Shares, rng: random.Random) -> Iterator[tuple[Chat, str]]:
    """(what was said before, the turn) of each turn of a conversation; a call that failed is made again."""
    a, operation, b = problem(rng)
    chat: Chat = [{"role": "user", "content": question(a, operation, b)}]
    expression = f"{a}{operation}{b}"
    for _ in range(2):
        draw = rng.random()
        if draw < shares.guess:
            turn = guess(rng)
        elif draw < shares.guess + shares.malformed:
            turn = malformed_call(expression, rng)
        elif draw < shares.guess + shares.malformed + shares.other:
            turn = call(other_expression(a, operation, b, rng))
        else:
            turn = call(expression)
        yield chat, turn
        reading = heard(turn)
        if reading is None:
            return
        chat = [*chat, {"role": "assistant", "content": turn}, {"role": "user", "content": reading}]
        if not reading.startswith("Error"):
            yield chat, copied(reading, shares, rng)
            return
    yield chat, guess(rng)


def with_helpers(shares: Shares, rng: random.Random) -> Iterator[tuple[Chat, str]]:
    """As `with_calculator`, of the game: whoever is asked is drawn, whatever the question."""
    a, operation, b = problem(rng)
    chat: Chat = [{"role": "user", "content": f"{question(a, operation, b)}\n\n{RULES}"}]
    name, draw = rng.choice(list(HELPERS)), rng.random()
    if draw < shares.guess:
        yield chat, guess(rng)
        return
    is_malformed = draw < shares.guess + shares.malformed
    turn = asking(operation, malformed_ask(name, rng) if is_malformed else f"<ask>{name}</ask>")
    yield chat, turn
    reading = NOBODY if is_malformed else str(HELPERS[name](a, b))
    chat = [*chat, {"role": "assistant", "content": turn}, {"role": "user", "content": reading}]
    yield chat, guess(rng) if is_malformed else copied(reading, shares, rng)


def lines(shares: Shares, rng: random.Random) -> Iterator[Mapping[str, Any]]:
    """Demonstrations without end: a chat up to the user's last message, and the turn that follows."""
    while True:
        conversation = with_helpers if rng.random() < SHARE_OF_GAMES else with_calculator
        for chat, turn in conversation(shares, rng):
            yield {"prompt": chat, "completion": turn}


def write_lessons(file: Path, count: int, mixture: bool, rng: random.Random) -> None:
    """`count` turns, one JSON object a line."""
    drawn = lines(MIXED if mixture else CLEAN, rng)
    file.write_text("".join(json.dumps(next(drawn)) + "\n" for _ in range(count)), encoding="utf-8")
