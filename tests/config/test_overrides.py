"""What stands after a command, word by word; wrong words are in test_refusals.py."""

from datetime import datetime
from pathlib import Path

import pytest

from rlft.commands.watch import runs
from rlft.config import compose
from rlft.config.overrides import parse


@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_a_value_in_hydras_quotes_is_the_value(quote):
    asked = parse([f"run={quote}runs/first/a{quote}", f"hydra.run.dir={quote}runs/b{quote}"])
    assert (asked.value("run"), asked.value("hydra.run.dir")) == ("runs/first/a", "runs/b")


def test_a_command_that_only_reads_runs_takes_quotes_after_run_and_leaves_those_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run='b'").mkdir()
    folders, _, _ = runs.read_words("report", ["run='runs/first try'", "'a'", "run='b'"])
    assert folders == ["runs/first try", "'a'", "run='b'"]


def test_runs_of_one_name_that_begin_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Noon(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 22, 12, 0, 0)

    monkeypatch.setattr("datetime.datetime", Noon)
    folders = []
    for _ in range(3):
        folders.append(compose.new_folder("mine"))
        Path(folders[-1]).mkdir(parents=True)
    first = "runs/mine/2026-11-22_12-00-00"
    assert folders == [first, f"{first}_2", f"{first}_3"]
