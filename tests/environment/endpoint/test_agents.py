"""Agents in workers and programs of their own: what they are given, what they give, and what is told of failures."""

import sys

import pytest

from rlft.loop.metrics import turn_metrics
from rlft.types import EnvironmentFailure, FinishReason
from tests.environment.endpoint.test_played import SAMPLING, completions, prompt, rewards

FAILURES = {
    "raise": ("raised", "Error: ValueError: a \x00 ? problem <|im_end|>"),
    "exit": ("raised", "Error: SystemExit: 3"),
    "die": ("died", "Error: the tool's process ended with exit code 7"),
    "hang": ("time", "Error: no answer within 3 s"),
    "text": ("raised", "Error: ValueError: could not convert string to float: 'much'"),
    "fork": ("", ""),
    "mute": ("", ""),
}


def test_agents_that_fail_are_told_of_and_counted_and_cost_no_sibling_its_reward(play):
    played = play(["word"], agent="endpoint_agents.misbehaves", call_timeout=3.0)
    groups = played.sample([prompt(how, how=how) for how in FAILURES], 1, [0] * len(FAILURES), SAMPLING)
    for how, completion in zip(FAILURES, completions(groups), strict=True):
        cause, text = FAILURES[how]
        if how == "mute":  # the policy was asked nothing: a row without a sampled token
            assert (completion.turns, completion.num_sampled, len(completion.token_ids)) == ((), 0, 1)
            continue
        [turn] = completion.turns
        failed = [("agent", cause, text)] if cause else []
        assert [(call.name, call.cause, call.answer) for call in turn.calls] == failed
        assert turn.reward == (None if cause else 0.5)
        assert completion.finish_reason is (FinishReason.time if how == "hang" else FinishReason.stop)
    metrics = turn_metrics(completions(groups))
    assert metrics["calls/raised_fraction"] == 3 / 5
    assert metrics["calls/died_fraction"] == metrics["calls/time_fraction"] == 1 / 5
    again = played.sample([prompt("again", how="")], 1, [0], SAMPLING)  # workers were replaced
    assert rewards(again) == [[0.5]]


def test_agents_none_of_which_asks_anything_end_the_run(play):
    played = play(["word"], command=["sh", "-c", "echo lost >&2; exit 3"])
    with pytest.raises(EnvironmentFailure, match=r"none of 2 agents has asked .*sh ended with exit code 3: lost\); "):
        played.sample([prompt()], 2, [0], SAMPLING)


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": row["prompt"]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]["content"]
print("noise")
if row["id"] == "fails":
    sys.exit("no luck")
print({"number": 0.25, "object": '{"reward": 0.75}', "nothing": "null", "words": "well done"}[row["id"]])
"""


def test_a_program_of_its_own_plays_by_its_environment_and_standard_input(play, tmp_path):
    program = tmp_path / "play.py"
    program.write_text(PROGRAM)
    played = play(["word"], command=[sys.executable, str(program)])
    names = ["number", "object", "nothing", "words", "fails"]
    groups = played.sample([prompt(name) for name in names], 1, [0] * 5, SAMPLING)
    assert rewards(groups) == [[0.25], [0.75], [None], [None], [None]]
    told = [[call.answer for call in completion.turns[0].calls] for completion in completions(groups)]
    assert told[:3] == [[], [], []]
    assert told[3] == ["Error: ValueError: the last line of its output is 'well done', and no reward as JSON"]
    assert told[4] == [f"Error: RuntimeError: {sys.executable} ended with exit code 1: no luck"]
