"""Environments as TRL's users write them, with nothing of rlft in them: `environment_factory` in its forms."""

import random


class SelfSampled:
    """Draws its task at `reset`, which gives the question; `get_reward` looks at its own state."""

    def reset(self, **kwargs) -> str | None:
        self.total, self.wanted = 0, random.randint(1, 6)
        return f"Count to {self.wanted}."

    def get_reward(self) -> float:
        return float(self.total == self.wanted)

    def count(self, step: int) -> int:
        """
        Counts on.

        Args:
            step: How far.

        Returns:
            Where the count stands.
        """
        self.total += step
        return self.total


class FromRows:
    """Takes a column of the data, and everything is a coroutine."""

    async def reset(self, target, **kwargs) -> None:
        self.total, self.target = 0, target

    async def get_reward(self) -> float:
        return float(self.total == self.target)

    async def count(self, step: int) -> int:
        """
        Counts on.

        Args:
            step: How far.

        Returns:
            Where the count stands.
        """
        self.total += step
        return self.total


class Guesses:
    """Holds its reward in an attribute, as OpenEnv's clients are wrapped, and raises when the game is over."""

    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.word, self.reward, self.done = "crane", 0.0, False
        return "Guess a word of five letters."

    def guess(self, guess: str) -> str:
        """
        Makes a guess.

        Args:
            guess: The word, formatted as '[abcde]'

        Returns:
            What the guess is told.
        """
        if self.done:
            raise ValueError("Game over.")
        word = guess.strip("[]")
        self.done = word == self.word
        self.reward = float(self.done)
        return "".join("G" if a == b else "Y" if a in self.word else "X" for a, b in zip(word, self.word, strict=False))
