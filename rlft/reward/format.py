"""How well a completion keeps to a template: `<think>...</think><answer>...</answer>`, or a pattern of the user's.

Tags are found in linear time. A pattern may not be: Python's `re` backtracks, so one with nested repetition, such as
`(a+)*b`, can take for ever on a text that the model happens to write. The scorer's time limit (`scoring.timeout`)
bounds it: the completion then gets `on_error`, 0.0, and the run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlft.reward.answer import check_regex, composed
from rlft.types import Group, require


class FormatMode(StrEnum):
    strict = "strict"
    soft = "soft"


def markers(tags: Sequence[str]) -> list[str]:
    """The opening and closing tags in the order of the template."""
    return [marker for tag in tags for marker in (f"<{tag}>", f"</{tag}>")]


def follows_template(text: str, tags: Sequence[str]) -> bool:
    """Whether the text is just the blocks in order: each tag once, none empty, only white space around and between."""
    if any(text.count(marker) != 1 for marker in markers(tags)):
        return False
    rest = text
    for tag in tags:
        gap, opening, rest = rest.partition(f"<{tag}>")
        body, closing, rest = rest.partition(f"</{tag}>")
        if not (opening and closing and body.strip()) or gap.strip():
            return False
    return not rest.strip()


def markers_in_place(text: str, tags: Sequence[str]) -> int:
    """The number of tags that occur exactly once in the text, and after all tags that were counted before."""
    count, last = 0, -1
    for marker in markers(tags):
        position = text.find(marker)
        if position > last and text.count(marker) == 1:
            count, last = count + 1, position
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """1.0 for each completion that keeps to the template; otherwise 0.0 (strict) or a part of 1 (soft)."""

    mode: FormatMode
    tags: Sequence[str]
    pattern: str | None

    def __post_init__(self) -> None:
        are_different = self.tags and len(set(self.tags)) == len(self.tags) and all(self.tags)
        remedy = "try [think, answer]"
        require(are_different, "tags", "must be different names", got=list(self.tags), remedy=remedy)
        if self.pattern is not None:
            problem = "a pattern is matched or not, and has no parts to count"
            remedy = "use mode=strict, or pattern=null"
            require(self.mode == FormatMode.strict, "mode", problem, got=self.mode, remedy=remedy)
            check_regex(self.pattern, r"fix it, for instance '.*#### -?[0-9]+'")

    def __call__(self, group: Group) -> list[float]:
        return [float(self._score(rollout.completion.text)) for rollout in group.rollouts]

    def _score(self, text: str) -> float:
        text = composed(text)
        if self.pattern is not None:
            return re.fullmatch(composed(self.pattern), text, re.DOTALL) is not None
        tags = [composed(tag) for tag in self.tags]
        follows = follows_template(text, tags)
        if self.mode == FormatMode.strict:
            return follows
        # Each tag in its place is a part, and the whole template the last: empty tags score less than a full one.
        return (markers_in_place(text, tags) + follows) / (2 * len(tags) + 1)
