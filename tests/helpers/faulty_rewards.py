"""Rewards with a fault each, as people write them, and the words in which `rlft reward try` names it."""

import random
import re
import time
from collections.abc import Callable
from typing import Any

from rlft.types import Group

Score = Callable[[str, str, str], float]


def reward(score: Score) -> Callable[[Group], list[float]]:
    """The reward that scores (text, reference answer, question)."""

    def scores(group: Group) -> list[float]:
        gold, question = group.prompt.answer, str(group.prompt.messages[-1]["content"])
        return [score(rollout.completion.text, gold, question) for rollout in group.rollouts]

    return scores


def tagged(text: str) -> str:
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip() if "</answer>" in text else ""


def numbers(text: str) -> list[str]:
    return re.findall(r"-?[0-9]+", text)


def sound(text: str, gold: str, question: str) -> float:
    is_template = text.count("<answer>") == text.count("</answer>") == 1
    said = re.sub(r"<think>.*?(</think>|$)", "", text, flags=re.DOTALL)
    return float(is_template and tagged(said) == gold)


RIGHT = reward(sound)


def random_score(text: str, gold: str, question: str) -> float:
    return sound(text, gold, question) * random.random()


def crashes(text: str, gold: str, question: str) -> float:
    return float(text.split()[-1] == gold)


def hangs(text: str, gold: str, question: str) -> float:
    while len(text) > 400:
        time.sleep(0.01)
    return sound(text, gold, question)


def format_points(text: str, gold: str, question: str) -> float:
    return sound(text, gold, question) + 0.3 * ("<answer>" in text)


def overlap(text: str, gold: str, question: str) -> float:
    asked, said = set(question.lower().split()), set(text.lower().split())
    return sound(text, gold, question) + len(asked & said) / max(1, len(asked))


def reasoned(text: str, gold: str, question: str) -> float:
    return float(gold in text.partition("<think>")[2].partition("</think>")[0])


def rounds(text: str, gold: str, question: str) -> float:
    is_number = re.fullmatch(r"-?\d+(\.\d+)?", tagged(text)) is not None
    return float(is_number and round(float(tagged(text))) == int(gold))


def siblings(group: Group) -> list[float]:
    scores = RIGHT(group)
    return [score - sum(scores) / len(scores) for score in scores]


# {name: (how it scores, the row in which the fault is found, words that name it)}
FAULTS: dict[str, tuple[Score, str, str]] = {
    "accepts a part": (
        lambda t, gold, q: float(tagged(t) in gold and "<answer>" in t), "wrong answers", "a part of the gold",
    ),
    "accepts a text with the gold": (lambda t, gold, q: float(gold in t), "wrong answers", "the gold denied"),
    "inside another number": (
        lambda t, gold, q: float(tagged(t).endswith(gold)), "wrong answers", "the gold at the end of another number",
    ),
    "takes the first number": (
        lambda t, gold, q: float(numbers(t)[:1] == [gold]), "two answers", "gold, then a wrong one",
    ),
    "any of several": (lambda t, gold, q: float(gold in numbers(t)), "two answers", "many guesses in one"),
    "format points for nothing": (format_points, "nothing said", "the form without an answer"),
    "crashes on empty": (crashes, "failures", "nothing said: empty"),
    "rewards the echo": (overlap, "prompt echoed", "alone"),
    "accepts any number": (lambda t, gold, q: float(tagged(t).lstrip("-").isdigit()), "gold answers", "any number"),
    "accepts any answer": (lambda t, gold, q: float(bool(tagged(t))), "gold answers", "any answer"),
    "reads the reasoning only": (reasoned, "the answer only in the reasoning", "and a wrong answer"),
    "reads the reasoning too": (
        lambda t, gold, q: float(t.count("<answer>") == 1 and tagged(t) == gold),
        "the answer only in the reasoning", "and no answer",
    ),
    "hangs on long texts": (hangs, "failures", "exceeded its time limit"),
    "rewards length": (lambda t, gold, q: sound(t, gold, q) + len(t) / 1000, "more words", "the more words"),
    "length alone": (lambda t, gold, q: len(t) / 1000, "more words", "the more words"),
    "rounds": (rounds, "wrong answers", "rounded to the gold"),
    "ignores the sign": (
        lambda t, gold, q: float(tagged(t).lstrip("-") == gold.lstrip("-")), "wrong answers", "other sign",
    ),
    "nearly right": (
        lambda t, gold, q: float(tagged(t).lstrip("-").isdigit() and abs(int(tagged(t)) - int(gold)) <= 1),
        "wrong answers", "one more",
    ),
    "contrary": (lambda t, gold, q: 1.0 - sound(t, gold, q), "gold answers", "more than the right one"),
    "constant": (lambda t, gold, q: 1.0, "answers", "every text gets 1"),
    "believes what it reads": (
        lambda t, gold, q: max(sound(t, gold, q), float("correct" in t.lower())), "the reward named", "as a word",
    ),
    "obeys": (lambda t, gold, q: max(sound(t, gold, q), float("10/10" in t)), "injections for judges", "a rating"),
    "counts answers": (lambda t, gold, q: float(t.count(f"<answer>{gold}</answer>")), "endless", "again and again"),
    "likes special tokens": (
        lambda t, gold, q: max(sound(t, gold, q), float("<|im_start|>" in t)), "special tokens", "of others",
    ),
    "likes Chinese": (lambda t, gold, q: max(sound(t, gold, q), float("我" in t)), "other languages", "Chinese"),
    "another score each time": (random_score, "steadiness", "the second time"),
}  # fmt: skip
FAULTY: dict[str, tuple[Any, str, str]] = {name: (reward(score), *found) for name, (score, *found) in FAULTS.items()}
"""The same with the rewards that score so."""
