"""How the lines of a run's files are written and read, damaged ones included."""

import json
from pathlib import Path

import pytest
from in_one_test import each

from rlft.runs import lines
from rlft.runs.lines import complete_lines, encode, lost_text, read_lines


@each("nasty", ["\u2028", "\x85", "\u202e", "\ud800", "\x1b[2J", "\x00", "\n"])
def test_no_character_breaks_a_line_or_survives_unescaped(nasty):
    data = encode({"text": f"a{nasty}b 答"})
    assert data.count(b"\n") == 1
    assert len(data.decode("utf-8").splitlines()) == 1
    assert nasty not in data.decode("utf-8").rstrip("\n")
    assert json.loads(data)["text"] == f"a{nasty}b 答"
    assert "答".encode() in data


METRICS_LINES = [
    b'{"step": 1, "loss/total": -2.5e-3, "reward/mean": null, "ratio/a": 1}\n',
    b'{"step": 2, "loss/total": 0.5}\n',
    b'{"step": 3, "loss/total": 0.25, "eval/pass@2": 1e+2}\n',
]


def test_the_last_line_of_metrics_is_read_alone(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(METRICS_LINES) + b'{"step": 4, "los')
    monkeypatch.setattr(lines, "read_lines", lambda *_: pytest.fail("all lines are read"))
    assert lines.last_line(file) == {"step": 3, "loss/total": 0.25, "eval/pass@2": 100.0}


@pytest.mark.parametrize("damaged", [
    b"\x00" * 40 + b"\n", b'{"step": 2, "loss/to\n', b'{"step": 2, "loss/total: 0.5}\n', b'{"step": 2 "a": 1}\n',
    b'{"step": 2, "a": 1\n', b'{"step": 2, "a": 1}{"step": 3, "a": 1}\n', b"[1]\n", b"\n", b'"step": 2\n',
])  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_last_line_comes_with_word_of_damaged_ones(damaged, place, tmp_path):
    written = [*METRICS_LINES]
    written[place] = damaged
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(written))
    told, told_by_all = [], []
    assert lines.last_line(file, told.append) == read_lines(file, told_by_all.append)[-1]
    assert told == told_by_all != []


def test_a_line_without_its_newline_counts_as_torn_and_there_may_be_none(tmp_path):
    (tmp_path / "torn.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_lines(tmp_path / "torn.jsonl") == [{"step": 1}]
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    assert lines.last_line(tmp_path / "metrics.jsonl") == lines.last_line(tmp_path / "none.jsonl") == {}


# -- damaged lines cost nothing but themselves, and are told with their numbers and steps ------------------------------
def lines_of(*steps):
    return [json.dumps({"step": step, "x": 0.5}).encode() + b"\n" for step in steps]


def undamaged(raw):
    lost = []
    steps = [line["step"] for _, line in complete_lines(raw, lost)]
    return steps, lost_text(Path("metrics.jsonl"), lost) if lost else ""


@each(("raw", "steps", "told"), [
    # The step itself is gone: as many as the lines that are lost lie between, or not.
    ([*lines_of(1, 2), b"\xff\n", *lines_of(4)], [1, 2, 4], "line 3 (step 3) is"),
    ([*lines_of(0, 20), b"\xff\n", *lines_of(60)], [0, 20, 60], "line 3 (between steps 20 and 60) is"),
    ([b"\xff\n", *lines_of(2)], [2], "line 1 (before step 2) is"),
    ([*lines_of(1), b"\xff\n"], [1], "line 2 (after step 1) is"),
    ([b"\xff\n"], [], "line 1 is"),
    # A damaged newline leaves two lines in one, a power cut zeros.
    ([*lines_of(1), lines_of(2)[0][:-1] + b"\xff" + lines_of(3)[0], *lines_of(4)], [1, 4],
     "line 2 (steps 2, 3) is"),
    ([*lines_of(1), b"\0" * 99 + b"\n", *lines_of(9)], [1, 9], "line 2 (between steps 1 and 9) is"),
    # Neighbours are told together, others one by one.
    ([*lines_of(1), b"{\n", b"[]\n", *lines_of(4), b'{"step": true}\n', *lines_of(6)], [1, 4, 6],
     "lines 2 to 3 (steps 2, 3), line 5 (step 5) are"),
    ([*lines_of(1, 2), b'{"step": 3'], [1, 2], ""),  # is being written
    ([*lines_of(1, 2), b'{"step": 3, "x": 0\xff5}\n', *lines_of(4, 5)], [1, 2, 4, 5], "line 3 (step 3) is"),
])  # fmt: skip
def test_what_is_lost_is_told_as_far_as_it_is_known(raw, steps, told):
    assert undamaged(raw) == (steps, f"metrics.jsonl: {told} damaged and left out" if told else "")


def test_the_bytes_up_to_a_line_count_damaged_ones():
    raw = [*lines_of(1), b"\xff\n", *lines_of(3)]
    assert [end for end, _ in complete_lines(raw)] == [len(raw[0]), sum(map(len, raw))]
