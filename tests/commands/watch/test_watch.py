"""`rlft watch`: a run that goes on is followed until its end, and one that has ended shows its closing page."""

import json
import re
import shutil
from contextlib import ExitStack

import pytest

from rlft.commands.watch import watch
from rlft.runs import run_folder, run_status
from rlft.runs.forecast import Price
from rlft.runs.run_status import Status


@pytest.fixture
def going_on(made, tmp_path):
    """A run that begins anew: its folder, its lines, and how to end it."""
    folder = tmp_path / "run"
    shutil.copytree(made / "first" / "a", folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("")
    with ExitStack() as stack:
        stack.enter_context(run_folder.held(folder))
        stack.enter_context(run_status.recording_status(folder, 3))
        yield folder, lines, stack.close


def acts(*actions):
    """A sleep in which the next thing happens."""
    todo = list(actions)
    return lambda seconds: todo.pop(0)() and None


def test_it_follows_until_the_run_ends(going_on, capsys):
    folder, lines, end = going_on
    file = folder / "metrics.jsonl"

    def write(text):
        def act():
            with file.open("a") as out:
                out.write(text)

        return act

    capsys.readouterr()
    priced = [json.dumps(json.loads(line) | {"time/step": 1800.0}) + "\n" for line in lines]
    steps = acts(write(priced[0]), write(priced[1][:20]), write(priced[1][20:] + priced[2]), end)
    watch.watch(folder, Price(2.5, "EUR"), steps)
    page = capsys.readouterr().out
    assert "step 1/3  reward" in page
    assert "step 3/3  reward" in page
    assert "finished 3 steps in" in page
    # The evaluation before them took seconds: less than 0.005 of 2.5 an hour are 7 s, so the first decimal is certain.
    assert re.search(r"step 1/3 .* cost 1\.2\d EUR", page), "half an hour"
    assert re.search(r"cost of its steps, evaluations and checkpoints: 3\.7\d EUR", page)
    assert f"{folder} finished" in page.replace("\n", "")


def test_it_begins_anew_when_the_run_went_back(going_on, capsys):
    folder, lines, end = going_on
    file = folder / "metrics.jsonl"
    capsys.readouterr()
    steps = (lambda: file.write_text("".join(lines[:2])), lambda: file.write_text(lines[0]), lambda: None, end)
    watch.watch(folder, sleep=acts(*steps))
    assert capsys.readouterr().out.count("step 1/3  reward") == 2


def test_one_that_has_ended_shows_its_closing_page(made, ran):
    page = ran(["watch", str(made / "second" / "c")]).out
    assert "\x1b" not in page
    assert "stopped: " in page
    assert run_status.read(made / "second" / "c")[0] is Status.stopped
