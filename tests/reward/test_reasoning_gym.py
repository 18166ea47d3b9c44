from contextlib import closing

import pytest

from rlft.config.compose import compose
from rlft.data.reasoning_gym import ReasoningGym as Data
from rlft.reward.reasoning_gym import score
from rlft.reward.workers.scorer import Scorer, specs
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Split, UserError

pytestmark = pytest.mark.usefixtures("gym_here")


def load(task, **options):
    keys = {"size": 4, "held_out_size": 1, "seed": 0, "system_prompt": None, "prompt_template": "{question}"}
    return Data(task=task, options=options, **keys).load(Split.train)


def group(prompt, *texts):
    completions = [Completion(text=t, token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.stop) for t in texts]
    rollouts = tuple(Rollout(prompt=prompt, completion=c, policy_version=0) for c in completions)
    return Group(prompt=prompt, rollouts=rollouts)


@pytest.fixture
def reward():
    return specs(compose(["reward=reasoning_gym"])["reward"])["reasoning_gym"].build()


@pytest.mark.parametrize("task", ["chain_sum", "gsm_symbolic", "countdown", "spell_backward"])
def test_the_reference_answer_is_right_and_no_answer_is_worth_nothing(reward, task):
    for prompt in load(task):
        right = f"<think>so</think><answer> {prompt.answer} </answer>"
        assert reward(group(prompt, right, "no tags", f"{prompt.answer}", "")) == [1.0, 0.0, 0.0, 0.0]


def test_a_verifier_accepts_another_right_answer_than_the_reference(reward):
    # countdown asks for any expression over the numbers that reaches the target; white space makes it another text.
    prompt = load("countdown")[0]
    other = f"<answer>(({prompt.answer}))</answer>"
    assert reward(group(prompt, other)) == [1.0]


def test_an_answer_of_thousands_of_characters_is_scored(reward):
    # Seven disks take at least 2 ** 7 - 1 = 127 moves of some 30 characters.
    prompt = max(load("tower_of_hanoi", min_disks=7, max_disks=9, min_pegs=3, max_pegs=4), key=lambda p: len(p.answer))
    assert len(prompt.answer) > 3500
    assert reward(group(prompt, f"<answer>{prompt.answer}</answer>")) == [1.0]


def test_options_reach_the_verifier(reward):
    assert reward(group(load("chain_sum", min_terms=2, max_terms=2)[0], "<answer>x</answer>"))[0] < 1.0


def test_a_worker_process_can_score():
    prompt = load("gsm_symbolic")[0]  # its metadata hold fractions
    with closing(Scorer(specs(compose(["reward=reasoning_gym"])["reward"]), 1, 120.0, "stop")) as scorer:
        assert scorer([group(prompt, f"<answer>{prompt.answer}</answer>")]).total.tolist() == [[1.0]]


class Verifier:
    """Raises for answers that are not numbers, and for entries without an answer."""

    def score_answer(self, answer, entry):
        return float(int(answer) == int(entry["answer"]))


def test_an_answer_that_the_verifier_cannot_parse_is_wrong():
    assert score(Verifier(), "3", {"answer": "3"}) == 1.0
    assert score(Verifier(), "three", {"answer": "3"}) == 0.0
    assert score(Verifier(), None, {"answer": "3"}) == 0.0


def test_a_verifier_that_fails_on_its_own_answer_is_told():
    with pytest.raises(TypeError):
        score(Verifier(), "three", {"answer": None})


def test_other_data_are_refused(reward):
    with pytest.raises(UserError, match="set data=reasoning_gym"):
        reward(group(Prompt(id="a", messages=({"role": "user", "content": "?"},), answer="1"), "<answer>1</answer>"))
