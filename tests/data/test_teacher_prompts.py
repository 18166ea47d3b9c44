"""What a teacher reads that the student does not."""

import pytest
import torch

from rlft.data.texts import longest_with_hint, teacher_prompts, with_hint
from rlft.types import Completion, FinishReason, Group, Rollout, UserError


def group_of(prompt, size):
    said = Completion(text="1", token_ids=(5,), logprobs=(0.0,), finish_reason=FinishReason.stop)
    return Group(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=said, policy_version=0),) * size)


def test_a_hint_stands_at_the_end_of_the_last_message_with_the_answer_in_it(make_prompt):
    hinted = with_hint(make_prompt("What is 1 + 1?", "2"), "The answer is {answer}.")
    assert hinted.messages == ({"role": "user", "content": "What is 1 + 1?\n\nThe answer is 2."},)
    assert hinted.token_ids == ()


def test_each_completion_has_its_prompts_tokens_with_the_hint(make_prompt, backbone):
    one, two = make_prompt("1?", "1"), make_prompt("What is 20 + 20?", "40")
    made = teacher_prompts([group_of(one, 2), group_of(two, 1)], "It is {answer}.", backbone.tokenizer, "chat")
    expected = [make_prompt(f"{text}\n\nIt is {answer}.").token_ids for text, answer in (("1?", 1), (two.id, 40))]
    assert made.dtype == torch.int64
    assert [tuple(row[row >= 0].tolist()) for row in made] == [expected[0], expected[0], expected[1]]
    assert (made[0, len(expected[0]) :] == -1).all()
    assert longest_with_hint([one, two], "It is {answer}.", backbone.tokenizer, "chat") == len(expected[1])


def test_an_answer_that_a_prompt_has_not_is_shown_to_no_teacher(make_prompt, backbone):
    prompts = [make_prompt("1?", "1"), make_prompt("2?", " "), make_prompt("3?", "")]
    with pytest.raises(UserError, match=r"2 train prompts have none, first 2\?, got 'It is {answer}\.'") as refused:
        longest_with_hint(prompts, "It is {answer}.", backbone.tokenizer, "chat")
    assert refused.value.key == "snapshot.teacher_hint"
    assert longest_with_hint(prompts, "Think.", backbone.tokenizer, "chat") > 0
