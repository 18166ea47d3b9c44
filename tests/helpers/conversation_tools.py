"""Tools, environments and opponents of conversations in tests; imported by worker processes, too."""

import os
import random
import signal
import sys
import time
from typing import Any

from rlft.environment.tools import Tools


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def say(text: str) -> str:
    """Says a text again.

    Args:
        text: what is said
    """
    return text


def misbehave(how: str) -> str:
    """Misbehaves.

    Args:
        how: in which way
    """
    match how:
        case "hang":
            time.sleep(60)
        case "hang for good":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        case "raise":
            raise ValueError("a \x00 \ud800 problem <|im_end|>")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "fork":
            os.fork()
        case "shout":
            return "x" * 2**20
        case "interrupt":
            raise KeyboardInterrupt
    return how


def no_types(a, b):  # type: ignore[no-untyped-def]
    """Adds.

    Args:
        a: one
        b: another
    """
    return a + b


def no_docstring(a: int) -> int:
    return a


class Counter:
    """In TRL's form: counts, and is worth what it has counted to."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, **row: Any) -> str | None:
        self.count = int(row.get("start", 0))
        return f"It stands at {self.count}." if "start" in row else None

    def increase(self, by: int) -> str:
        """Increases the counter.

        Args:
            by: by how much

        Returns:
            Where it stands.
        """
        if by == 99:
            os._exit(1)
        if by < 0:
            raise ValueError("it only goes up")
        self.count += by
        return f"{self.count}"

    def draw(self) -> str:
        """Draws a random number."""
        return str(random.random())

    def get_reward(self) -> float:
        return float(self.count)


class NoReset:
    def roll(self) -> str:
        """Rolls."""
        return "6"


class DiceAtReset(NoReset):
    """Its conversations begin with what each sibling has drawn for itself."""

    drawn = 0

    def reset(self, **row: Any) -> str:
        type(self).drawn += 1
        return f"You have drawn {type(self).drawn % 10}."


class NeedsArguments(DiceAtReset):
    def __init__(self, sides: int) -> None:
        self.sides = sides


class Guessing:
    """A game of two turns: the policy learns in the first whether the number is low or high, and guesses it then."""

    def reset(self, answer: str, **row: Any) -> str | None:
        self.number = int(answer)
        self.asked = False
        return "Ask, then guess."

    def step(self, text: str) -> tuple[str, float | None, bool]:
        if not self.asked:
            self.asked = True
            return ("low" if self.number < 5 else "high"), 0.25, False
        return "", float(text.strip() == str(self.number)), True


class Chatty:
    """A game of three turns whose words look like special tokens."""

    def reset(self, **row: Any) -> str:
        self.turn = 0
        return "Begin <|im_end|>."

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        return f"<|im_start|>no {self.turn}", float(self.turn), self.turn == 3


class ChattyDice(Chatty):
    """One that begins with what each sibling has drawn for itself."""

    drawn = 0

    def reset(self, **row: Any) -> str:
        super().reset()
        type(self).drawn += 1
        return f"Begin {type(self).drawn}."


class Letters:
    """A game of two turns that likes one letter."""

    def reset(self, **row: Any) -> str:
        self.turn = 0
        return "Ask, then guess."

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        return "high", float(text.count("1")), self.turn == 2


class CannotStart(Tools):
    def start(self) -> None:
        raise RuntimeError("no server")


def hashed() -> int:
    """Says the hash of a text."""
    return hash("text")


class Murmur:
    """A game of any number of turns that says little."""

    def reset(self, **row: Any) -> None:
        pass

    def step(self, text: str) -> tuple[str, None, bool]:
        return "1", None, False


# -- opponents in games ------------------------------------------------------------------------------------------------
def first_free_cell(observation: str) -> str:
    """Plays the first cell that the last board shows as free."""
    return observation.rsplit("Available Moves: ", 1)[1].split("'")[1]


class Remembers:
    """Is shown all that it was shown before, and what is new."""

    def __init__(self) -> None:
        self.seen = "[GAME] You are Player "

    def __call__(self, observation: str) -> str:
        assert observation.startswith(self.seen)
        assert len(observation) > len(self.seen)
        self.seen = observation
        return first_free_cell(observation)


def gives_up(observation: str) -> str:
    return "I give up"


def plays_rock(observation: str) -> str:
    return "[rock]"


def sleeps(observation: str) -> str:
    time.sleep(60)
    return observation
