"""An error that nobody foresaw: one line, exit code 1, its traceback in a file, and the run says that it stopped."""

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlft import cli
from rlft.config import command as commands
from rlft.plan.run_plan import Plan
from rlft.runs import run_status
from rlft.runs.run_status import Status
from rlft.system import crash
from rlft.types import UserError

BUG = "rlft should not have failed like this: please report it with that file"


class ThreeSteps(Plan):
    num_steps = 3


def that_raises(command, make_error):
    """The command without a model: planned at once, it raises as soon as it begins."""

    def make_plan(resolved):
        config = SimpleNamespace(resume=resolved.config.resume, token_budget=512)
        return ThreeSteps(config=config, plain=resolved.plain, fingerprints={}, engine=None)

    def do(*args):
        raise make_error()

    return replace(command, make_plan=make_plan, run=do, steps_done=lambda *args: 0)


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """Has the run of every command raise this; temporary files lie in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlft", "train", "seed=1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(crash.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("rlft.plan.fit.fit_to_device", lambda plan: plan)
    monkeypatch.delenv(crash.DEBUG, raising=False)

    def fail(make_error):
        named = commands.named
        monkeypatch.setattr(commands, "named", lambda name: that_raises(named(name), make_error))

    return fail


def test_a_run_tells_it_in_a_line_and_keeps_the_traceback(failing, capsys):
    failing(lambda: ValueError("first line\nsecond line"))
    assert cli.run(["train", "hydra.run.dir=here"]) == 1
    line = "ValueError: first line\\nsecond line; its traceback is in here/error.txt; " + BUG
    assert capsys.readouterr().err == f"rlft: stopped: {line}\n"
    kept = Path("here/error.txt").read_text()
    assert "rlft train seed=1" in kept
    assert "in do\n" in kept
    assert kept.endswith("ValueError: first line\nsecond line\n\n")
    assert run_status.read(Path("here")) == (Status.stopped, line)


def test_a_second_start_keeps_what_the_first_left(failing):
    for number in range(2):
        failing(lambda: KeyError(f"error {number}"))  # noqa: B023  # raised before the next one
        cli.run(["train", "hydra.run.dir=here", "resume=auto"])
    kept = Path("here/error.txt").read_text()
    assert kept.count("Traceback (most recent call last)") == 2
    assert "error 0" in kept
    assert "error 1" in kept


SFT = "sft demonstrations.path=embedded:arithmetic-demonstrations"
FREE = " free; free some space there, then resume with: rlft resume here\n"
TOLD = [
    (SFT, lambda: OSError(errno.EMFILE, "Too many open files", "here/metrics.jsonl"), 1,
     "stopped: OSError: [Errno 24] Too many open files: 'here/metrics.jsonl'; ",
     "; check the file, disk or connection that it names\n"),
    ("train", lambda: Exception("No space left on device (os error 28)"), 1,  # as tokenizers says it
     "stopped: the disk is full (No space left on device): here has ", FREE),
    ("train", lambda: UserError("data.path", "is gone", remedy="put it back"), 2,
     "data.path: is gone; put it back\n", "rlft: data.path: is gone; put it back\n"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "make_error", "code", "begins", "ends"), TOLD, ids=["system", "disk", "own words"])
def test_errors_of_the_system_say_what_to_look_at_and_some_explain_themselves(
    words, make_error, code, begins, ends, failing, capsys
):
    failing(make_error)
    assert cli.run([*words.split(), "hydra.run.dir=here"]) == code
    told = capsys.readouterr().err
    assert (told.startswith(f"rlft: {begins}"), told.count("\n")) == (True, 1), told
    assert told.endswith(ends) or (begins.startswith("stopped: OSError") and ends.strip() in told), told
    assert Path("here/error.txt").exists() == begins.startswith("stopped: OSError")
    if ends == FREE:
        assert run_status.read(Path("here")) == (Status.stopped, told.strip().removeprefix("rlft: stopped: "))


def test_each_job_of_a_sweep_keeps_its_own(failing, capsys):
    failing(lambda: ZeroDivisionError("by zero"))
    assert cli.run(["train", "-m", "seed=1,2", "hydra.sweep.dir=swept"]) == 1
    told = capsys.readouterr().err.splitlines()
    for number in range(2):
        line = f"ZeroDivisionError: by zero; its traceback is in swept/{number}/error.txt; {BUG}"
        assert f"job {number} failed: {line}" in told
        assert run_status.read(Path("swept") / str(number)) == (Status.stopped, line)
        assert "ZeroDivisionError: by zero" in Path(f"swept/{number}/error.txt").read_text()
    first = "job 0: ZeroDivisionError: by zero; its traceback is in swept/0/error.txt; "
    assert told[-1].startswith(f"rlft: stopped: 2 jobs failed, the first of them {first}")
    assert "Traceback" not in "".join(told)


COMMANDS = {
    "train": "rlft.cli.compose_run",
    "sft": "rlft.cli.compose_run",
    "rm": "rlft.cli.compose_run",
    "sample": "rlft.cli.compose_run",
    "plan": "rlft.commands.plan.compose_run",
    "doctor": "rlft.commands.doctor.command.compose_run",
    "resume x": "rlft.runs.run_folder.read",
    "eval x": "rlft.commands.policy.one_run",
    "chat x": "rlft.commands.policy.one_run",
    "export x": "rlft.commands.policy.one_run",
    "runs": "rlft.commands.watch.runs.command",
    "watch x": "rlft.commands.watch.watch.command",
    "diff x y": "rlft.commands.watch.diff.command",
    "report x": "rlft.commands.watch.report.command",
    "recipes": "rlft.config.catalog.first_comment",
    "algorithms": "rlft.config.catalog.first_comment",
}


@pytest.mark.parametrize("typed", COMMANDS)
def test_where_no_run_has_begun_the_traceback_is_among_the_temporary_files(typed, failing, monkeypatch, capsys):
    def broken(*args, **keys):
        raise AssertionError

    monkeypatch.setattr(COMMANDS[typed], broken)
    assert cli.run(typed.split()) == 1
    told = capsys.readouterr().err
    [file] = Path("temporary").iterdir()
    assert told == f"rlft: stopped: AssertionError; its traceback is in {file.resolve()}; {BUG}\n"
    assert "in broken\n" in file.read_text()


def test_where_nothing_can_be_written_the_traceback_is_printed(failing, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(crash.tempfile, "tempdir", str(tmp_path / "gone"))
    Path("here/error.txt").mkdir(parents=True)  # a folder in the file's place
    failing(lambda: ValueError("x"))
    assert cli.run(["train", "hydra.run.dir=here"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last)")
    assert told.endswith(
        "rlft: stopped: ValueError: x; its traceback is printed above, since no file could be written\n"
    )


@pytest.mark.parametrize(("value", "printed"), [("1", True), ("0", False), ("", False)])
def test_tracebacks_are_printed_for_who_wants_them(value, printed, failing, monkeypatch, capsys):
    monkeypatch.setenv(crash.DEBUG, value)
    failing(lambda: ValueError("x"))
    assert cli.run(["train", "hydra.run.dir=here"]) == 1
    assert cli.run(["train", "sead=1"]) == 2
    told = capsys.readouterr().err
    assert ("in do\n" in told) is printed
    assert ("rlft.types.UserError: sead: " in told) is printed


def test_words_that_are_no_text_are_refused(capsys):
    assert cli.run(["train", "data.system_prompt=\udcff"]) == 2
    assert capsys.readouterr().err == "rlft: data.system_prompt: is not UTF-8 text, got '\\udcff'; type it in UTF-8\n"
    assert cli.run(["eval", "\udcff"]) == 2
    assert capsys.readouterr().err == "rlft: command line: is not UTF-8 text, got '\\udcff'; type it in UTF-8\n"


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch, capsys):
    def broken(*args):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("rlft.config.catalog.first_comment", broken)
    monkeypatch.setattr(cli, "discard", lambda stream: None)
    assert cli.run(["recipes"]) == 1
    assert capsys.readouterr().err == ""


def test_the_status_stays_one_line_of_json(failing):
    failing(lambda: ValueError("\ud800\n" * 1000))
    assert cli.run(["train", "hydra.run.dir=here"]) == 1
    reason = json.loads(Path("here/status.json").read_text())["reason"]
    assert reason.startswith("ValueError: ")
    assert len(reason) < 600
