"""`rlft reward try`: the command line, its table and JSON, and what it refuses; and the two lines of `rlft plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands import reward

WORDS = ("reward", "try", "+recipe=grpo_arithmetic", "rows=2")
MINE = """\
mine:
  _target_: faulty_rewards.current
  weight: 0.5
"""
MODULE = '''\
def current(group):
    """Half a point for the echo; empty texts are forgotten."""
    asked = group.prompt.messages[-1]["content"]
    texts = [rollout.completion.text for rollout in group.rollouts]
    return [0.5 * (text.split()[0] in asked and asked in text) for text in texts]
'''


def test_the_rewards_of_the_demo_have_no_fault_and_the_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*WORDS]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for words in (
        "right, in a tag",
        "two answers (7)",
        "cheapest text ok",
        "being right is worth 1, the form 0.2",
        "p99",
    ):
        assert words in told
    assert " 0 wrong" not in told
    assert told.endswith(" limit")


def test_a_faulty_reward_is_named_in_json_and_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(MINE.replace("faulty_rewards", "echo_reward"))
    (tmp_path / "echo_reward.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "--config-dir", str(tmp_path), "reward=[exact_match,mine,learned]", "--json"]
    words += ["reward_model.refresh_every=10", "reward_model.labels=exact_match"]
    assert cli.run(words) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert not found["sound"]
    assert rows["learned"]["status"] == "skipped"
    assert rows["mine: failures"]["status"] == "wrong"
    assert "nothing said: empty" in rows["mine: failures"]["value"]
    assert "IndexError" in rows["mine: failures"]["value"]
    assert rows["mine: prompt echoed"]["value"].startswith("accepted: alone (0.5)")
    assert rows["exact_match: refused"]["status"] == "ok"
    empty = next(text for text in found["texts"] if text["kind"] == "empty")
    assert (empty["scores"], empty["total"]) == ({"exact_match": 0.0, "mine": None}, None)


@each(
    ("words", "message"),
    [
        (["reward"], "reward: has no such task; write rlft reward try"),
        (["reward", "tries"], "reward: has no such task, got tries; write rlft reward try"),
        ([*WORDS[:3], "rows=0"], "rows: must be a number of rows of the data, at least 1, got 0; try rows=4"),
        ([*WORDS[:3], "rows=all"], "rows: must be a number of rows of the data, at least 1, got all; try rows=4"),
        ([*WORDS[:2], "+recipe=sft_arithmetic"], "+recipe: is for rlft sft, and a run of rlft train is tried"),
        (
            [*WORDS, "reward=[learned]", "reward.learned.path=mine"],
            "reward: has none that can be tried without weights, got ['learned']; ",
        ),
        ([*WORDS, "environment=calculator"], "environment: holds conversations, and single completions are tried here"),
        ([*WORDS, "reward.exact_match.numerc=true"], "reward.exact_match.numerc: "),
        ([*WORDS, "reward=[exact_match]", "reward.exact_match.weight=high"], "reward.exact_match.weight: "),
    ],
)
def test_a_wrong_word_is_refused_in_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reward, "attack", lambda *args: pytest.fail("something was tried"))
    assert cli.run(words) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"rlft: {message}")
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_a_plan_says_in_two_lines_what_the_rewards_pay_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "+recipe=grpo_arithmetic", "--json"]) == 0
    accepted, cheapest = json.loads(capsys.readouterr().out)["attack"]
    assert accepted.endswith("wrong texts accepted: none")
    assert "<think>-</think><answer>41</answer>" in cheapest
