"""`rollouts` is a key of the run; where a config has the earlier keys of a logger, they mean what they always meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlft import cli
from rlft.config.compose import build, changed, compose
from rlft.config.schema import SftConfig
from rlft.run import run_folder
from rlft.types import UserError

JSONL = "rlft.logger.jsonl.Jsonl"
SMALL = ["prompts_per_step=1", "group_size=2", "generation=transformers", "generation.max_tokens=4", "lora.rank=2",
         "model.device=cpu", "data.size=16", "data.held_out_size=4", "eval.every=0", "scoring.workers=0",
         "token_budget=512"]  # fmt: skip


def earlier(config: dict[str, Any], loggers: dict[str, Any]) -> dict[str, Any]:
    """The config as it was written when a logger had these keys."""
    return {key: value for key, value in config.items() if key != "rollouts"} | {"logger": loggers}


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_the_earlier_keys_of_a_command_line_set_those_of_now(sign: str) -> None:
    words = [f"{sign}logger.jsonl.rollouts_every=5", f"{sign}logger.jsonl.rollouts_max=3"]
    config = compose(words)
    assert config["rollouts"] == {"every": 5, "keep": 3}
    assert config["logger"]["jsonl"] == {"_target_": JSONL}
    assert changed(compose([]), [word.lstrip("+") for word in words], None)["rollouts"] == {"every": 5, "keep": 3}


@pytest.mark.parametrize("key", ["rollouts_every", "jsonl.rollouts_every", "logger.console.rollouts_every"])
def test_no_other_key_is_taken_for_an_earlier_one(key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key}: there is no such key"):
        compose([f"{key}=5"])


def test_a_verb_that_never_wrote_rollouts_still_takes_the_earlier_keys() -> None:
    words = ["demonstrations.path=x", "logger.jsonl.rollouts_every=0"]
    assert build(compose(words, verb="sft"), SftConfig, "sft").logger["jsonl"] == {"_target_": JSONL}


def test_a_users_yaml_with_the_earlier_keys_means_the_same_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "logger").mkdir()
    (tmp_path / "logger" / "files.yaml").write_text(f"files:\n  _target_: {JSONL}\n  rollouts_every: 10\n")
    (tmp_path / "recipe").mkdir()
    recipe = "# @package _global_\nlogger:\n  jsonl:\n    rollouts_max: 7\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(recipe)
    assert compose(["logger=[files]"], tmp_path)["rollouts"] == {"every": 10, "keep": None}
    assert compose(["+recipe=mine"], tmp_path)["rollouts"] == {"every": 1, "keep": 7}
    config = compose(["logger=[files]", "rollouts.every=3"], tmp_path)
    assert config["rollouts"]["every"] == 3, "the command line's word is the last"
    assert config["logger"] == {"files": {"_target_": JSONL}}


def test_a_logger_of_somebody_elses_keeps_a_key_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "logger").mkdir()
    text = "mine:\n  _target_: rlft.logger.console.Console\n  rollouts_every: 10\n"
    (tmp_path / "logger" / "mine.yaml").write_text(text)
    config = compose(["logger=[mine]"], tmp_path)
    assert config["logger"]["mine"]["rollouts_every"] == 10
    assert config["rollouts"]["every"] == 1


@pytest.mark.parametrize(
    ("loggers", "rollouts"),
    [
        ({"jsonl": {"_target_": JSONL, "rollouts_every": 4, "rollouts_max": 2}}, {"every": 4, "keep": 2}),
        ({"files": {"_target_": JSONL, "rollouts_every": 0, "rollouts_max": None}}, {"every": 0, "keep": None}),
        ({"console": {"_target_": "rlft.logger.console.Console"}}, {"every": 0, "keep": None}),
        ({}, {"every": 0, "keep": None}),
    ],
)
def test_an_earlier_run_goes_on_as_it_began(loggers: dict[str, Any], rollouts: dict[str, Any], tmp_path: Path) -> None:
    now = compose([])
    run_folder.start(tmp_path, earlier(now, loggers), {})
    saved = run_folder.read(tmp_path)
    assert saved["rollouts"] == rollouts
    assert all(section.keys().isdisjoint(("rollouts_every", "rollouts_max")) for section in saved["logger"].values())
    run_folder.check_same_config(tmp_path, now)


def test_an_earlier_run_of_another_verb_goes_on(tmp_path: Path) -> None:
    now = compose(["demonstrations.path=x"], verb="sft")
    loggers = {"jsonl": {"_target_": JSONL, "rollouts_every": 1, "rollouts_max": None}}
    run_folder.start(tmp_path, earlier(now, loggers), {})
    saved = run_folder.read(tmp_path)
    assert "rollouts" not in saved
    assert saved["logger"] == {"jsonl": {"_target_": JSONL}}


def test_a_renamed_logger_writes_what_jsonl_does_and_an_earlier_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logger").mkdir()
    (tmp_path / "logger" / "files.yaml").write_text(f"files:\n  _target_: {JSONL}\n")
    words = [*SMALL, "steps=1", "logger=[files]", "token_values.every=1", "hydra.run.dir=run"]
    assert cli.run(["train", "--config-dir", str(tmp_path), *words]) == 0
    first = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert "tokens" in json.loads(first[0]), "tokens are looked at where rollouts are written"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert cli.run(["watch", "run"]) == 0

    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    loggers = {"files": {"_target_": JSONL, "rollouts_every": 2, "rollouts_max": None}}
    file.write_text(yaml.safe_dump(earlier(config, loggers), sort_keys=False))
    assert cli.run(["resume", "run", "steps=4"]) == 0
    names = sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir())
    assert names == ["step_000001.jsonl", "step_000002.jsonl", "step_000004.jsonl"]
    assert run_folder.read(tmp_path / "run")["rollouts"] == {"every": 2, "keep": None}
