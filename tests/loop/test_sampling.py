"""Dynamic sampling: which groups are replaced, by what, at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rlft.generation.scripted import ScriptedGenerator
from rlft.loop.metrics import Clock
from rlft.loop.sampling import StepSampler, replace_uninformative_groups, replaced
from rlft.types import (
    Group,
    Prompt,
    Scores,
    StepScores,
)

SIZE = 4
RIGHT, WRONG, MIXED = ["right"], ["wrong"], ["right", "wrong"]


class Bench(StepSampler):
    """A scripted generator and a reward; and a list of what was sampled.

    Prompts that `answers` does not name are mixed. The first reward is 1 for the text "right", the second one the
    length in characters; where `steps`, a process reward gives each word a score of its own.
    """

    def __init__(self, config, prompts: Sequence[Prompt], answers, tokenizer, *, steps=False) -> None:
        super().__init__(ScriptedGenerator({"*": MIXED} | answers, tokenizer), prompts, config)
        self.steps = steps
        self.sampled: list[list[str]] = []

    def sample_prompts(self, prompts, step, purpose):
        self.sampled.append([prompt.id for prompt in prompts])
        return super().sample_prompts(prompts, step, purpose)

    def give(self, groups: Sequence[Group]) -> Scores:
        texts = [[rollout.completion.text for rollout in group.rollouts] for group in groups]
        right = torch.tensor([[float(text == "right") for text in row] for row in texts])
        length = torch.tensor([[float(len(text)) for text in row] for row in texts])
        steps = [[StepScores(values=(length[p, g].item(),), ends=(5,)) for g in range(SIZE)] for p in range(len(texts))]
        if not self.steps:
            return Scores(total=right + length, by_reward={"math": right, "length": length})
        named = {"math": right, "length": length}
        # Each group can be told from every other one by its prompt's number.
        number = torch.tensor([[float(group.prompt.answer)] * SIZE for group in groups])
        return Scores(total=right + length + number, by_reward=named, outcome=right + number, steps=steps)

    def run(self, step=0):
        """The step's rollouts and the stages that the clock was told."""
        told: list[str] = []
        self.sampled.clear()
        groups = self.sample(step)
        return replace_uninformative_groups(self, self.give, step, Clock(told.append), groups, self.give(groups)), told


@pytest.fixture
def prompts(make_prompt):
    return [make_prompt(f"{i}+0=?", str(i)) for i in range(12)]


@pytest.fixture
def bench(run_config, prompts, backbone):
    """Builds the bench; three prompts a step of four completions, and `rounds` of resampling."""

    def build(answers, *, rounds=1, num_prompts=12, correct_at=1.0, seed=0, steps=False):
        config = run_config("prompts_per_step=3", f"group_size={SIZE}", f"dynamic_sampling.max_rounds={rounds}")
        config = replace(config, eval=replace(config.eval, correct_at=correct_at), seed=seed)
        return Bench(config, prompts[:num_prompts], answers, backbone.tokenizer, steps=steps)

    return build


def texts(group):
    return [rollout.completion.text for rollout in group.rollouts]


def ids(rollouts):
    return [group.prompt.id for group in rollouts.groups]


def first_prompts(bench):
    """The three prompts that step 0 begins with, and all others."""
    chosen = [prompt.id for prompt in bench({}).prompts_at(0)]
    return chosen, [f"{i}+0=?" for i in range(12) if f"{i}+0=?" not in chosen]


def test_a_group_that_is_all_right_or_all_wrong_is_replaced_in_its_place(bench):
    (a, b, c), others = first_prompts(bench)
    subject = bench({a: RIGHT, c: WRONG})
    rollouts, told = subject.run()
    (first, new) = subject.sampled
    assert first == [a, b, c]
    assert len(new) == 2
    assert set(new) <= set(others)
    assert ids(rollouts) == [new[0], b, new[1]]
    assert all(sorted(texts(group)) == ["right", "right", "wrong", "wrong"] for group in rollouts.groups)
    assert told == ["sample", "score"]
    # 3 groups, then 2, of 4 completions.
    assert rollouts.num_sampled == 12 + 8


def test_scores_go_with_their_groups(bench):
    (a, _, c), _ = first_prompts(bench)
    for steps in (False, True):
        subject = bench({a: RIGHT, c: WRONG}, steps=steps)
        rollouts, _ = subject.run()
        expected = subject.give(rollouts.groups)
        assert torch.equal(rollouts.scores.total, expected.total)
        assert {n: v.tolist() for n, v in rollouts.scores.by_reward.items()} == {
            n: v.tolist() for n, v in expected.by_reward.items()
        }
        assert (rollouts.scores.outcome is None) == (not steps)
        assert rollouts.scores.steps == expected.steps
        if steps:
            assert rollouts.scores.outcome is not None
            assert torch.equal(rollouts.scores.outcome, expected.outcome)


def test_nothing_is_sampled_again_when_every_group_informs_or_it_is_switched_off(bench):
    (a, b, c), _ = first_prompts(bench)
    for subject in (bench({}, rounds=5), bench({a: RIGHT, b: WRONG}, rounds=0)):
        rollouts, told = subject.run()
        assert (ids(rollouts), subject.sampled, told) == ([a, b, c], [[a, b, c]], [])
        assert rollouts.num_sampled == 12


def test_fresh_groups_that_teach_nothing_either_are_left_out_and_the_place_waits_for_the_next_round(bench):
    (a, b, c), others = first_prompts(bench)
    # Of the fresh prompts every second one, by number, is all wrong.
    lost = others[::2]
    answers = {a: RIGHT, b: WRONG, c: WRONG} | dict.fromkeys(lost, WRONG)
    subject = bench(answers, rounds=12)
    rollouts, told = subject.run()
    assert told == ["sample", "score"] * (len(subject.sampled) - 1)
    # Each round asks for as many as are still to be replaced, and they fill the places from the first one on.
    lacking, unused, filled = 3, 9, []
    for new in subject.sampled[1:]:
        assert len(new) == min(lacking, unused)
        informing = [name for name in new if name not in lost]
        lacking, unused, filled = lacking - len(informing), unused - len(new), filled + informing
    assert len(subject.sampled) > 2  # some were left out
    assert ids(rollouts) == filled
    assert rollouts.num_sampled == 4 * sum(map(len, subject.sampled))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_are_bounded_and_what_is_left_stays_as_it_is(rounds, bench):
    (a, b, c), _ = first_prompts(bench)
    subject = bench({"*": WRONG, b: MIXED}, rounds=rounds)
    rollouts, told = subject.run()
    assert ids(rollouts) == [a, b, c]
    assert list(map(len, subject.sampled)) == [3] + [2] * rounds
    assert told == ["sample", "score"] * rounds
    assert rollouts.num_sampled == 4 * (3 + 2 * rounds)
    assert rollouts.scores.by_reward["math"].sum(1).tolist() == [0, 2, 0]


def test_no_prompt_is_sampled_twice_in_a_step_and_a_step_ends_when_none_is_left(bench):
    # 12 prompts that all teach nothing: 3, then 3 a round, so after three rounds there is none.
    subject = bench({"*": WRONG}, rounds=10)
    rollouts, _ = subject.run()
    assert list(map(len, subject.sampled)) == [3, 3, 3, 3]
    assert len({name for names in subject.sampled for name in names}) == 12
    assert rollouts.num_sampled == 4 * 12
    # With 8 prompts the last round has two of them for three places.
    subject = bench({"*": RIGHT}, rounds=10, num_prompts=8)
    subject.run()
    assert list(map(len, subject.sampled)) == [3, 3, 2]


def test_a_step_that_is_repeated_samples_the_same_and_every_step_and_seed_its_own(bench):
    def trace(step, seed=0):
        subject = bench({"*": WRONG}, rounds=3, seed=seed)
        subject.run(step)
        return subject.sampled[1:]

    assert trace(5) == trace(5)
    assert trace(5) != trace(6)
    assert trace(5) != trace(5, seed=1)


def test_each_round_draws_its_completions_with_seeds_of_its_own(bench):
    subject = bench({"*": WRONG}, rounds=2)
    asked, sample = [], subject.generator.sample

    def watched(prompts, n, seeds, sampling):
        asked.append(seeds)
        return sample(prompts, n, seeds, sampling)

    subject.generator.sample = watched
    subject.run(3)
    used = [seed + i for seeds in asked for seed in seeds for i in range(SIZE)]
    assert len(used) == len(set(used)) == 4 * (3 + 3 + 3)
    again, asked[:] = list(asked), []
    subject.run(3)
    assert asked == again


def test_right_and_wrong_are_by_the_first_reward_and_its_threshold(bench):
    (a, b, c), _ = first_prompts(bench)
    # All of `a` is right although lengths differ by a letter, and `b` is mixed although lengths agree.
    subject = bench({a: RIGHT, b: ["right", "wrong"], c: ["right", "wrongly"]}, rounds=1)
    assert subject.run()[0].groups[0].prompt.id != a
    assert subject.sampled[0] == [a, b, c]
    assert len(subject.sampled[1]) == 1
    # Where 0 is right, everything is.
    subject = bench({}, rounds=1, correct_at=0.0)
    subject.run()
    assert list(map(len, subject.sampled)) == [3, 3]


@pytest.mark.parametrize("rewarded", ["old", "new", "both"])
def test_groups_without_rewards_of_turns_replace_such_with_them_and_the_other_way_round(rewarded):
    def scores_of(values, turns):
        whole = torch.tensor([[float(v)] for v in values])
        if not turns:
            return Scores(total=whole, by_reward={"math": whole})
        earned = whole / 8
        return Scores(total=whole + earned, by_reward={"math": whole, "turns": earned}, outcome=whole)

    mixed = replaced(scores_of([1, 2, 3], rewarded != "new"), [2, 0], scores_of([4, 5], rewarded != "old"), [1, 0])
    assert mixed.outcome is not None
    assert mixed.outcome.tolist() == mixed.by_reward["math"].tolist() == [[4], [2], [5]]
    old, new = (rewarded != "new") / 8, (rewarded != "old") / 8
    assert mixed.by_reward["turns"].tolist() == [[4 * new], [2 * old], [5 * new]]
    assert torch.equal(mixed.total, mixed.outcome + mixed.by_reward["turns"])


def test_answers_are_replaced_with_their_groups():
    ones = torch.ones(2, 1)
    old, new = (
        Scores(total=ones, by_reward={"math": ones}, answers={"math": [[f"{text}0"], [f"{text}1"]]})
        for text in ("old", "new")
    )
    assert replaced(old, [0], new, [1]).answers == {"math": [["new1"], ["old1"]]}
    assert replaced(old, [], new, []).answers == old.answers


def test_the_weights_of_both_sides_stay_known():
    one = torch.ones(1, 1)
    old = Scores(total=one, by_reward={"math": one}, weights={"math": 2.0})
    new = Scores(total=one, by_reward={"math": one, "format": one}, weights={"math": 2.0, "format": 0.5})
    assert replaced(old, [0], new, [0]).weights == {"math": 2.0, "format": 0.5}
