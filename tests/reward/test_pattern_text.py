"""Texts that a pattern finds an answer in."""

from __future__ import annotations

import re

import pytest
from in_one_test import each

from rlft.reward.answer import written_for


@each(
    ("pattern", "answer"),
    [
        (r"(?i)answer:\s*(-?\d+)", "18"),
        (r"(?<=Answer: )(\d+)", "18"),
        (r"\\boxed\{([^}]*)\}", "7"),
        (r"(?:The answer is|Answer:)\s+(.+?)(?:\.|$)", "Paris"),
        (r"[^0-9\s]{2,}=(\d+)$", "4"),
        (r"(?:so |x=([A-J])\b)+", "B"),
        (r"\*\*([^*]+)\*\*", "1/2"),
        (r"([^\s]+)\Z", "1/2"),
    ],
)
def test_the_pattern_finds_the_answer_in_the_text(pattern, answer):
    found = re.search(pattern, written_for(pattern, answer))
    assert found[1] == answer


def test_an_answer_that_a_pattern_cuts_stands_whole_in_the_text():
    assert written_for(r"#### (-?\d+)", "1,080") == "#### 1,080"


@pytest.mark.parametrize("pattern", [r"(?P<x>a)(?P=x)", r"(a)(?!b)b", "(a"])
def test_no_text_is_made_where_none_can_be(pattern):
    assert written_for(pattern, "a") is None
