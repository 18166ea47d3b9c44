"""Games: the policy's whole turns are moves, which may be rewarded."""

from rlft.types import FinishReason
from tests.environment.test_conversations import SAMPLING, TOKENIZER, game, prompt


def test_a_game_answers_whole_turns_and_rewards_each(converse):
    conversations = converse({"*": [["low or high?", "{answer}"], ["?", "9"]]}, game("Guessing"))
    [group] = conversations.sample([prompt()], 2, [0], SAMPLING)
    right, wrong = (r.completion for r in group.rollouts)
    assert [t.reward for t in right.turns] == [0.25, 1.0]
    assert [t.reward for t in wrong.turns] == [0.25, 0.0]
    assert right.turns[0].answer == "high"
    assert right.finish_reason is wrong.finish_reason is FinishReason.stop
    row = "low or high?<|im_end|>\n<|im_start|>user\nhigh<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    assert TOKENIZER.decode(list(right.token_ids)) == row
