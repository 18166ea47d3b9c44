"""Rows of a step as tensors: what is trained on, and where the scores of steps and the rewards of turns stand."""

import random
from dataclasses import fields, replace

import pytest
import torch
from in_one_test import each

from rlft.batch import batch_of_rows, collate
from rlft.types import Branch, Completion, FinishReason, Group, Prompt, Rollout, Scores, StepScores, Turn

SPLIT = Scores(total=torch.zeros(1, 1), by_reward={}, outcome=torch.zeros(1, 1))
PAIR = replace(SPLIT, total=torch.zeros(1, 2), outcome=torch.zeros(1, 2))


def said(token_ids, logprobs, **keys):
    return Completion(
        **{"text": "", "finish_reason": FinishReason.stop, **keys}, token_ids=token_ids, logprobs=logprobs
    )


def group_of(prompt_ids, *completions):
    prompt = Prompt(id="p", messages=(), answer="", token_ids=tuple(prompt_ids))
    return Group(
        prompt=prompt, rollouts=tuple(Rollout(prompt=prompt, completion=c, policy_version=1) for c in completions)
    )


def undecoded(token_ids):
    raise AssertionError("no step was scored: nothing is to be decoded")


@pytest.fixture
def batch():
    cut = said((8, 9, 2), (-1.0, -2.0, -3.0), finish_reason=FinishReason.length)
    groups = [
        group_of([5, 6], said((7,), (-0.5,)), cut),
        group_of([4, 4, 4], said((), ()), said((3, 2), (-0.1, -0.2))),
    ]
    return collate(groups, Scores(total=torch.tensor([[1, 0], [2, 3]]), by_reward={}), undecoded)


def test_rows_are_prompt_then_completion_padded_on_the_right(batch):
    assert batch.token_ids.tolist() == [[5, 6, 7, 0, 0], [5, 6, 8, 9, 2], [4, 4, 4, 0, 0], [4, 4, 4, 3, 2]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 1, 0, 0], [1] * 5]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1], [0] * 5, [0, 0, 0, 1, 1]]
    logprobs = [[0, 0, -0.5, 0, 0], [0, 0, -1, -2, -3], [0] * 5, [0, 0, 0, -0.1, -0.2]]
    assert torch.equal(batch.sampled_logprobs, torch.tensor(logprobs))
    assert torch.equal(batch.rewards, torch.tensor([1.0, 0.0, 2.0, 3.0]))
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.truncated.tolist() == [False, True, False, False], "where the length limit ended it"
    kinds = {f.name: value.dtype for f in fields(batch) if (value := getattr(batch, f.name)) is not None}
    assert kinds == {
        "token_ids": torch.int64, "group_ids": torch.int64, "attention_mask": torch.bool, "loss_mask": torch.bool,
        "truncated": torch.bool, "sampled_logprobs": torch.float32, "rewards": torch.float64,
    }  # fmt: skip


def test_select_takes_rows_of_every_field_in_the_order_asked_for(batch):
    batch = replace(batch, advantages=torch.arange(20.0).view(4, 5))
    part = batch.select(torch.tensor([3, 1]))
    assert part.rewards.tolist() == [3, 0]
    assert part.token_ids.tolist() == [[4, 4, 4, 3, 2], [5, 6, 8, 9, 2]]
    assert part.advantages[:, 0].tolist() == [15, 5]
    assert part.group_ids.tolist() == [1, 0]
    assert part.old_logprobs is None


# -- scored steps ---------------------------------------------------------------------------------------------------
PIECES = ["", "7+", "5=12", ",", "4", "8", "<end>"]
"""Texts of token ids; 0 is a special token, which the text doesn't show."""


def decode(token_ids):
    return "".join(PIECES[i] for i in token_ids)


def completion(token_ids, shown=decode):
    return said(token_ids, [-1.0] * len(token_ids), text=shown(token_ids))


def stepped(completions, steps, shown=decode, outcome=0.0):
    """The batch of completions of a prompt of two tokens, and (values, ends) of their steps."""
    scores = Scores(
        total=torch.full((1, len(steps)), 99.0),
        by_reward={},
        outcome=torch.full((1, len(steps)), outcome),
        steps=[[StepScores(values=tuple(values), ends=tuple(ends)) for values, ends in steps]],
    )
    return collate([group_of([3, 3], *[completion(ids, shown) for ids in completions])], scores, shown)


@each(("token_ids", "values", "ends", "rewards", "marks"), [
    # 7+ 5=12 , 4 8: the text 7+5=12,48 has characters 0-1, 2-5, 6, 7, 8 in its tokens, after two of the prompt.
    ((1, 2, 3, 4, 5, 0), (0.5, -1.0), (6, 9), [0, 0, 0, 0.5, 0, 0, -1, 0], [0, 0, 0, 1, 0, 0, 1, 0]),
    # Ends before characters 1 and 3, inside 7+ and 5=12, belong to these tokens.
    ((1, 2), (1.0, 2.0), (1, 3), [0, 0, 1, 2], [0, 0, 1, 1]),
    # A step of score 0 is marked all the same.
    ((1, 2), (0.0,), (2,), [0, 0, 0, 0], [0, 0, 1, 0]),
    # 5=12 holds characters 2 to 5. In float32 1e8 + 1 = 1e8, and 0 would be left.
    ((1, 2, 4), (1e8, 1.0, -1e8, 4.0), (3, 4, 6, 7), [0, 0, 0, 1, 4], [0, 0, 0, 1, 1]),
    # Special tokens hold no step.
    ((0, 4, 0, 5, 0), (1.0, 2.0), (1, 2), [0, 0, 0, 1, 0, 2, 0], [0, 0, 0, 1, 0, 1, 0]),
])  # fmt: skip
def test_a_step_is_scored_at_its_last_token(token_ids, values, ends, rewards, marks):
    batch = stepped([token_ids], [(values, ends)])
    assert batch.token_rewards.tolist() == [rewards]
    assert batch.step_ends.int().tolist() == [marks]
    assert (batch.token_rewards.dtype, batch.step_ends.dtype) == (torch.float64, torch.bool)


def test_a_completion_without_steps_has_none_also_without_tokens():
    batch = stepped([(4, 5, 0), (), (0,)], [((1.0,), (1,)), ((), ()), ((), ())], outcome=0.25)
    assert batch.token_rewards.tolist() == [[0, 0, 1, 0, 0], [0] * 5, [0] * 5]
    assert batch.step_ends.sum(1).tolist() == [1, 0, 0]
    assert batch.rewards.tolist() == [0.25] * 3, "of the outcome alone"


def utf_8(token_ids):
    """As byte-level tokenizers decode: one replacement character for what is begun."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def utf_8_by_byte(token_ids):
    """As others do: a replacement character for each byte of what is begun, so that texts may shrink as they go on."""
    given = bytes(token_ids)
    whole = given.decode("utf-8", errors="ignore")
    return whole + "\ufffd" * (len(given) - len(whole.encode()))


@pytest.mark.parametrize("shown", [utf_8, utf_8_by_byte])
def test_a_step_that_ends_with_a_character_of_several_tokens_ends_with_the_last_of_them(shown):
    # Bytes: é 0-1, = 2, 😀 3-6, ! 7, 1 8; after two tokens of the prompt.
    batch = stepped([tuple("é=😀!1".encode())], [((1.0, 2.0, 3.0, 4.0), (1, 3, 4, 5))], shown)
    assert batch.token_rewards.tolist() == [[0, 0, 0, 1, 0, 0, 0, 0, 2, 3, 4]]


def test_a_text_that_really_has_replacement_characters_has_its_steps_too():
    batch = stepped([(0x31, 0xFF, 0x32)], [((1.0, 2.0), (2, 3))], utf_8)
    assert batch.token_rewards.tolist() == [[0, 0, 0, 1, 2]]


def test_a_step_takes_few_decodes():
    asked = []

    def counting(token_ids):
        asked.append(len(token_ids))
        return decode(token_ids)

    scores = replace(SPLIT, steps=[[StepScores(values=(1.0,), ends=(700,))]])
    batch = collate([group_of([3], completion((4,) * 1000))], scores, counting)
    assert batch.token_rewards.nonzero().tolist() == [[0, 700]]
    # 2^10 > 1000.
    assert len(asked) <= 10


def test_scored_texts_must_be_those_of_the_tokens_and_rewards_of_turns_told_apart():
    other = replace(completion((4, 5)), text="84")
    scores = replace(SPLIT, steps=[[StepScores(values=(1.0,), ends=(2,))]])
    with pytest.raises(ValueError, match="the text of a completion of prompt p is not what its tokens decode to"):
        collate([group_of([3], other)], scores, decode)
    groups = [group_of([5], talk(TALK, (Turn(end=2, reward=1.0),)))]
    with pytest.raises(ValueError, match="which part of the total is of completions"):
        collate(groups, Scores(total=torch.ones(1, 1), by_reward={}), undecoded)


def test_bisection_finds_the_first_token_as_a_walk_does():
    """On random texts of tokens of 0 to 5 characters."""
    draw = random.Random(0)
    for _ in range(200):
        ids = tuple(draw.choices(range(len(PIECES)), k=draw.randint(1, 12)))
        text = decode(ids)
        ends = sorted(draw.sample(range(1, len(text) + 1), k=draw.randint(0, len(text))))
        values = [draw.choice([1.0, 2.0, 4.0]) for _ in ends]
        expected = [0.0] * (2 + len(ids))
        for value, end in zip(values, ends, strict=True):
            expected[2 + next(k for k in range(len(ids)) if len(decode(ids[: k + 1])) >= end)] += value
        batch = stepped([ids], [(values, ends)])
        assert batch.token_rewards.tolist() == [expected]
        assert batch.step_ends.sum() == len({k for k, v in enumerate(expected) if v})


def test_the_embedded_model_has_its_steps_at_their_last_digits(backbone):
    """`working` of 47 + 85, as scripts/make_tiny_model.py has it written; the tags are one token each."""
    text = "<think>7+5=12,4+8+1=13</think><answer>132</answer>"
    ids = (*backbone.tokenizer(text, add_special_tokens=False)["input_ids"], backbone.tokenizer.eos_token_id)
    batch = stepped([ids], [((1.0, 2.0, 4.0), (13, 22, len(text)))], backbone.decode)
    ends = batch.token_rewards[0, 2:].nonzero()[:, 0].tolist()
    assert [backbone.decode(ids[: k + 1]) for k in ends] == [text[:13], text[:22], text]
    # 50 characters, the 32 of the tags in 4 tokens: 22 tokens, of which the end token, no part of the text, is none.
    assert ends[-1] == len(ids) - 2 == 21
    assert batch.token_rewards.sum() == 7


# -- several turns -----------------------------------------------------------------------------------------------------
def talk(mask, turns=(), token_ids=(1, 2, 3, 1, 4), text="7+5=12,7+4", logprobs=None, branches=()):
    """A completion of five tokens, of which the policy sampled those of the mask."""
    logprobs = tuple(-0.5 * bool(sampled) for sampled in mask or [True] * 5) if logprobs is None else logprobs
    return said(token_ids, logprobs, text=text, mask=mask, turns=turns, branches=branches)


TALK = (True, True, False, False, True)


def test_only_sampled_tokens_are_trained_on_and_all_are_read():
    batch = collate([group_of([5, 6], talk(TALK), talk(None))], PAIR, decode)
    assert batch.attention_mask.all()
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1]]
    assert batch.sampled_logprobs[0].tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]


def test_a_turns_reward_stands_on_its_last_sampled_token_beside_the_scores_of_steps():
    turns = (Turn(end=2, reward=0.25), Turn(end=5))
    steps = [[StepScores(values=(1.0, 2.0, 4.0), ends=(2, 7, 10))]]  # "7+", within the answer ",", and the last token
    batch = collate([group_of([5, 6], talk(TALK, turns))], replace(SPLIT, steps=steps), decode)
    # A step that ends in the answer is that of the token before it, where the first turn ends, too.
    assert batch.token_rewards.tolist() == [[0, 0, 1, 2.25, 0, 0, 4]]
    assert batch.step_ends.int().tolist() == [[0, 0, 1, 1, 0, 0, 1]]
    alone = collate([group_of([5, 6], talk(TALK, turns))], SPLIT, undecoded)
    assert alone.token_rewards.tolist() == [[0, 0, 0, 0.25, 0, 0, 0]]
    assert alone.step_ends.int().tolist() == [[0, 0, 0, 1, 0, 0, 0]], "a turn without a reward is no step"
    unrewarded = collate([group_of([5, 6], talk(TALK, turns[1:]))], SPLIT, undecoded)
    assert unrewarded.token_rewards.tolist() == [[0] * 7], "they might have had rewards, which an algorithm learns from"
    assert not unrewarded.step_ends.any()


def test_the_last_tokens_of_turns_are_marked_where_completions_have_turns():
    talks = [talk(TALK, (Turn(end=2, reward=0.5), Turn(end=5))), talk(TALK)]
    batch = collate([group_of([5, 6], *talks)], PAIR, decode)
    assert batch.turn_ends.int().tolist() == [[0, 0, 0, 1, 0, 0, 1], [0] * 7]
    single = collate([group_of([5, 6], talk(TALK))], SPLIT, decode)
    assert (single.turn_ends, single.token_rewards, single.step_ends) == (None, None, None)


def test_a_step_before_the_first_sampled_token_is_that_tokens():
    steps = [[StepScores(values=(1.0,), ends=(2,))]]
    completion = talk((False, True, True, True, True))
    batch = collate([group_of([5], completion)], replace(SPLIT, steps=steps), decode)
    assert batch.token_rewards.tolist() == [[0, 0, 1, 0, 0, 0]]


def test_a_branch_says_which_column_is_read_before_it():
    branches = (Branch(start=2, after=-1), Branch(start=4, after=2))
    batch = collate([group_of([5, 6], talk(TALK, branches=branches), talk(None))], PAIR, undecoded)
    # Columns 0 and 1 are the prompt's; the branches begin in columns 4 and 6, behind columns 1 and 4.
    assert batch.previous.tolist() == [[-1, 0, 1, 2, 1, 4, 4], [-1, 0, 1, 2, 3, 4, 5]]
    without = collate([group_of([5, 6], talk(TALK), talk(None))], PAIR, undecoded)
    assert without.previous is None


@each(("completion", "problem"), [
    (said((7, 8), (-0.5,)), "1 log-prob for 2 tokens"),
    (said((7, 8), (-0.5, -0.1, -0.2)), "3 log-probs for 2 tokens"),
    (said((7, 8), ()), "0 log-probs for 2 tokens"),
    (talk((True,) * 4, logprobs=(0.0,) * 5), "a mask of 4 entries for 5 tokens"),
    (talk(TALK, logprobs=(-1.0,) * 5), "a log-prob other than 0 for a token that was not sampled"),
    (talk(TALK, logprobs=(-1.0, -1.0, float("nan"), 0.0, -1.0)), "a log-prob other than 0"),
    (talk(TALK, (Turn(end=6),)), r"turns that end with tokens \[6\] of 5"),
    (talk(TALK, (Turn(end=0),)), r"turns that end with tokens \[0\] of 5"),
    (talk(TALK, (Turn(end=2), Turn(end=2))), r"turns that end with tokens \[2, 2\] of 5"),
    (talk(TALK, (Turn(end=3),)), "a turn whose last token was not sampled"),
    (talk(TALK, (Turn(end=2, reward=float("inf")),)), "a turn whose reward is no finite number"),
    (talk(TALK, branches=(Branch(start=5, after=0),)), r"branches that begin with tokens \[5\] of 5"),
    (talk(TALK, branches=(Branch(start=0, after=-2),)), r"branches that begin with tokens \[0\] of 5"),
    (talk(TALK, branches=(Branch(start=2, after=0),) * 2), r"branches that begin with tokens \[2, 2\] of 5"),
    (talk(TALK, branches=(Branch(start=2, after=1),)), "a branch that continues no earlier place"),
    (talk((False, False, True, True, True), branches=(Branch(start=2, after=0),)), "a branch before anything was"),
    (talk(TALK, branches=(Branch(start=2, after=-2),)), "with a branch after token -2 of 1"),
])  # fmt: skip
def test_a_completion_whose_turns_do_not_fit_its_tokens_is_an_error(completion, problem):
    with pytest.raises(ValueError, match=f"the generator gave a completion of prompt p {problem}"):
        collate([group_of([5], completion)], SPLIT, undecoded)


def test_each_reward_stands_by_itself_with_its_weight_and_those_of_weight_0_are_left_out():
    # Two prompts of one completion; the weight of what environments gave for turns is named nowhere, and is 1.
    names = {"math": [[1.0], [0.0]], "seen": [[9.0], [9.0]], "format": [[0.5], [2.0]], "turns": [[3.0], [4.0]]}
    scores = Scores(
        total=torch.zeros(2, 1),
        by_reward={name: torch.tensor(values) for name, values in names.items()},
        weights={"math": 2.0, "seen": 0.0, "format": 0.25},
    )
    batch = collate([group_of([5], said((7,), (-0.5,)))] * 2, scores, undecoded)
    assert batch.each_reward.tolist() == [[1.0, 0.5, 3.0], [0.0, 2.0, 4.0]]
    assert batch.each_weight.tolist() == [[2.0, 0.25, 1.0]] * 2
    assert batch.select(torch.tensor([1])).each_weight.tolist() == [[2.0, 0.25, 1.0]]
    without = collate([group_of([5], said((7,), (-0.5,)))], SPLIT, undecoded)
    assert (without.each_reward, without.each_weight) == (None, None)


def test_rows_are_padded_on_the_right_and_their_completions_are_learned():
    batch = batch_of_rows([(0, (5, 6, 7), (20, 21, 2)), (0, (5, 6, 7), (22,)), (1, (9,), (30, 31))])
    assert batch.token_ids.tolist() == [[5, 6, 7, 20, 21, 2], [5, 6, 7, 22, 0, 0], [9, 30, 31, 0, 0, 0]]
    assert batch.attention_mask.sum(1).tolist() == [6, 4, 3]
    assert batch.loss_mask.nonzero().tolist() == [[0, 3], [0, 4], [0, 5], [1, 3], [2, 1], [2, 2]]
    assert batch.group_ids.tolist() == [0, 0, 1]
