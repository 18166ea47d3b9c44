"""Rewards that no YAML declares: functions and classes in a file, or importable by their dotted names."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from rlft import cli
from rlft.config.compose import compose
from rlft.config.overrides import parse
from rlft.reward.workers.reward_spec import specs
from rlft.types import Group

REWARDS = """\
from next_to_it import one

WORDS = 3

def close(group, tolerance=0.5):
    return [one() * tolerance for _ in group.rollouts]

def short(completions, answer, limit=20, **kwargs):
    return [float(len(completion[0]["content"]) < limit) for completion in completions]

class Mentions:
    def __init__(self, word):
        self.word = word
    def __call__(self, group):
        return [float(self.word in rollout.completion.text) for rollout in group.rollouts]

def format(group):
    return [0.0 for _ in group.rollouts]
"""
SMALL = ["steps=1", "prompts_per_step=2", "group_size=2", "generation.max_tokens=8", "eval.every=0", "lora.rank=2",
         "rollouts.every=1"]  # fmt: skip


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = f"own_{tmp_path.name}"
    for folder in (".", "my qa", package):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "reward.py").write_text(REWARDS)
        Path(folder, "next_to_it.py").write_text("def one():\n    return 1.0\n")
    Path("broken.py").write_text("x = 1\nimport not_there_at_all\n")
    Path("unfinished.py").write_text("x = 1\ndef f(:\n")
    return tmp_path


def composed(*words):
    parsed = parse(words)
    return compose(parsed.overrides, parsed.config_dir)["reward"]


def test_rewards_of_files_and_packages_need_no_yaml(workplace):
    package = f"own_{workplace.name}.reward"
    chosen = f"reward=[reward.py:close,{package}.Mentions,'my qa/reward.py:short',exact_match]"
    words = [chosen, "reward.close.weight=0.5"]
    rewards = composed(*words, "reward.close.tolerance=0.25", "reward.Mentions.word=x", "reward.short.limit=3")
    found = {name: (spec.weight, dict(spec.kwargs)) for name, spec in specs(rewards).items()}
    assert {name: found[name] for name in ("close", "Mentions", "short")} == {
        "close": (0.5, {"tolerance": 0.25}), "Mentions": (1.0, {"word": "x"}), "short": (1.0, {"limit": 3}),
    }  # fmt: skip
    assert list(rewards) == ["close", "Mentions", "short", "exact_match"]  # the first is the main one


@pytest.mark.parametrize("text", [
    "reward: [reward.py:close, exact_match]\nreward.close.tolerance: 0.25\n",
    "defaults: [{override /reward: [reward.py:close, exact_match]}]\nreward: {close: {tolerance: 0.25}}\n",
    "reward: []\nreward.close: {_target_: reward.py:close, weight: 1.0, tolerance: 0.25}\n",
])  # fmt: skip
def test_a_path_in_a_yaml_is_relative_to_it(text, workplace):
    Path("my qa/run.yaml").write_text(text)
    Path("reward.py").unlink()
    rewards = composed("my qa/run.yaml")
    assert rewards["close"] == {"_target_": "my qa/reward.py:close", "weight": 1.0, "tolerance": 0.25}
    assert specs(rewards)["close"].build()(Group(prompt=None, rollouts=(None,))) == [0.25]


@pytest.mark.parametrize(("words", "refusal"), [
    ("[reward.py:closee]", "there is no closee in reward.py), got reward.py:closee; did you mean close? All: "),
    ("[reward.py:WORDS]", "is not callable, got reward.py:WORDS"),
    ("[reward.py]", "names no function in that file, got reward.py; write reward.py:<function>"),
    ("[nothing.py:f]", "there is no such file, got nothing.py:f"),
    ("[broken.py:f]", "cannot be imported (line 2, ModuleNotFoundError: No module named 'not_there_at_all')"),
    ("[unfinished.py:f]", "invalid syntax (unfinished.py, line 2)"),
    ("[reward.py:format,format]", "reward: has two rewards of the name format, got reward.py:format"),
    ("'[reward.py:close,\"my qa/reward.py:close\"]'", "has two rewards of the name close"),
    ("[not_there.rewards.f]", "cannot be imported (ModuleNotFoundError: No module named 'not_there')"),
    ("[close]", "is not one of its choices, got close; "),
    ("[close]", "for one of your own write file.py:function"),
    ("[reward.py:close] reward.close.tolerence=1", "reward.close.tolerence: there is no such key, got 1; did"),
    ("[reward.py:Mentions]", "reward.Mentions.word: is missing"),
])  # fmt: skip
def test_a_wrong_reward_is_refused(words, refusal, workplace, capsys):
    assert cli.run(["train", *shlex.split(f"reward={words}")]) == 2
    assert refusal in capsys.readouterr().err


def test_a_keyword_is_shown_by_cfg(workplace, capsys):
    assert cli.run(["train", "reward=[reward.py:close]", "reward.close.tolerance=0.25", "--cfg", "job"]) == 0
    assert "tolerance: 0.25" in capsys.readouterr().out


def test_a_run_keeps_a_copy_and_resume_eval_and_audit_name_what_changed(workplace, capsys, monkeypatch):
    words = ["reward=['my qa/reward.py:close',exact_match]", "scoring.workers=1", "hydra.run.dir=run"]
    assert cli.run(["train", *words, *SMALL]) == 0, capsys.readouterr().err
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])["reward/close"] == 0.5
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    [(key, digest)] = config["origin"]["code"].items()
    copied = Path("run/code") / digest[:12] / "reward.py"
    assert (key, copied.read_text()) == ("reward.close._target_", REWARDS)
    capsys.readouterr()
    assert cli.run(["audit", "run", "replay=0"]) == 0
    assert "my qa/reward.py" not in capsys.readouterr().out
    Path("my qa/reward.py").write_text(REWARDS.replace("* tolerance", "* tolerance * 0.5"))
    assert cli.run(["audit", "run", "recompute=0", "replay=0"]) == 0
    assert "is used as it is now" in " ".join(capsys.readouterr().out.split())
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")  # from which the run finds its rewards as well
    assert cli.run(["resume", "../run", "steps=2"]) == 0
    monkeypatch.chdir(workplace)
    shown = capsys.readouterr().err
    assert f"is used as it is now: {workplace}/my qa/reward.py (as it was: ../{copied})" in " ".join(shown.split())
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["reward/close"] for line in metrics] == [0.5, 0.25]
    shutil.rmtree("my qa")
    assert cli.run(["resume", "run", "steps=3"]) == 2
    assert f"there is no such file, got {workplace}/my qa/reward.py:close" in capsys.readouterr().err


def test_a_sweep_over_lists_of_rewards_has_a_job_for_each(workplace, capsys):
    words = ["reward=[reward.py:close],[exact_match,reward.py:short]", "hydra.sweep.dir=s", *SMALL]
    assert cli.run(["train", "-m", *words]) == 0, capsys.readouterr().err
    rewards = [list(yaml.safe_load(Path(f"s/{job}/config.yaml").read_text())["reward"]) for job in range(2)]
    assert rewards == [["close"], ["exact_match", "short"]]
    assert "reward=[reward.py:close]" in capsys.readouterr().out
