"""`rlft reward try`: the command line, its table and JSON, and what it refuses; and the two lines of `rlft plan`."""

import json
import re
import sys
from functools import partial

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands import reward
from rlft.config import catalog
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.model import network_files
from rlft.plan.rewards import references, tester
from rlft.plan.rewards.verdicts import verdicts_on
from rlft.system.terminal import Status

NOT_TRIED = {
    *("grpo_gsm8k", "gspo_gsm8k", "ppo_gsm8k"),  # need the hub
    *("grpo_smollm2_gsm8k", "grpo_smollm2_sums", "grpo_smollm2_svamp"),  # need a folder that a script makes
    *("grpo_calculator", "ppo_calculator", "grpo_whom_to_ask"),  # hold conversations
    *("opd_arithmetic", "r1_final_arithmetic", "rlhf_ppo_arithmetic"),  # need what another run has trained
}
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


def test_the_rewards_of_the_demo_have_no_fault_and_the_table_says_so(ran):
    verdict, accepted, cheapest, _, *faults, _, last = ran([*WORDS]).out.splitlines()
    assert re.fullmatch(r"\d+ ok, 1 limit", verdict)
    assert accepted.startswith("gold answers accepted in 5 of 18 forms")
    assert cheapest.startswith("cheapest text: 8 tokens")
    assert faults[0].startswith("exact_match: gold answers  limit  accepted in 5 of 18 forms; not: ")
    assert re.search(r"; such as +'<answer>\d+\.</answer>' +-> say in the prompt", " ".join(faults))
    assert last == f"all rows: rlft {' '.join(WORDS)} --all"
    told = " ".join(ran([*WORDS, "--all"]).out.split())
    for words in ("cheapest text ok", "being right is worth 1, the form 0.2", "p99"):
        assert words in told
    assert " 0 wrong" not in told
    assert told.startswith(f"{verdict} {accepted} {cheapest} ")


def test_a_faulty_reward_is_named_in_json_and_in_the_exit_code(here, ran):
    (here / "reward").mkdir()
    (here / "reward" / "mine.yaml").write_text(MINE.replace("faulty_rewards", "echo_reward"))
    (here / "echo_reward.py").write_text(MODULE)
    words = [*WORDS, "--config-dir", str(here), "reward=[exact_match,mine,learned]", "--json"]
    words += ["reward_model.refresh_every=10", "reward_model.labels=exact_match"]
    found = json.loads(ran(words, ends=1).out)
    rows = {row["name"]: row for row in found["rows"]}
    assert not found["sound"]
    assert rows["learned"]["status"] == rows["weights"]["status"] == "skipped"
    assert rows["mine: failures"]["status"] == "wrong"
    assert "nothing said: empty" in rows["mine: failures"]["value"]
    assert "IndexError" in rows["mine: failures"]["value"]
    assert rows["mine: prompt echoed"]["value"].startswith("rewarded as much as an answer, or more: alone (0.5)")
    empty = next(text for text in found["texts"] if text["kind"] == "empty")
    assert (empty["scores"], empty["total"]) == ({"exact_match": 0.0, "mine": None}, None)


PRINTING = """\
import os

print("imported")


class Loud:
    def __init__(self):
        print("built")

    def __call__(self, group):
        print("called")
        os.write(1, b"called")
        return [float(rollout.completion.text == group.prompt.answer) for rollout in group.rollouts]
"""


def test_more_rows_than_the_data_have_are_all_of_them_and_servers_are_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(references, "check_servers", lambda rewards, prompt: asked.append(prompt.id))
    words = ["+recipe=grpo_arithmetic", "data.size=5", "data.held_out_size=2", "reward=exact_match"]
    resolved = resolve(compose(words))
    prompts, _ = reward.try_rewards(resolved, reward.specs_of(resolved.config), 7)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 5
    assert asked == [prompts[0].id]


@each("words", [["reward", "try", "rows=1"], ["plan"]])
def test_json_is_alone_on_standard_output_whatever_a_reward_prints(words, here, monkeypatch, capfd):
    (here / "reward").mkdir(exist_ok=True)
    (here / "reward" / "loud.yaml").write_text("loud:\n  _target_: loud.Loud\n  weight: 1.0\n")
    (here / "loud.py").write_text(PRINTING)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        cli.run([*words, "--json", "+recipe=grpo_arithmetic", "--config-dir", str(here), "reward=[loud]"])
    finally:
        sys.modules.pop("loud", None)
    out, err = capfd.readouterr()
    assert json.loads(out)["rows" if words[0] == "reward" else "rewards"]
    for printed in ("imported", "built", "called"):
        assert printed in err


def test_without_the_hub_a_model_that_is_not_here_has_the_remedy_that_every_command_gives(monkeypatch, ran):
    monkeypatch.setattr(network_files, "hub_answers", lambda: False)
    told = ran([*WORDS, "model.path=no/such"], ends=2).err
    assert told.startswith("rlft: model.path: the model cannot be read (")
    assert "connect to the network, or use local copies: model.path=<folder>, and for the data data.path=" in told


@pytest.mark.slow
@each("recipe", [r for r in catalog.choices("recipe") if catalog.command_of(r) == "train" and r not in NOT_TRIED])
def test_the_rewards_of_a_recipe_have_no_fault(recipe, monkeypatch):
    in_process = partial(tester.RewardTester, is_isolated=False)
    monkeypatch.setattr(tester, "RewardTester", in_process)
    resolved = resolve(compose([f"+recipe={recipe}"]), "train")
    config = resolved.config
    _, tried = reward.try_rewards(resolved, reward.specs_of(config), 1)
    wrong = [row for row in verdicts_on(tried, config.completions_per_step, 2) if row.status is Status.wrong]
    assert wrong == []


def test_a_plan_says_in_three_lines_what_the_rewards_pay_for(ran):
    accepted, cheapest, common = json.loads(ran(["plan", "+recipe=grpo_arithmetic", "--json"]).out)["reward_try"]
    assert accepted.endswith("wrong texts accepted: none")
    assert "<think>-</think><answer>41</answer>" in cheapest
    assert re.fullmatch(
        r"most common answer: '\d+', of \d\.\d% of the \d+ prompts: always written, it is right as often", common
    )
