import sys
from contextlib import closing

import pytest
from in_one_test import each

from rlft.config.catalog import config_folder
from rlft.config.compose import compose
from rlft.plan.rules import check_metadata
from rlft.reward.workers.reward_spec import is_trl, messages_of, specs
from rlft.reward.workers.scorer import RewardError, Scorer
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, ToolCall, Turn, UserError

FORMAT = {
    "_target_": "rlft.reward.format.Format", "weight": 0.2, "mode": "strict", "tags": ["think", "answer"],
    "pattern": None,
}  # fmt: skip


def test_a_spec_builds_what_is_its_rewards_and_keeps_what_is_the_scorers(group):
    """Of classes and functions from outside the tree as well; it knows which score steps or run in the trainer."""
    own = {
        "bonus": {"_target_": "naughty.Bonus", "bonus": 2.5},
        "length": {"_target_": "naughty.length"},
        "scaled": {"_target_": "naughty.scaled_length", "scale": 2},
        "words": {"_target_": "naughty.stepwise"},
        "same": {"_target_": "naughty.SameSteps", "values": [1.0], "ends": [1]},
        "judge": {"_target_": "naughty.Judge", "taste": "good"},
    }
    weighted = {name: {**keys, "weight": 1} for name, keys in own.items()}
    built = specs({"format": {**FORMAT, "on_error": 0}, **weighted})
    spec = built["format"]
    assert (spec.weight, spec.on_error, set(spec.kwargs)) == (0.2, 0.0, {"mode", "tags", "pattern"})
    scores = [built[name].build()(group(["ab"])) for name in ("bonus", "length", "scaled")]
    assert scores == [[2.5], [2.0], [4]]
    assert [name for name, spec in built.items() if spec.scores_steps] == ["words", "same"]
    assert [name for name, spec in built.items() if spec.runs_in_trainer] == ["judge"]


def without(key):
    return {k: v for k, v in FORMAT.items() if k != key}


@each(("config", "message"), [
    (FORMAT | {"_target_": "no.such.Reward"}, "reward.r._target_: cannot be imported"),
    (FORMAT | {"_target_": "rlft.reward.format.Fromat"}, "reward.r._target_: cannot be imported"),
    (FORMAT | {"_target_": "format"}, "reward.r._target_: must be module.Name"),
    (FORMAT | {"_target_": None}, "reward.r._target_: must be module.Name"),
    ({"_target_": "naughty.number", "weight": 1}, "reward.r._target_: is not callable"),
    ({"_target_": "naughty.NotAReward", "weight": 1}, "reward.r._target_: builds something that is not callable"),
    (without("_target_"), "reward.r: has no _target_"),
    (None, "reward.r: has no _target_"),
    (without("weight"), "reward.r.weight: must be a finite number, got nothing"),
    (FORMAT | {"weight": "much"}, "reward.r.weight: must be a finite number, got 'much'"),
    (FORMAT | {"weight": float("nan")}, "reward.r.weight: must be a finite number"),
    (FORMAT | {"on_error": "go on"}, "reward.r.on_error: must be a finite number"),
    (FORMAT | {"mode": "lax"}, "reward.r.mode: is not one of its choices, got 'lax'; choose one of strict, soft"),
    (FORMAT | {"moed": "soft"}, "reward.r.moed: there is no such key, got 'soft'; did you mean reward.r.mode?"),
    (FORMAT | {"tags": 3}, "reward.r.tags: "),
    (FORMAT | {"tags": []}, "reward.r.tags: must be different names"),
    (without("tags"), "reward.r.tags: is missing"),
    ({"_target_": "naughty.Bonus", "weight": 1, "bonus": "big"}, "reward.r.bonus: "),
    ({"_target_": "naughty.scaled_length", "weight": 1}, "reward.r.scale: is missing"),
    ({"_target_": "naughty.length", "weight": 1, "unit": "cm"}, "reward.r.unit: there is no such key"),
    ({"_target_": "naughty.Judge", "weight": 1, "taste": "good", "on_error": 0.0},
     "reward.r.on_error: is for rewards that run in workers"),
])  # fmt: skip
def test_a_wrong_reward_is_refused_by_its_key(config, message):
    with pytest.raises(UserError) as refusal:
        specs({"r": config})
    assert str(refusal.value).startswith(message)


# -- functions that people bring from TRL ------------------------------------------------------------------------------
MODULE = """
import asyncio

def by_completions(completions, **kwargs):
    return [float(len(c[0]["content"])) for c in completions]

def by_prompts(prompts, completions, **kwargs):
    asked = [p[-1]["content"] == "What is 1 + 1?" for p in prompts]
    return [float(a and c[0]["role"] == "assistant") for a, c in zip(asked, completions)]

def by_answer(completions, answer, **kwargs):
    return [1.0 if a in c[0]["content"] else None for c, a in zip(completions, answer)]

def by_column(completions, solution, unit="m", **kwargs):
    return [float(c[0]["content"] == f"{s}{unit}") for c, s in zip(completions, solution)]

def by_ids(completion_ids):
    return [float(sum(ids)) for ids in completion_ids]

def by_keywords(**kwargs):
    assert sorted(kwargs) == ["answer", "completion_ids", "completions", "prompts", "solution"], sorted(kwargs)
    return [float(len(v)) for v in zip(*kwargs.values())]

def by_texts(completions, prompts, **kwargs):
    return [float(len(c)) if p == "You add.\\n\\nWhat is 1 + 1?" else -1.0 for c, p in zip(completions, prompts)]

async def by_waiting(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(c)) for c in completions]

async def for_ever(completions, **kwargs):
    await asyncio.sleep(60)

class Shorter:
    def __init__(self, limit):
        self.limit = limit

    def __call__(self, completions, **kwargs):
        return [float(len(c[0]["content"]) < self.limit) for c in completions]

def by_state(completions, trainer_state, **kwargs):
    return [0.0 for _ in completions]

def ours(group, limit=3):
    return [float(len(r.completion.text) < limit) for r in group.rollouts]
"""
TEXTS = ("2", "2m", "twelve")


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "brought_from_trl.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "brought_from_trl", raising=False)


def spec(name, **keys):
    return specs({"mine": {"_target_": f"brought_from_trl.{name}", "weight": 1.0, **keys}})


def prompt():
    messages = ({"role": "system", "content": "You add."}, {"role": "user", "content": "What is 1 + 1?"})
    return Prompt(id="one", messages=messages, answer="2", metadata={"solution": "2"})


def group():
    def rollout(i, text):
        said = Completion(text=text, token_ids=(i, 5), logprobs=(0.0, 0.0), finish_reason=FinishReason.stop)
        return Rollout(prompt=prompt(), completion=said, policy_version=0)

    return Group(prompt=prompt(), rollouts=tuple(rollout(i, text) for i, text in enumerate(TEXTS)))


def scores(rewards, workers=0, timeout=10.0):
    with closing(Scorer(rewards, workers, timeout, "stop")) as scorer:
        return scorer([group()]).by_reward["mine"][0].tolist()


@each(("name", "keys", "expected"), [
    ("by_completions", {}, [1, 2, 6]),
    ("by_prompts", {}, [1, 1, 1]),
    ("by_answer", {}, [1, 1, 0]),  # None: does not apply
    ("by_column", {}, [0, 1, 0]),
    ("by_column", {"unit": ""}, [1, 0, 0]),
    ("by_column", {"solution": ["twelve"] * 3, "unit": ""}, [0, 0, 1]),
    ("by_ids", {}, [5, 6, 7]),
    ("by_keywords", {}, [5, 5, 5]),
    ("by_texts", {"completions": "texts"}, [1, 2, 6]),
    ("by_waiting", {}, [1, 1, 1]),
    ("by_waiting", {"completions": "texts"}, [1, 2, 6]),
    ("Shorter", {"limit": 3}, [1, 1, 0]),
    ("ours", {"limit": 2}, [1, 0, 0]),
])  # fmt: skip
def test_each_form_scores_a_group(name, keys, expected):
    assert scores(spec(name, **keys)) == expected


def test_a_worker_process_scores_the_same_and_a_coroutine_has_the_time_limit_of_any_reward():
    assert scores(spec("by_answer"), workers=1) == [1, 1, 0]
    with pytest.raises(RewardError, match=r"exceeded its time limit of 0.2 s a group"):
        scores(spec("for_ever"), timeout=0.2)


@each(("name", "keys", "refusal"), [
    ("by_state", {}, "reward.mine._target_: brought_from_trl.by_state cannot be called without trainer_state"),
    ("by_completions", {"wieght": 1}, "reward.mine.wieght: there is no such key"),
    ("by_column", {"unti": "m"}, "reward.mine.unti: there is no such key, got 'm'; did you mean reward.mine.unit?"),
    ("by_completions", {"completions": "text"}, "reward.mine.completions: "),
    ("ours", {"completions": "texts"}, "reward.mine.completions: there is no such key"),
    ("Shorter", {}, "reward.mine.limit: is missing"),
])  # fmt: skip
def test_mistakes_are_refused_before_the_run(name, keys, refusal):
    with pytest.raises(UserError) as refused:
        spec(name, **keys)
    assert str(refused.value).startswith(refusal)


def test_a_column_that_the_data_have_not_is_refused():
    bare = Prompt(id="one", messages=prompt().messages, answer="2")
    with pytest.raises(UserError, match=r"by_column takes solution, .* set data.metadata_fields=\[solution\]"):
        check_metadata(spec("by_column"), bare)
    check_metadata(spec("by_column"), prompt())
    check_metadata(spec("by_column", solution=["2"]), bare)
    check_metadata(spec("by_answer"), bare)


@each("function", [len, print, lambda group: [], lambda group, **keys: [], lambda group, *more: []])
def test_a_function_of_a_group_is_not_taken_for_one_of_trls(function):
    assert not is_trl(function)


def test_a_conversation_is_given_as_messages():
    call = ToolCall(name="add", arguments='{"a": 1}', answer="2")
    first = Turn(end=1, text="Let me add.", calls=(call,))
    turns = (first, Turn(end=2, text="2?", answer="Sure?"), Turn(end=3, text="2"))
    tokens = {"token_ids": (1, 2, 3), "logprobs": (0.0,) * 3}
    completion = Completion(text="whole", finish_reason=FinishReason.stop, turns=turns, **tokens)
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert list(messages_of(completion)) == [
        {"role": "assistant", "content": "Let me add.", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "2?"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "2"},
    ]


# -- configs -----------------------------------------------------------------------------------------------------------
MINE = """
# A reward from outside the tree.
mine:
  _target_: naughty.Bonus
  weight: 2.0
  bonus: 1.5
"""
RECIPE = """
# @package _global_
defaults:
  - override /reward: [math, format]
reward:
  format:
    weight: 0.5
"""


@each(("words", "weights"), [
    ((), {"exact_match": 1.0, "format": 0.2}),
    (("reward=format",), {"format": 0.2}),
    (("reward=[math,format]", "reward.format.weight=0.3"), {"math": 1.0, "format": 0.3}),
    (("+recipe=mathematics",), {"math": 1.0, "format": 0.5}),
    (("+recipe=mathematics", "reward=[mine,format]", "reward.format.weight=0.1"), {"mine": 2.0, "format": 0.1}),
    (("reward=[exact_match,mine]", "reward.mine.bonus=4.0"), {"exact_match": 1.0, "mine": 2.0}),
])  # fmt: skip
def test_the_command_line_goes_before_a_recipe_and_that_before_the_defaults(words, weights, tmp_path):
    for name, text in (("recipe/mathematics", RECIPE), ("reward/mine", MINE)):
        (tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    built = specs(compose(list(words), tmp_path)["reward"])
    assert list({name: spec.weight for name, spec in built.items()}.items()) == list(weights.items())
    if "mine" in built:
        assert built["mine"].kwargs == {"bonus": 4.0 if "reward.mine.bonus=4.0" in words else 1.5}


def test_every_shipped_config_builds_its_namesake():
    paths = sorted((config_folder() / "reward").glob("*.yaml"))
    built = specs(compose([f"reward=[{','.join(path.stem for path in paths)}]", "token_budget=4096"])["reward"])
    assert list(built) == [path.stem for path in paths]
    for path in paths:
        assert path.read_text().startswith("# ")
        assert built[path.stem].target.startswith(f"rlft.reward.{path.stem}.")
        built[path.stem].build()


def test_limits_of_the_run_reach_the_rewards_that_need_them():
    limits = ["generation.max_tokens=80", "token_budget=4096", "scoring.timeout=10.0"]
    built = specs(compose(["reward=[overlong,learned,http]", *limits])["reward"])
    assert built["overlong"].kwargs["max_tokens"] == 80
    assert built["learned"].kwargs["token_budget"] == 4096
    assert built["http"].kwargs["group_timeout"] == 10.0
