"""The page at the end of a run."""

import io
import math
import re

import pytest
from in_one_test import each

from rlft.logger.console import StandardOutput as Terminal
from rlft.logger.loggers import Jsonl
from rlft.logger.summary import curve, print_summary

COMMANDS = [("score it", "rlft eval run=runs/x " + "key=value " * 12)]


@pytest.fixture
def folder(make_run, make_step, make_evaluation):
    """Twenty steps with two evaluations; the second example turns right, its text is nasty."""
    run = make_run(steps=20)
    logger = Jsonl()
    logger.start(run)
    logger.evaluation(make_evaluation(0, 0.4, ("[b]3", "\x1b[2Jwrong\u202e 4")))
    for step in range(1, 21):
        logger.step(make_step(step, reward__mean=0.4 + step / 40 + 0.05 * math.sin(step), time__step=3.0))
    logger.evaluation(make_evaluation(20, 0.9, ("[b]3", "now 3")))
    logger.finish("finished")
    return run.folder


def page(folder, width, encoding="utf-8", **options):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    print_summary(
        folder, COMMANDS, Terminal(file=stream, width=width, markup=False, emoji=False, highlight=False, **options)
    )
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_fits_and_only_commands_run_over(folder, width):
    lines = page(folder, width).splitlines()
    whole = ("rlft eval", str(folder))  # to be copied
    assert max(len(line) for line in lines if not any(word in line for word in whole)) <= width
    assert "  rlft eval run=runs/x " + "key=value " * 12 in lines


def test_the_page_tells_accuracy_before_and_after_time_and_folder_in_colour_on_terminals_only(folder):
    text = page(folder, 120)
    assert re.search(r"held-out accuracy +0\.400 ± 0\.010 → 0\.900 ± 0\.010  \(step 0 → 20\)", text)
    assert re.search(r"training +1:00 for 20 steps", text)  # 20 steps of 3 s
    assert str(folder) in text.replace("\n", "")
    assert "# score it" in text
    assert "\x1b" not in text
    assert "\x1b[32m✓ right" in page(folder, 80, force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[3" not in page(folder, 80, force_terminal=True, color_system="standard", no_color=True)


def test_the_same_prompts_stand_side_by_side_with_marks(folder):
    rows = [line for line in page(folder, 100).splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["What is 1+2+0*0?", "✓ right", "✓ right"],
        ["answer: 3", "[b]3", "[b]3"],
        ["What is 1+2+1*0?", "✗ wrong", "✓ right"],
        ["answer: 3", r"\x1b[2Jwrong\u202e 4", "now 3"],
    ]


def test_the_curve_shows_rewards_and_accuracies(folder):
    text = page(folder, 80)
    drawing = [line for line in text.splitlines() if re.match(r"(\d\.\d\d┤|    │)", line)]
    assert sum(line.count("o") for line in drawing) == 2  # two evaluations
    assert sum(len(re.findall("[\u2801-\u28ff]", line)) for line in drawing) > 30
    # the largest reward is the last, 0.4 + 20/40 + 0.05 sin 20 = 0.946; the smallest value is the first accuracy
    assert drawing[0].startswith("0.95")
    assert drawing[-1].startswith("0.40")
    assert re.search(r"\n +0 +5 +10 +15 +20 *\n", text)


def test_a_pipe_without_unicode_gets_an_ascii_page(folder):
    text = page(folder, 80, encoding="ascii")
    assert text.isascii()
    assert "\\u25" not in text  # no box or sign that had to be spelled out
    assert "0.400 +- 0.010 -> 0.900 +- 0.010" in text
    assert "x wrong" in text


def test_a_run_without_files_says_where_it_is_and_one_of_one_step_has_no_curve(tmp_path, make_run, make_step):
    text = page(tmp_path, 120)
    assert "run folder" in text
    assert "held-out" not in text
    logger = Jsonl()
    logger.start(make_run())
    logger.step(make_step(1, reward__mean=float("nan")))
    assert "reward/mean" not in page(make_run().folder, 80)


@each("values", [[0.0, 0.0], [1.0, 1.0], [-3.0, 250.0], [1e-9, 2e-9], [0.1 + 1e-12, 0.1]])
def test_any_rewards_can_be_drawn(values):
    for ascii_only in (False, True):
        drawing = curve(list(enumerate(values, 1)), [], width=60, ascii_only=ascii_only)
        assert len(drawing.splitlines()) == 14
        assert max(map(len, drawing.splitlines())) <= 60
        assert "\x1b" not in drawing
