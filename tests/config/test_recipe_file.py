"""A YAML file of the user's own, given by its path, is a recipe wherever it lies."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlft import cli
from rlft.config.compose import compose
from rlft.config.keys import is_path_key
from rlft.config.overrides import parse

TEXT = """\
data: jsonl
reward: [exact_match, format]
data.path: rows.jsonl
trainer.lr: 1e-3
trainer: {warmup: 3}
lora: {rank: 4, path: ./adapter}
model.path: models/mine
pretrain.path: embedded:arithmetic-text
snapshot.teacher: Qwen/Qwen3-8B
critic.init: runs/of_here
prompts:
  max_tokens: 64
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def written(file, text=TEXT):
    (file.parent / "models" / "mine").mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"prompt": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(40)]
    (file.parent / "rows.jsonl").write_text("\n".join(rows))
    file.write_text(text)
    return file


def composed(*words, command="train"):
    parsed = parse(words, command)
    return compose(parsed.overrides, parsed.config_dir, command)


@pytest.mark.parametrize(("typed", "name"), [
    ("run.yaml", "work"), ("./run.yaml", "work"), ("qa/run.yaml", "qa"), ("qa/fast.yml", "fast"), ("../x.yaml", "x"),
    ("{}/qa/run.yaml", "qa"), ("~/qa/run.yaml", "qa"), ("my qa/a=b, c.yaml", "a=b, c"), ("it's/$x[1]~.yaml", "$x[1]~"),
    ("steps=3/run.yaml", "steps=3"), ("qa/\"{'ü'}%2F.yaml", "\"{'ü'}%2F"),
])  # fmt: skip
def test_a_file_is_a_recipe_wherever_it_lies_and_its_paths_are_relative_to_it(typed, name, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    typed = typed.replace("{}", str(tmp_path)) if typed.startswith("{}") else typed
    file = Path(typed).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    written(file)
    Path("runs/of_here").mkdir(parents=True)
    plain = composed(typed, "steps=2", "eval.every=0")
    for section, own in (("data", "rows.jsonl"), ("model", "models/mine"), ("lora", "adapter")):
        assert plain[section]["path"] == os.path.normpath(file.parent / own)
    assert plain["pretrain"]["path"] == "embedded:arithmetic-text"
    assert (plain["snapshot"]["teacher"], plain["critic"]["init"]) == ("Qwen/Qwen3-8B", "runs/of_here")
    assert (plain["name"], plain["steps"], plain["prompts"]["max_tokens"]) == (name, 2, 64)
    assert (plain["trainer"]["lr"], plain["trainer"]["warmup"], plain["lora"]["rank"]) == (1e-3, 3, 4)
    assert list(plain["reward"]) == ["exact_match", "format"]


def test_a_typed_path_stays_relative_to_the_working_directory(workplace):
    (workplace / "qa").mkdir()
    written(workplace / "qa" / "run.yaml")
    assert composed("qa/run.yaml", "data.path=rows.jsonl", "name=x")["data"]["path"] == "rows.jsonl"


def test_a_file_may_build_on_files_next_to_it_and_on_rlfts_recipes(workplace):
    (workplace / "qa").mkdir()
    written(workplace / "qa" / "common.yaml", "data: jsonl\ndata.path: rows.jsonl\nname: common\n")
    text = "# @package _global_\ndefaults:\n  - {}\n  - override /algorithm: dapo\nsteps: 3\n"
    on_common = composed(str(written(Path("qa/run.yaml"), text.format("common"))))
    assert (on_common["data"]["path"], on_common["name"], on_common["steps"]) == ("qa/rows.jsonl", "qa", 3)
    on_rlfts = composed(str(written(workplace / "qa" / "run.yaml", text.format("grpo_arithmetic"))))
    assert (on_rlfts["group_size"], on_rlfts["name"], on_rlfts["trainer"]["lr"]) == (8, "qa", 1e-3)


def test_every_key_that_may_hold_a_path_is_relative_to_its_file(workplace):
    (workplace / "qa" / "there").mkdir(parents=True)
    keys = ["data.held_out_path", "curriculum.path", "critic.init", "snapshot.reference", "reward.learned.path"]
    assert all(map(is_path_key, keys))
    text = "data: jsonl\ndata.path: there\nreward: [learned]\n" + "".join(f"{key}: there\n" for key in keys)
    plain = composed(str(written(Path("qa/run.yaml"), text)))
    for key in keys:
        value: Any = plain
        for part in key.split("."):
            value = value[part]
        assert value == "qa/there", key


REFUSED = {
    "empty.yaml": ("# nothing\n", "empty.yaml: is empty; write it as lines"),
    "list.yaml": ("- a\n", "list.yaml: must hold a section of keys"),
    "bad.yaml": ("steps: 1\nseed: [1\n", "bad.yaml: line 3 is not YAML"),
    "twice.yaml": ("seed: 1\nseed: 2\n", "line 2 is not YAML (found duplicate key seed)"),
    "latin.yaml": (b"seed: \xff\n", "latin.yaml: cannot be read as UTF-8 text"),
    "in.yaml": ("seed: 1\ntrainer:\n  learning: 3\n", "trainer.learning: there is no such key", "(in.yaml, line 3)"),
    "dotted.yaml": ("\ntrainer.lrr: 3\n", "trainer.lrr: there is no such key", "(dotted.yaml, line 2)"),
    "top.yaml": ("steps: 1\nstepz: 2\n", "stepz: there is no such key, got 2; did you", "(top.yaml, line 2)"),
    "range.yaml": ("\n\nsteps: -5\n", "steps: must be greater than 0, got -5", "(range.yaml, line 3)"),
    "choice.yaml": ("data: jsnl\n", "data: is not one of its choices, got jsnl; did you mean jsonl?", "line 1)"),
    "sft.yaml": ("command: sft\n", "+recipe: is for rlft sft, got sft.yaml; write rlft sft sft.yaml"),
    "both.yaml": ("trainer.lr: 1\ntrainer.lr.x: 2", "trainer.lr: must be a number, got {'x': 2}", "(both.yaml, line 1"),
    "defaults.yaml": ("defaults: x\n", "defaults.yaml: its defaults must be a list, got x"),
    "folder.yaml": (None, "folder.yaml: is a folder; name a YAML file"),
    "qa": (None, "got qa; did you mean qa/run.yaml?"),
    "qa/run": (None, "got qa/run; did you mean qa/run.yaml?"),
    "qa/rum.yaml": (None, "qa/rum.yaml: there is no such file; did you mean qa/run.yaml?"),
    "grpo_arithmetic.yaml": (None, "there is no such file; did you mean +recipe=grpo_arithmetic?"),
    "no/where.yaml": (None, "no/where.yaml: there is no such file; name a YAML file"),
    "+recipe=qa/run": (None, "got +recipe=qa/run; write qa/run.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("typed", REFUSED)
def test_a_wrong_file_is_refused_with_its_line(typed, workplace, capsys):
    (workplace / "qa").mkdir()
    (workplace / "folder.yaml").mkdir()
    written(workplace / "qa" / "run.yaml")
    text, *expected = REFUSED[typed]
    if text is not None:
        (workplace / typed).write_bytes(text if isinstance(text, bytes) else text.encode())
    for words in (["train", typed], ["train", "-m", typed, "seed=0,1"]):
        assert cli.run(words) == 2
        shown = capsys.readouterr().err
        without_job = re.sub(r" \(job 0: [^)]*\)", "", shown)
        assert all(part in without_job for part in expected), (words, shown)


def test_a_typed_key_hides_the_files_line(workplace, capsys):
    written(workplace / "run.yaml", "steps: -5\n")
    assert cli.run(["train", "run.yaml", "steps=-6"]) == 2
    assert "line" not in capsys.readouterr().err


def test_a_file_named_like_a_recipe_is_told_from_it(workplace, caplog):
    written(workplace / "grpo_arithmetic.yaml", "steps: 3\n")
    assert composed("+recipe=grpo_arithmetic")["steps"] == 40
    assert "to use the file of that name write grpo_arithmetic.yaml" in caplog.text
    assert composed("grpo_arithmetic.yaml")["steps"] == 3


@pytest.mark.parametrize("command", ["train", "plan", "plan train", "reward try", "eval", "sample", "doctor"])
def test_every_command_that_takes_a_recipe_takes_a_file(command, workplace, capsys):
    (workplace / "qa").mkdir()
    written(workplace / "qa" / "run.yaml", "scoring.timeout: -1\n")
    assert cli.run([*command.split(), "qa/run.yaml"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("rlft: scoring.timeout: must be")
    assert "(qa/run.yaml, line 1)" in shown


OWN_WORDS = {
    "sft": ["demonstrations.path=embedded:arithmetic-demonstrations"], "sample": [],
    "rm": ["preferences.path=embedded:arithmetic-preferences"],
    "dpo": ["preferences.path=embedded:arithmetic-preferences"],
}  # fmt: skip


@pytest.mark.parametrize("form", ["sections", "dotted"])
@pytest.mark.parametrize("command", OWN_WORDS)
def test_keys_of_other_commands_are_left_out_of_a_file_and_said(command, form, workplace, caplog, capsys):
    """One file serves train and this command: it has each key of train, with another value where it is a number."""
    keys = {key: value for key, value in flat(composed("+recipe=ppo_arithmetic")) if key != "command"}
    keys |= {key: value + 1 for key, value in keys.items() if type(value) is int}
    chosen = {"algorithm": "ppo", "defaults": [{"override /data": "arithmetic"}, {"override /algorithm": "ppo"}]}
    nested: dict[str, Any] = dict(chosen) if form == "dotted" else {"defaults": chosen["defaults"]}
    for key, value in keys.items():
        *sections, name = key.split(".") if form == "sections" else [key]
        section = nested
        for one in sections:
            section = section.setdefault(one, {})
        section[name] = value
    written(workplace / "run.yaml", yaml.safe_dump(nested))
    found = dict(flat(composed("run.yaml", *OWN_WORDS[command], command=command)))
    without_file = {key for key, _ in flat(composed(*OWN_WORDS[command], command=command))}
    shared = [key for key in keys if key in without_file and not key.startswith(("hydra", "resume"))]
    assert len(shared) > 20
    assert {key: found[key] for key in shared if key != "name"} == {key: keys[key] for key in shared if key != "name"}
    noted = caplog.text.partition("does not read: ")[2].split("\n")[0].split(", ")
    assert {"group_size", "algorithm" if form == "sections" else "algorithm.gamma"} <= {*noted}
    assert not {*noted} & {*shared}
    caplog.clear()
    (workplace / f"{form}.yaml").write_text("defaults:\n- override /algorithm: ppo\n")
    composed(f"{form}.yaml", *OWN_WORDS[command], command=command)
    assert f"{form}.yaml has keys that rlft {command} does not read: algorithm" in caplog.text
    (workplace / "run.yaml").write_text("group_size: 2\ngroup_sise: 2\nlorra.rank: 3\n")
    assert cli.run([command, "run.yaml", *OWN_WORDS[command]]) == 2
    refused = capsys.readouterr().err
    assert "group_sise: there is no such key" in refused
    assert "lorra" in refused


def test_keys_that_are_left_out_of_a_file_that_another_builds_on_are_said_once(workplace, caplog):
    written(workplace / "below.yaml", "group_size: 2\ndata.path: rows.jsonl\n")
    written(workplace / "above.yaml", "defaults: [below]\nalgorithm.gamma: 1\n")
    for _ in range(2):  # jobs of a sweep
        composed("above.yaml", *OWN_WORDS["sft"], command="sft")
    said = "{}.yaml has keys that rlft sft does not read: {}"
    assert sorted(caplog.messages) == [said.format("above", "algorithm.gamma"), said.format("below", "group_size")]


def flat(config, section=""):
    """(key, value) of all that is no section."""
    if not isinstance(config, dict) or not config:
        return [(section, config)]
    return [pair for key, value in config.items() for pair in flat(value, f"{section}.{key}".removeprefix("."))]


def test_a_sweep_over_files_has_a_job_for_each(workplace, capsys):
    for name in ("a", "b"):
        written(workplace / f"{name}.yaml", f"steps: 1\nprompts_per_step: 1\ngroup_size: 2\nseed: {ord(name)}\n")
    common = ["generation=scripted", "generation.scripted.answers={*: [yes]}", "generation.max_tokens=2", "lora.rank=2"]
    common += ["data.size=8", "data.held_out_size=4", "eval.every=0", "hydra.sweep.dir=s", "scoring.workers=0"]
    assert cli.run(["train", "-m", "+recipe=a.yaml,b.yaml", *common]) == 0, capsys.readouterr().err
    configs = [yaml.safe_load((workplace / "s" / str(job) / "config.yaml").read_text()) for job in range(2)]
    assert [(config["name"], config["seed"]) for config in configs] == [("a", 97), ("b", 98)]


@pytest.mark.parametrize(("words", "source"), [
    (["data.path=rows.csv"], "jsonl"), (["+recipe=grpo_arithmetic", "data.path=rows.csv"], "jsonl"),
    (["qa/run.yaml"], "jsonl"), (["data.path=qa"], "jsonl"), (["data=hub", "data.path=rows.csv"], "hub"),
    (["+recipe=grpo_gsm8k", "data.path=qa"], "hub"), ([], "arithmetic"),
])  # fmt: skip
def test_a_path_to_a_file_of_data_needs_no_source(words, source, workplace):
    (workplace / "qa").mkdir()
    (workplace / "rows.csv").write_text("question,response\n1 + 1?,2\n")
    written(Path("qa/run.yaml"), "data.path: ../rows.csv\n")
    assert composed(*words)["data"]["_target_"].startswith(f"rlft.data.{source}.")


def test_a_path_to_a_file_of_data_chooses_the_source_where_a_command_has_none_otherwise(workplace):
    for text, words in (
        ("data.path: rows.jsonl\n", ()),
        ("data: null\n", ("data.path=rows.jsonl",)),
        ("data: null\n", ("data=jsonl", "data.path=rows.jsonl")),
    ):
        written(workplace / "run.yaml", text)
        data = composed("run.yaml", *words, *OWN_WORDS["sft"], command="sft")["data"]
        assert data["_target_"].startswith("rlft.data.jsonl.")
    assert not composed(*OWN_WORDS["sft"], command="sft").get("data")


def test_a_path_that_is_no_files_or_contradicts_the_choice_is_refused(workplace, capsys):
    for words in (["data.path=openai/gsm8k"], ["data=arithmetic", "data.path=rows.csv"]):
        assert cli.run(["train", *words]) == 2
        assert "it belongs to data=gsm8k and data=hub and data=jsonl" in capsys.readouterr().err
    assert cli.run(["train", "data.path=none.csv"]) == 2
    assert "data.path: there is no such file, got none.csv" in capsys.readouterr().err
    assert cli.run(["train", "data.path=none.csv", "--cfg", "job"]) == 0
    assert "path: none.csv" in capsys.readouterr().out
