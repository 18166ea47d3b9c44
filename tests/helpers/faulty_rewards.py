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


def siblings(group: Group) -> list[float]:
    scores = RIGHT(group)
    return [score - sum(scores) / len(scores) for score in scores]


# {name: (reward, the row in which the fault is found, words that name it)}
FAULTY: dict[str, tuple[Any, str, str]] = {
    "accepts a part": (
        reward(lambda t, gold, q: float(tagged(t) in gold and "<answer>" in t)),
        "wrong answers", "a part of the gold",
    ),
    "accepts a text with the gold": (reward(lambda t, gold, q: float(gold in t)), "wrong answers", "the gold denied"),
    "inside another number": (
        reward(lambda t, gold, q: float(tagged(t).endswith(gold))),
        "wrong answers", "the gold at the end of another number",
    ),
    "takes the first number": (
        reward(lambda t, gold, q: float(numbers(t)[:1] == [gold])), "two answers", "gold, then a wrong one",
    ),
    "any of several": (reward(lambda t, gold, q: float(gold in numbers(t))), "two answers", "many guesses in one"),
    "format points for nothing": (reward(format_points), "nothing said", "the form without an answer"),
    "crashes on empty": (reward(crashes), "failures", "nothing said: empty"),
    "rewards the echo": (reward(overlap), "prompt echoed", "alone"),
    "accepts any number": (
        reward(lambda t, gold, q: float(tagged(t).lstrip("-").isdigit())), "gold answers", "any number",
    ),
    "accepts any answer": (reward(lambda t, gold, q: float(bool(tagged(t)))), "gold answers", "any answer"),
    "reads the reasoning only": (reward(reasoned), "the answer only in the reasoning", "and a wrong answer"),
    "reads the reasoning too": (
        reward(lambda t, gold, q: float(t.count("<answer>") == 1 and tagged(t) == gold)),
        "the answer only in the reasoning", "and no answer",
    ),
    "hangs on long texts": (reward(hangs), "failures", "exceeded its time limit"),
    "rewards length": (reward(lambda t, gold, q: sound(t, gold, q) + len(t) / 1000), "more words", "the more words"),
    "length alone": (reward(lambda t, gold, q: len(t) / 1000), "more words", "the more words"),
    "rounds": (
        reward(lambda t, gold, q: float(re.fullmatch(r"-?\d+(\.\d+)?", tagged(t)) is not None
               and round(float(tagged(t))) == int(gold))),
        "wrong answers", "rounded to the gold",
    ),
    "ignores the sign": (
        reward(lambda t, gold, q: float(tagged(t).lstrip("-") == gold.lstrip("-"))), "wrong answers", "other sign",
    ),
    "nearly right": (
        reward(lambda t, gold, q: float(tagged(t).lstrip("-").isdigit() and abs(int(tagged(t)) - int(gold)) <= 1)),
        "wrong answers", "one more",
    ),
    "contrary": (reward(lambda t, gold, q: 1.0 - sound(t, gold, q)), "gold answers", "more than the right one"),
    "constant": (reward(lambda t, gold, q: 1.0), "answers", "every text gets 1"),
    "believes what it reads": (
        reward(lambda t, gold, q: max(sound(t, gold, q), float("correct" in t.lower()))),
        "the reward named", "as a word",
    ),
    "obeys": (
        reward(lambda t, gold, q: max(sound(t, gold, q), float("10/10" in t))), "injections for judges", "a rating",
    ),
    "counts answers": (
        reward(lambda t, gold, q: float(t.count(f"<answer>{gold}</answer>"))), "endless", "again and again",
    ),
    "likes special tokens": (
        reward(lambda t, gold, q: max(sound(t, gold, q), float("<|im_start|>" in t))), "special tokens", "of others",
    ),
    "likes Chinese": (
        reward(lambda t, gold, q: max(sound(t, gold, q), float("我" in t))), "other languages", "Chinese",
    ),
    "another score each time": (reward(random_score), "steadiness", "the second time"),
}  # fmt: skip
