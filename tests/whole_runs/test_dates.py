"""A template that writes today's date: a run keeps the date on which it started, whenever it goes on."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import checkpoints, files_of, metrics, rollouts, tiny

import rlft
from rlft import cli
from rlft.commands import eval as evaluation, resume
from rlft.commands.sweep import checks as sweep
from rlft.config import compose as configs
from rlft.config.resolved import resolve
from rlft.runs import run_folder
from rlft.tokens import text

pytestmark = pytest.mark.slow

Today = Callable[[str], None]


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Today:
    def is_now(day: str) -> None:
        now = datetime.datetime.fromisoformat(day)
        monkeypatch.setattr(text, "_now", lambda: now)

    return is_now


@pytest.fixture(scope="module")
def dated_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a template that begins with the day's number, as plain text."""
    folder = tmp_path_factory.mktemp("models") / "dated"
    shutil.copytree(Path(rlft.__file__).parent / "assets" / "tiny-arithmetic", folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    return folder


def test_a_run_that_goes_on_another_day_is_the_uninterrupted_one_bit_for_bit(
    today: Today, dated_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = (f"model.path={dated_model}", "checkpoint.every=1", "checkpoint.keep=9")
    words = [word for word in tiny("eval.every=0", *model) if not word.startswith("steps=")]
    today("2026-11-25T23:59")
    cli.run([*words, "steps=2", "hydra.run.dir=whole"])
    cli.run([*words, "steps=1", "hydra.run.dir=halved"])
    assert run_folder.read(Path("halved"))["model"]["date"] == "2026-11-25"
    today("2026-11-26T00:01")
    resume.command(["halved", "steps=2"])
    for read in (metrics, rollouts):
        assert read(Path("halved")) == read(Path("whole"))
    whole, halved = (files_of(checkpoints(Path(run))[-1]) for run in ("whole", "halved"))
    assert whole == halved
    resume.command(["halved/checkpoints/step_000001", "hydra.run.dir=forked"])
    assert run_folder.read(Path("forked"))["model"]["date"] == "2026-11-25"
    assert rollouts(Path("forked")) == rollouts(Path("whole"))
    evaluation.command(["run=halved", "eval.num_prompts=2"])
    # A new run has the new day, and other prompts.
    cli.run([*words, "steps=1", "hydra.run.dir=new"])
    prints = [run_folder.read(Path(run))["origin"]["data_fingerprint"] for run in ("whole", "halved", "new")]
    assert prints[0] == prints[1] != prints[2]
    assert json.loads(json.dumps(run_folder.read(Path("new"))["model"]))["date"] == "2026-11-26"


def test_jobs_of_a_sweep_have_the_date_on_which_it_was_begun(today: Today, tmp_path: Path) -> None:
    today("2026-11-25T12:00")
    config = resolve(configs.compose([]))
    plain = config.plain
    word = sweep.date_word([plain, plain], None)
    assert word == "model.date=2026-11-25"
    (tmp_path / "0").mkdir()
    run_folder.write_config(tmp_path / "0", sweep.dated(config, word).plain, {})
    today("2026-11-26T12:00")
    assert sweep.date_word([plain], tmp_path) == word, "a job that is begun the next day"
    assert sweep.date_word([plain], tmp_path / "another") == "model.date=2026-11-26"
    assert sweep.date_word([sweep.dated(config, "model.date=2001-02-03").plain], None) is None, "the config names one"
