"""Commands after `rlft sample`: for as many lines as there are, with a question left in both splits."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from in_one_test import each

from rlft.commands.sample import HELD_OUT, after_sampling, held_out_fraction
from rlft.commands.training import print_policy_page, print_train_page
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.data.records import identity, split_of
from rlft.logger import summary
from rlft.types import Split


def commands(tmp_path, rewards):
    """For a file with these rewards of the completions of each question."""
    file = tmp_path / "samples.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"question {i}"}], "reward": reward}
        for i, found in enumerate(rewards)
        for reward in found
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [command for _, command in after_sampling("rlft", file, "embedded:tiny-arithmetic", 100, 48)]


def test_only_what_the_file_suffices_for_is_suggested(tmp_path):
    assert commands(tmp_path, []) == []
    assert commands(tmp_path, [[0.0, 1.0]]) == [], "one question cannot be learned and held out"
    [learn] = commands(tmp_path, [[1.0, 1.0]] * 3)
    assert learn.startswith("rlft sft "), "equal rewards rank nothing"
    assert "prompts.max_tokens=100 max_completion_tokens=48" in learn
    assert [command.split()[1] for command in commands(tmp_path, [[0.0, 1.0]] * 3)] == ["sft", "rm", "dpo"]


@each(("learned", "data", "expected"), [
    ({"path": "embedded:arithmetic-demonstrations"}, None, ["eval", "chat", "train"]),
    ({"path": "chats.jsonl"}, None, ["chat", "export"]),  # nothing is known of a task
    ({"path": "chats.jsonl"}, "scored", ["eval", "chat", "export"]),
])  # fmt: skip
def test_what_follows_a_run_fits_what_it_has_learned(monkeypatch, learned, data, expected):
    said = []
    monkeypatch.setattr(summary, "print_summary", lambda folder, commands: said.extend(commands))
    config = SimpleNamespace(lora=None, name="sft")
    plan = SimpleNamespace(config=config, plain={"demonstrations": learned}, scored_prompts=data)
    print_policy_page(plan, Path("runs/sft/x"))
    assert [command.split()[1] for _, command in said] == expected
    assert any("arithmetic" in command for _, command in said) is learned["path"].startswith("embedded:")


@each("number", [2, 3, 5, 8, 24, 500])
def test_both_splits_have_a_question(number):
    questions = [identity([{"role": "user", "content": f"question {i}"}]) for i in range(number)]
    fraction = held_out_fraction(questions)
    assert {split_of(question, fraction) for question in questions} == {Split.train, Split.held_out}
    assert number < 500 or fraction == HELD_OUT


@each(("words", "last"), [
    ([], "plan"),
    (["group_size=4", "lora=null"], "plan"),
    (["model.path=mine"], "export"),
    (["data=jsonl", "data.path=mine.jsonl", "name=mine"], "export"),
])  # fmt: skip
def test_what_follows_a_training_is_of_that_run(monkeypatch, words, last):
    said = []
    monkeypatch.setattr(summary, "print_summary", lambda folder, commands: said.extend(commands))
    plain = compose(["+recipe=grpo_arithmetic", *words])
    prompts = SimpleNamespace(prompts=[SimpleNamespace(images=())])
    plan = cast("Any", SimpleNamespace(config=build(plain), plain=plain, train_prompts=prompts))
    print_train_page(plan, Path("a"))
    found = [shlex.split(command)[1:] for _, command in said]
    assert [command[0] for command in found] == ["eval", "chat", "resume", "train", last]
    assert "run=a" in found[-1] or last == "plan"
    swept = [word for word in found[3][2:] if not word.startswith(("trainer.lr=", "seed="))]
    assert compose([*swept, f"trainer.lr={plain['trainer']['lr']}"]) == plain
