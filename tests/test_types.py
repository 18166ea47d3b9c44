"""What the parts of a run hand each other: completions, their groups, counted nouns and refusals."""

import pickle

import pytest
from in_one_test import each

from rlft.types import Branch, Completion, FinishReason, Group, Mistakes, Prompt, Rollout, UserError, Verdict, counted

PROMPT = Prompt(id="p", messages=(), answer="", token_ids=(5, 6, 7))


def made(*branches, mask=None):
    ids, logprobs = (1, 2, 3, 1, 4), (0.0,) * 5
    return Completion(
        text="", token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.stop, mask=mask, branches=branches
    )


@each(("branch", "shared", "paths"), [
    (Branch(start=2, after=0), (5, 6, 7), [(1, 3, 1, 4), (1, 2, 3, 1, 4)]),
    (Branch(start=3, after=-2), (5, 6), [(1, 4), (7, 1, 2, 3, 1, 4)]),
    (None, (5, 6, 7), [(1, 2, 3, 1, 4)] * 2),
])  # fmt: skip
def test_the_last_paths_of_siblings_share_what_all_of_them_begin_with(branch, shared, paths):
    completions = made(*[branch] * (branch is not None)), made()
    rollouts = tuple(Rollout(prompt=PROMPT, completion=one, policy_version=1) for one in completions)
    assert Group(prompt=PROMPT, rollouts=rollouts).last_paths() == (shared, paths)


def test_sampled_tokens_are_those_of_the_mask_and_a_completion_is_the_same_after_its_way_to_another_process():
    assert made().num_sampled == 5
    one = made(mask=(True, True, False, False, True))
    assert one.num_sampled == 3
    assert pickle.loads(pickle.dumps(one)) == one
    assert (Verdict(0.5, "7"), Verdict(0.5, "7").answer) == (0.5, "7")


@each(
    ("number", "noun", "said"),
    [(1, "step", "1 step"), (2, "batch", "2 batches"), (0, "entry", "0 entries"), (3, "key", "3 keys")],
)
def test_a_noun_is_counted(number, noun, said):
    assert counted(number, noun) == said


def test_mistakes_are_refused_together():
    mistakes = Mistakes()
    for key in ("steps", "seed"):
        with mistakes:
            raise UserError(key, "is wrong", got=0, remedy="use 1")
    with pytest.raises(UserError, match=r"^steps: is wrong, got 0; use 1") as refused:
        mistakes.refuse()
    assert [other.key for other in refused.value.more] == ["seed"]
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
