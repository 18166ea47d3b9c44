"""Fenced code: made by CommonMark's grammar around programs that are known, and compared with another reader of it."""

from __future__ import annotations

import itertools
import random

from in_one_test import each
from markdown_it import MarkdownIt

from rlft.reward.code import fenced
from rlft.tokens.fences import blocks, unfenced

PROGRAMS = (
    "print(1)\n",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "if True:\n\tprint('tab')\n",
    'def f():\n    """\n    ```python\n    >>> f()\n    ```\n    """\n',
    "x = '''\n~~\n``\n'''\n",
    "    return a + b\n",
)
PLACES = {
    "at the line's start": ("", ""), "indented by one": (" ", " "), "indented by three": ("   ", "   "),
    "in a list": ("- ", "  "), "in a numbered list": ("1. ", "   "), "in a list in a list": ("- 2) ", "     "),
    "in a list, below its text": ("* So:\n\n  ", "  "), "quoted": ("> ", "> "), "in a quoted list": ("> - ", ">   "),
}  # fmt: skip
DEEPER = {
    "indented by four": ("    ", "    "),
    "indented by a tab": ("\t", "\t"),
    "indented by nine": (" " * 9, " " * 9),
}
"""Where CommonMark has no fences, but models do."""
INFOS = ("python", "Python", "py", "python3", " python", "python title=x.py", "{.python .numberLines}", "")
ENDS = ("\n", "\r\n", "\r")
CLOSINGS = ("", "+", " ", "   ", "+  ")
"""What is different in a closing fence: + is one character more, spaces stand before it, as up to three may."""


def text_of(program: str, place: tuple[str, str], run: str, info: str, closing: str | None) -> str:
    """A text with the program in a fence; closing None: without one."""
    first, rest = place
    lines = [f"{first}{run}{info}", *(rest + line for line in program.splitlines())]
    if closing is not None:
        lines.append(rest + closing.replace("+", "") + run + run[0] * closing.count("+"))
    return "Here it is:\n\n" + "\n".join(lines) + "\n"


def cases(places: dict[str, tuple[str, str]]) -> list[tuple[str, str, tuple[str, str], str, str | None]]:
    """[(program, run, place, info, closing)], without those in which the program would close its own fence."""
    runs = [character * length for character in "`~" for length in (3, 4, 6)]
    product = itertools.product(PROGRAMS, runs, places.values(), INFOS, (*CLOSINGS, None))
    return [case for case in product if not (case[1][0] == "~" and "~~~" in case[0])]


def test_a_program_is_read_from_every_fence_of_commonmark_and_from_deeper_ones() -> None:
    every = cases(PLACES | DEEPER)
    assert len(every) == 6 * 6 * 12 * 8 * 6
    for number, (program, run, place, info, closing) in enumerate(random.Random(0).sample(every, 6000)):
        text = text_of(program, place, run, info, closing)
        text = text.replace("\n", ENDS[number % len(ENDS)])
        if closing is not None:
            text += "That was it.\n"
        assert fenced(text) == program, (text, number)


def test_a_program_is_read_behind_text_on_the_line_of_its_fence_and_from_a_longer_fence_than_its_end() -> None:
    before = ("Here: ", "So the answer is", "<answer>", "**Code**: ", "Use `add` so: ", "1. First ", "> x ", "\tSee ")
    for program, text, info, more in itertools.product(PROGRAMS[:2], before, INFOS[:4], ("", "`", "```")):
        fence = f"````{more}"[: 3 + len(more)]
        assert fenced(f"First.\n{text}{fence}{info}\n{program}{fence}\nThat was it.") == program, (text, info)
        assert fenced(f"First.\n{fence}{info}\n{program}```\nThat was it.") == program, (fence, info)
    assert [b.text for b in blocks("````\na\n```\nb\n````\n````python\nc\n```")] == ["a\n```\nb\n", "c\n"]


def test_blocks_are_those_of_another_reader_of_commonmark() -> None:
    reader = MarkdownIt("commonmark")
    strict = [case for case in cases(PLACES) if case[4] in ("", "+", None)]
    for program, run, place, info, closing in random.Random(1).sample(strict, 600):
        text = text_of(program, place, run, info, closing)
        expected = [
            (t.content, t.info.strip().strip("{. ").split(" ")[0]) for t in reader.parse(text) if t.type == "fence"
        ]
        assert [(b.text, b.language) for b in blocks(text)] == [(c, i.lower()) for c, i in expected], text


@each(
    ("text", "program"),
    [
        ("```python\na\n```</answer>", "a\n"),  # as models end a tag
        ("Inline ```a``` is none.", None),
        ("``\na\n``", None),
        ("~~~\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````\na\n```\nb\n````", "a\n```\nb\n"),
        ("```python\nx = '''\n ```\n'''\n```", "x = '''\n ```\n'''\n"),
        ("```python\na\n ```\nSo:\n```python\nb\n```", "b\n"),
        ("````markdown\n# Add\n```python\na\n```\n````", "a\n"),
        ("> ```python\n> a\n> ```\n\n```\nb\n```", "a\n"),
        ("1. ```python\nif a:\n    b\n```", "if a:\n    b\n"),
        ("1. x\n   ```python\na\n   ```", "a\n"),  # a line with less indentation than its list
        ("```text\na\n```", None),
        ("Inline ```a``` and ```b", None),
        ("1. Use ```python\n   a\n   ```", "a\n"),
    ],
)
def test_what_else_models_write(text: str, program: str | None) -> None:
    assert fenced(text) == program


@each(
    ("text", "bare"),
    [("```python\na\n```", "a\n"), ("~~~\na\n~~~\n", "a\n"), ("a", "a"), ("```\na\n```\nb", "```\na\n```\nb")],
)
def test_a_text_that_is_one_block_is_read_without_its_fence(text: str, bare: str) -> None:
    assert unfenced(text) == bare
