"""What is stored is read as lists are, and lines of rlft sample as they were written."""

import itertools
import json
import math
from array import array
from dataclasses import replace

import pytest
from in_one_test import each

from rlft.data.fields import RowError
from rlft.data.records import Joined, Stored, check_tokenizer, is_sampled, mapped, parse_sampled, sampled_line
from rlft.types import Branch, Completion, FinishReason, Prompt, Rollout, Turn, UserError

SQUARES = [i * i for i in range(12)]
SEQUENCES = {
    "items": (Stored.of(SQUARES, "x"), SQUARES),
    "mapped": (mapped(Stored.of(range(12), "x"), lambda i: i * i), SQUARES),
    "chosen": (Stored.of(SQUARES, "x")[[0, 1, 5, 6, 11]], [0, 1, 25, 36, 121]),
    "none chosen": (Stored.of(SQUARES, "x")[array("I")], []),
    "joined": (Joined(Stored.of(SQUARES, "x"), [7, 8]), [*SQUARES, 7, 8]),
    "joined the other way": (Joined((7, 8), Stored.of(SQUARES, "x")), [7, 8, *SQUARES]),
}


@each(("stored", "held"), SEQUENCES.values(), ids=list(SEQUENCES))
def test_what_is_stored_is_read_as_a_list_is(stored, held):
    assert (len(stored), list(stored)) == (len(held), held)
    assert [stored[i] for i in range(-len(held), len(held))] == [*held, *held]
    for i, j, k in itertools.product((None, 0, 2, -3, 99), (None, 0, 4, -1, 99), (None, 1, 2, -1)):
        part = stored[i:j:k]
        assert isinstance(part, type(stored) if isinstance(stored, Stored) else list), "a slice holds nothing either"
        assert list(part) == held[i:j:k]
        assert list(part[1:3]) == held[i:j:k][1:3]
    for index in (len(held), -len(held) - 1):
        with pytest.raises(IndexError):
            stored[index]


# -- lines of rlft sample ----------------------------------------------------------------------------------------------
def test_a_line_has_exactly_these_keys_and_reads_back(sample):
    line = sample("1 + 1", "2!", 0.5, index=4, rewards={"math": 1.0, "format": 0.0})
    assert line == {
        "prompt_id": "1 + 1", "index": 4, "prompt": [{"role": "user", "content": "What is 1 + 1?"}], "answer": "2",
        "completion": "2!", "token_ids": [50, 33, 0], "finish_reason": "stop", "reward": 0.5,
        "rewards": {"format": 0.0, "math": 1.0}, "model": "tiny, step 3", "tokenizer": "0123456789ab",
    }  # fmt: skip
    assert is_sampled(line)
    read = parse_sampled(json.loads(json.dumps(line, allow_nan=False)), with_tokens=True)
    assert (read.prompt.id, read.prompt.answer) == ("1 + 1", "2")
    assert read.prompt.messages == ({"role": "user", "content": "What is 1 + 1?"},)
    assert (read.completion, read.token_ids, read.finish_reason) == ("2!", (50, 33, 0), FinishReason.stop)
    assert (read.rewards, read.reward) == ({"format": 0.0, "math": 1.0}, 0.5)
    assert not is_sampled({key: value for key, value in line.items() if key != "tokenizer"})  # a run's rollouts
    assert not is_sampled(line | {"prompt": "What?"})
    assert not is_sampled({key: value for key, value in line.items() if key != "completion"})


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_worked_examples_stand_apart_from_the_question_and_come_back_on_request(system, number):
    asked = [{"role": "user", "content": "What is 1?"}]
    examples = [{"role": role, "content": f"{role} {i}"} for i in range(number) for role in ("user", "assistant")]
    first = [] if system is None else [{"role": "system", "content": system}]
    prompt = Prompt(id="1", messages=(*first, *examples, *asked), answer="1", num_examples=len(examples))
    said = Completion(text="1", token_ids=(1,), logprobs=(-1.0,), finish_reason=FinishReason.stop)
    rollout = Rollout(prompt=prompt, completion=said, policy_version=0)
    line = json.loads(json.dumps(sampled_line(rollout, index=0, rewards={}, reward=1.0, model="m", tokenizer="t")))
    assert line["prompt"] == [*first, *asked]
    assert line.get("examples", []) == examples
    assert parse_sampled(line, with_tokens=True).prompt.messages == (*first, *asked)
    assert parse_sampled(line, with_tokens=True, with_examples=True).prompt.messages == prompt.messages


def test_rewards_that_are_no_finite_numbers_become_null(sample):
    line = sample("1", "2", math.inf, rewards={"judge": math.nan})
    assert (line["reward"], line["rewards"]) == (None, {"judge": None})
    read = parse_sampled(line, with_tokens=True)
    assert (read.reward, read.rewards) == (None, {"judge": None})


@pytest.mark.parametrize(("changed", "problem"), [
    ({"token_ids": [1, 2.5]}, "field 'token_ids' must be whole numbers, not below 0"),
    ({"token_ids": [-1]}, "field 'token_ids' must be whole numbers, not below 0"),
    ({"token_ids": [True]}, "field 'token_ids' must be whole numbers, not below 0"),
    ({"token_ids": []}, "field 'token_ids' is empty"),
    ({"token_ids": None}, "field 'token_ids' of a sampled line must be a list, it is null"),
    ({"completion": 3}, "field 'completion' of a sampled line must be a string, it is a number"),
    ({"rewards": []}, "field 'rewards' of a sampled line must be an object, it is an empty list"),
    ({"rewards": {"math": "1"}}, "field 'rewards.math' must be a number or null, it is a string"),
    ({"reward": True}, "field 'reward' must be a number or null, it is a boolean"),
    ({"finish_reason": "eos"}, "field 'finish_reason' must be stop or length or turns or calls or time, it is 'eos'"),
    ({"prompt": [{"role": "bot", "content": "?"}]}, "message 0 of field 'prompt' must be"),
])  # fmt: skip
def test_a_line_that_was_changed_by_hand_is_refused(sample, changed, problem):
    with pytest.raises(RowError) as refusal:
        parse_sampled(sample("1", "2") | changed, with_tokens=True)
    assert str(refusal.value).startswith(problem)


def test_tokens_of_another_tokenizer_are_refused_with_the_way_out():
    check_tokenizer(set(), "0123456789ab", "demonstrations.path")
    check_tokenizer({"0123456789ab"}, "0123456789ab", "demonstrations.path")
    with pytest.raises(UserError) as refusal:
        check_tokenizer({"0123456789ab", "ffffffffffff"}, "0123456789ab", "preferences.path")
    assert str(refusal.value) == (
        "preferences.path: was sampled with another tokenizer (ffffffffffff) than this model's (0123456789ab); "
        "set preferences.token_ids=text to tokenise its texts again, or sample with this model"
    )


def test_a_conversation_keeps_its_mask_and_turns_and_is_not_learned_from():
    """Its tokens are not all the policy's: an environment's would be learned as the policy's own."""
    tokens = {"token_ids": (1, 2, 3), "logprobs": (-1.0, 0.0, -1.0), "mask": (True, False, True)}
    turns = (Turn(end=1, text="a", answer="b", reward=0.5), Turn(end=3, text="c"))
    parts = {"turns": turns, "branches": (Branch(start=2, after=-1),)}
    spoken = Completion(text="a b c", finish_reason=FinishReason.stop, **tokens, **parts)
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), answer="")
    rollout = Rollout(prompt=prompt, completion=spoken, policy_version=None)
    line = sampled_line(rollout, index=0, rewards={}, reward=1.0, model="m", tokenizer="t")
    assert line["mask"] == [1, 0, 1]
    assert line["branches"] == [{"start": 2, "after": -1}]
    assert [turn["end"] for turn in line["turns"]] == [1, 3]
    with pytest.raises(RowError, match="it is a conversation, and what an environment said in it would be learned"):
        parse_sampled(line, with_tokens=True)
    single = replace(rollout, completion=replace(spoken, mask=None, turns=(), branches=(), logprobs=(-1.0,) * 3))
    plain = sampled_line(single, index=0, rewards={}, reward=1.0, model="m", tokenizer="t")
    assert not {"mask", "turns", "branches"} & plain.keys()
