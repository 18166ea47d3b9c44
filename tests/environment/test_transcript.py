from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlft.environment.conversations import Transcript
from rlft.types import Branch, Completion, FinishReason, Prompt, Rollout


def rollout_of(transcript, prompt):
    completion = Completion(
        text="",
        token_ids=tuple(transcript.token_ids),
        logprobs=tuple(transcript.logprobs),
        finish_reason=FinishReason.stop,
        mask=tuple(transcript.mask),
        branches=tuple(transcript.branches),
    )
    asked = Prompt(id="p", messages=(), answer="", token_ids=tuple(prompt))
    return Rollout(prompt=asked, completion=completion, policy_version=0)


def test_what_goes_on_is_put_behind_what_was_said():
    transcript = Transcript([1, 2])
    transcript.say([10, 11], [-1.0, -2.0])
    transcript.turn_to([1, 2, 10, 11, 3, 4])
    transcript.say([12], [-3.0])
    assert transcript.token_ids == [10, 11, 3, 4, 12]
    assert transcript.mask == [True, True, False, False, True]
    assert transcript.logprobs == [-1.0, -2.0, 0.0, 0.0, -3.0]
    assert transcript.branches == []
    assert transcript.context == [1, 2, 10, 11, 3, 4, 12]


def test_history_that_is_written_anew_makes_a_branch_of_what_differs():
    transcript = Transcript([1, 2])
    transcript.say([10, 11, 12], [-1.0] * 3)
    transcript.turn_to([1, 2, 10, 12, 3])  # 11 is dropped: shared are 1, 2 and 10, the completion's token 0
    transcript.say([13], [-1.0])
    assert transcript.token_ids == [10, 11, 12, 12, 3, 13]
    assert transcript.mask == [True, True, True, False, False, True]
    assert transcript.branches == [Branch(start=3, after=0)]
    assert transcript.context == [1, 2, 10, 12, 3, 13]


def test_a_branch_may_begin_inside_the_prompt():
    transcript = Transcript([1, 2, 3])
    transcript.say([10], [-1.0])
    transcript.turn_to([1, 5])  # shared is the prompt's first token, which is -3
    assert transcript.branches == [Branch(start=1, after=-3)]
    assert transcript.context == [1, 5]


def test_a_branch_goes_on_from_a_branch():
    transcript = Transcript([1])
    transcript.say([10, 11], [-1.0] * 2)
    transcript.turn_to([1, 20, 21])
    transcript.say([12], [-1.0])
    transcript.turn_to([1, 20, 30])  # 20 is the completion's token 2
    assert transcript.token_ids == [10, 11, 20, 21, 12, 30]
    assert transcript.branches == [Branch(start=2, after=-1), Branch(start=5, after=2)]


def test_the_same_request_again_begins_with_what_is_sampled():
    transcript = Transcript([1, 2])
    transcript.say([10], [-1.0])
    transcript.turn_to([1, 2])
    transcript.say([11], [-2.0])
    assert (transcript.token_ids, transcript.mask) == ([10, 11], [True, True])
    assert transcript.branches == [Branch(start=1, after=-1)]


def test_a_branch_in_which_nothing_stands_is_none():
    transcript = Transcript([1, 2])
    transcript.say([10], [-1.0])
    transcript.turn_to([1, 2])
    transcript.turn_to([1])
    assert transcript.branches == [Branch(start=1, after=-2)]


def test_a_conversation_that_shares_no_token_is_another_one():
    with pytest.raises(ValueError, match="none of its tokens"):
        Transcript([1]).turn_to([2, 3])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 12),
            st.lists(st.integers(0, 2), max_size=4),
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_is_read_the_last_path_is_what_was_read_and_said(steps):
    """Each step keeps the first so many tokens of the context, reads others behind them, and says something."""
    transcript = Transcript([7, 8, 9])
    transcript.say([0], [-1.0])
    for kept, heard, said in steps:
        context = [*transcript.context[:kept], *heard]
        added = transcript.added_by(context)
        before = len(transcript.token_ids)
        transcript.turn_to(context)
        assert transcript.context == context
        assert len(transcript.token_ids) - before == added <= len(heard)
        transcript.say(said, [-1.0] * len(said))
        assert list(rollout_of(transcript, [7, 8, 9]).last_path()) == transcript.context
