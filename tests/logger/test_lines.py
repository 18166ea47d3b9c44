"""Lines that are damaged cost nothing but themselves, and are told with their numbers and steps."""

from __future__ import annotations

import json
from pathlib import Path

from in_one_test import each

from rlft.logger.lines import DamagedLines, complete_lines, lost_text


def lines_of(*steps: int) -> list[bytes]:
    return [json.dumps({"step": step, "x": 0.5}).encode() + b"\n" for step in steps]


def read(raw: list[bytes]) -> tuple[list[int], str]:
    lost: list[DamagedLines] = []
    steps = [line["step"] for _, line in complete_lines(raw, lost)]
    return steps, lost_text(Path("metrics.jsonl"), lost) if lost else ""


def test_one_bad_byte_costs_one_line() -> None:
    raw = lines_of(1, 2, 3, 4, 5)
    raw[2] = raw[2].replace(b"0.5", b"0\xff5")
    assert read(raw) == ([1, 2, 4, 5], "metrics.jsonl: line 3 (step 3) is damaged and left out")


@each(
    ("raw", "steps", "told"),
    [
        # The step itself is gone: as many as the lines that are lost lie between, or not.
        ([*lines_of(1, 2), b"\xff\n", *lines_of(4)], [1, 2, 4], "line 3 (step 3) is"),
        ([*lines_of(0, 20), b"\xff\n", *lines_of(60)], [0, 20, 60], "line 3 (between steps 20 and 60) is"),
        ([b"\xff\n", *lines_of(2)], [2], "line 1 (before step 2) is"),
        ([*lines_of(1), b"\xff\n"], [1], "line 2 (after step 1) is"),
        ([b"\xff\n"], [], "line 1 is"),
        # A damaged newline leaves two lines in one, a power cut zeros.
        (
            [*lines_of(1), lines_of(2)[0][:-1] + b"\xff" + lines_of(3)[0], *lines_of(4)],
            [1, 4],
            "line 2 (steps 2, 3) is",
        ),
        ([*lines_of(1), b"\0" * 99 + b"\n", *lines_of(9)], [1, 9], "line 2 (between steps 1 and 9) is"),
        # Neighbours are told together, others one by one.
        (
            [*lines_of(1), b"{\n", b"[]\n", *lines_of(4), b'{"step": true}\n', *lines_of(6)],
            [1, 4, 6],
            "lines 2 to 3 (steps 2, 3), line 5 (step 5) are",
        ),
        ([*lines_of(1, 2), b'{"step": 3'], [1, 2], ""),  # is being written
    ],
)
def test_what_is_lost_is_told_as_far_as_it_is_known(raw: list[bytes], steps: list[int], told: str) -> None:
    assert read(raw) == (steps, f"metrics.jsonl: {told} damaged and left out" if told else "")


def test_the_bytes_up_to_a_line_count_damaged_ones() -> None:
    raw = [*lines_of(1), b"\xff\n", *lines_of(3)]
    assert [end for end, _ in complete_lines(raw)] == [len(raw[0]), sum(map(len, raw))]
