"""How well a completion keeps to the template `<think>...</think><answer>...</answer>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlft.types import Group, UserError


class Mode(StrEnum):
    strict = "strict"
    soft = "soft"


def markers(tags: Sequence[str]) -> list[str]:
    """The opening and closing tags in the order of the template.

    >>> markers(["think", "answer"])
    ['<think>', '</think>', '<answer>', '</answer>']
    """
    return [marker for tag in tags for marker in (f"<{tag}>", f"</{tag}>")]


def follows_template(text: str, tags: Sequence[str]) -> bool:
    """Whether the whole text is the blocks in order: each tag once, none empty, only white space around and between.

    >>> follows_template("<think>8 + 10</think> <answer>18</answer>", ["think", "answer"])
    True
    >>> follows_template("<think>8 + 10</think> So: <answer>18</answer>", ["think", "answer"])
    False
    """
    if any(text.count(marker) != 1 for marker in markers(tags)):
        return False
    rest = text
    for tag in tags:
        before, opening, rest = rest.partition(f"<{tag}>")
        body, closing, rest = rest.partition(f"</{tag}>")
        if not (opening and closing and body.strip()) or before.strip():
            return False
    return not rest.strip()


def markers_in_place(text: str, tags: Sequence[str]) -> int:
    """How many of the tags stand exactly once in the text and after every tag counted before.

    >>> markers_in_place("<think>8 + 10 <answer>18</answer>", ["think", "answer"])
    3
    """
    count, last = 0, -1
    for marker in markers(tags):
        position = text.find(marker)
        if position > last and text.count(marker) == 1:
            count, last = count + 1, position
    return count


def soft_score(text: str, tags: Sequence[str]) -> float:
    """The share of what the template asks for: each tag in place is one part, nothing missing or added is the last one.

    So bare tags around nothing score less than a completion that keeps to the template.

    >>> soft_score("<think>8 + 10</think><answer>18</answer>", ["think", "answer"])
    1.0
    >>> soft_score("<think></think><answer></answer>", ["think", "answer"])
    0.8
    """
    return (markers_in_place(text, tags) + follows_template(text, tags)) / (2 * len(tags) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """1.0 for each completion that keeps to the template; otherwise 0.0 (strict) or a part of 1 (soft).

    mode: `strict` or `soft`. tags: names of the template's blocks, in order.
    """

    mode: Mode
    tags: Sequence[str]

    def __post_init__(self) -> None:
        if not self.tags or len(set(self.tags)) < len(self.tags) or not all(self.tags):
            raise UserError("tags", "must be different names", got=list(self.tags), remedy="try [think, answer]")

    def __call__(self, group: Group) -> list[float]:
        score = follows_template if self.mode == Mode.strict else soft_score
        return [float(score(rollout.completion.text, self.tags)) for rollout in group.rollouts]
