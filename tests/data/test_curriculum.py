"""Prompts chosen by how often they are solved: the draws, the weights, what is left out, and files of pass rates."""

import json
from itertools import islice

import numpy as np
import pytest
from slow_cases import slow

from rlft.config.schema import CurriculumConfig
from rlft.data.curriculum import Curriculum, drawn, read_pass_rates
from rlft.types import Prompt, UserError

SETTINGS = {
    "running": True, "path": None, "weight": "variance", "above": None, "below": None, "replay": 0.0, "memory": 1.0,
}  # fmt: skip


def curriculum(right, wrong, seed=0, **changed):
    return Curriculum(CurriculumConfig(**SETTINGS | changed), np.array(right, float), np.array(wrong, float), seed)


# -- draws -------------------------------------------------------------------------------------------------------------
def test_each_index_of_a_positive_weight_is_drawn_once():
    weights = np.random.RandomState(0).random_sample(1000)
    weights[::3] = 0
    assert sorted(drawn(weights, 5)) == np.flatnonzero(weights).tolist()
    assert list(drawn(np.zeros(4), 5)) == []
    # One weight takes nearly all draws of each sum: the others come all the same.
    assert sorted(drawn(np.array([1e12, 1.0, 1e-3, 0.0]), 5)) == [0, 1, 2]


@pytest.mark.parametrize("number", [2000, slow(20_000)])
def test_each_next_index_is_drawn_by_weight_from_those_that_are_left(number):
    first, second = np.zeros(3), np.zeros((3, 3))
    for seed in range(number):
        one, other = islice(drawn(np.array([1.0, 2.0, 7.0]), seed), 2)
        first[one] += 1
        second[one, other] += 1
    # P(first) = 0.1, 0.2, 0.7; then P(2, 1) = 0.7 * 2 / 3. Four standard errors, which are at most 0.5 / sqrt(number).
    bound = 2 / number**0.5
    assert first / number == pytest.approx([0.1, 0.2, 0.7], abs=bound)
    assert second[2, 1] / number == pytest.approx(0.7 * 2 / 3, abs=bound)


def test_all_machines_draw_the_same():
    assert list(drawn(np.arange(1.0, 9.0), 2**40 + 7)) == [6, 7, 5, 2, 4, 3, 1, 0]


# -- weights and bounds ------------------------------------------------------------------------------------------------
def test_the_weight_is_the_mean_of_p_times_1_minus_p_over_the_posterior():
    weights = curriculum([0, 4, 0, 8], [0, 4, 8, 0])._weights()
    # Beta(1, 1): 1 / (2 * 3). Beta(5, 5): 25 / (10 * 11). Beta(1, 9) and Beta(9, 1): 9 / (10 * 11).
    assert weights.tolist() == [1 / 6, 25 / 110, 9 / 110, 9 / 110]
    assert curriculum([0, 4], [0, 4], weight="uniform")._weights().tolist() == [1, 1]


def test_prompts_out_of_bounds_are_left_out_and_unknown_ones_are_not():
    right, wrong = [0, 0, 1, 8, 7, 0.0, 0.4], [8, 0, 7, 0, 1, 0.9, 0.6]
    assert curriculum(right, wrong).left_out().tolist() == [False] * 7
    assert np.flatnonzero(curriculum(right, wrong, above=0.0).left_out()).tolist() == [0]
    assert np.flatnonzero(curriculum(right, wrong, below=1.0).left_out()).tolist() == [3]
    assert np.flatnonzero(curriculum(right, wrong, above=0.125, below=0.875).left_out()).tolist() == [0, 2, 3, 4]
    chosen = curriculum(right, wrong, above=0.125, below=0.875)
    assert set(chosen.of_step(0, 3)) == {1, 5, 6}
    # A step that takes more is filled with those that are left out.
    assert set(chosen.of_step(1, 7)) == set(range(7))
    assert set(chosen.of_step(2, 5)) > {1, 5, 6}


def test_what_was_counted_fades_until_a_prompt_is_unknown_again():
    chosen = curriculum([0] * 4, [0] * 4, memory=0.5, above=0.0)
    chosen.of_step(0, 2)
    chosen.count([2], [0], 8)
    left_out = []
    for step in range(1, 5):
        chosen.of_step(step, 2)
        left_out.append(bool(chosen.left_out()[2]))
    # 8 wrong ones are 4, 2, 1 and 0.5.
    assert left_out == [True, True, True, False]
    fixed = curriculum([0] * 4, [8] * 4, memory=0.5, running=False)
    fixed.of_step(0, 2)
    fixed.count([2], [8], 8)
    assert (fixed.right.tolist(), fixed.wrong.tolist()) == ([0] * 4, [8] * 4)


# -- steps -------------------------------------------------------------------------------------------------------------
def test_a_step_is_chosen_once_and_by_what_was_counted_before():
    chosen = curriculum([0] * 64, [0] * 64, memory=0.5)
    first = chosen.of_step(0, 8)
    assert len(set(first)) == 8
    chosen.count(first, [8] * 8, 8)
    assert chosen.of_step(0, 8) == first
    assert chosen.right[first].tolist() == [8] * 8, "choosing the same step again must not fade the counts"
    assert curriculum([0] * 64, [0] * 64).of_step(0, 8) == first
    assert curriculum([0] * 64, [0] * 64, seed=1).of_step(0, 8) != first
    assert chosen.of_step(1, 8) != first
    assert chosen.right[first].tolist() == [4] * 8


def test_a_prompt_that_occurs_twice_in_a_step_is_counted_twice():
    chosen = curriculum([0] * 2, [0] * 2)
    chosen.count([1, 1], [3, 1], 4)
    assert (chosen.right.tolist(), chosen.wrong.tolist()) == ([0, 4], [0, 4])


def test_a_share_of_a_step_is_drawn_from_those_solved_before():
    right = [1.0 if i % 8 == 0 else 0.0 for i in range(256)]
    wrong = [8 - r for r in right]

    def solved(replay):
        chosen = curriculum(right, wrong, replay=replay)
        return [sum(index % 8 == 0 for index in chosen.of_step(step, 32)) for step in range(8)]

    # 0.55 of 32 are 17 for certain, and others are drawn with all the rest, of which an eighth or fewer are solved.
    assert min(solved(0.55)) >= 17
    assert max(solved(0.0)) < 17
    # All 32 that are solved; never one that was not, and never one twice.
    assert solved(1.0) == [32] * 8
    assert all(len(set(curriculum(right, wrong, replay=1.0).of_step(step, 40))) == 40 for step in range(4))


def test_it_goes_on_from_a_checkpoint():
    straight, until = curriculum([0] * 64, [0] * 64, memory=0.9, replay=0.5), 3
    groups = [[int(n) for n in np.random.RandomState(step).randint(0, 5, 8)] for step in range(6)]

    def go(chosen, start, stop):
        steps = []
        for step in range(start, stop):
            steps.append(chosen.of_step(step, 8))
            chosen.of_step(step + 1, 8)  # a step ahead
            chosen.count(steps[-1], groups[step], 4)
        return steps

    go(straight, 0, until)
    arrays, values = straight.state(until)
    assert [step for step, _ in values["chosen"]] == [until]
    values = json.loads(json.dumps(values))
    resumed = curriculum([7] * 64, [1] * 64, memory=0.9, replay=0.5)
    resumed.restore(arrays, values, 8)
    assert go(resumed, until, 6) == go(straight, until, 6)
    for now, then in zip(resumed.state(6)[0].values(), straight.state(6)[0].values(), strict=True):
        assert now.tolist() == then.tolist()
    assert resumed.state(6)[1] == straight.state(6)[1]


def test_a_fork_with_another_seed_or_size_chooses_its_steps_itself():
    source = curriculum([1] * 64, [1] * 64)
    source.of_step(3, 8)
    for seed, number in ((1, 8), (0, 4)):
        fork = curriculum([0] * 64, [0] * 64, seed=seed)
        fork.restore(*source.state(3), number)
        assert fork.right.tolist() == [1] * 64
        assert fork.of_step(3, number) == curriculum([1] * 64, [1] * 64, seed=seed).of_step(3, number)


# -- files -------------------------------------------------------------------------------------------------------------
PROMPTS = [Prompt(id=f"p{i}", messages=({"role": "user", "content": f"What is {i}?"},), answer="") for i in range(4)]


@pytest.fixture
def write(tmp_path):
    """Writes completions, {prompt: rewards}, as `rlft sample` does, and returns the file's path."""

    def written(completions, **changed):
        lines = [
            {
                "prompt_id": f"p{i}", "prompt": [dict(m) for m in PROMPTS[i].messages], "completion": "", "answer": "",
                "tokenizer": "x", "rewards": {"math": score, "format": 1.0},
            } | changed
            for i, scores in completions.items() for score in scores
        ]  # fmt: skip
        file = tmp_path / "samples.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(file)

    return written


def test_a_file_of_samples_gives_pass_rates(write):
    # A reward that was not finite is none.
    known = read_pass_rates(write({0: [1, 0.5], 2: [0.25, None], 1: [1, 1]}), "math", 0.5, PROMPTS)
    assert (known.right.tolist(), known.wrong.tolist()) == ([2, 2, 0, 0], [0, 0, 2, 0])
    same = read_pass_rates(write({1: [1, 1], 0: [0.5, 1], 2: [None, 0]}), "math", 0.5, PROMPTS)
    assert same.fingerprint == known.fingerprint
    other = read_pass_rates(write({0: [1, 0], 2: [0, 0], 1: [1, 1]}), "math", 0.5, PROMPTS)
    assert other.fingerprint != same.fingerprint


def test_what_is_in_a_conversation_is_known_by_its_id(write):
    opened = [{"role": "user", "content": "What is 0? The board is empty."}]
    assert read_pass_rates(write({0: [1]}, mask=[1], prompt=opened), "math", 1, PROMPTS).right.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("rewards", "changed", "fragment"), [
    ({0: [1, 0], 1: [1]}, {}, r"has 1 to 2 completions of a prompt.*; sample with dedupe=false keep=all"),
    ({0: [1]}, {"prompt_id": "q"}, r"has none of the training prompts, got"),
    ({0: [1]}, {"prompt": [{"role": "user", "content": "What is 1?"}]}, r"prompt p0 has another text"),
    ({0: [1]}, {"rewards": {"format": 1}}, r":1 is no line of rlft sample with the reward math"),
    ({0: [1]}, {"rewards": None}, r":1 is no line of rlft sample with the reward math"),
    ({0: [1]}, {"prompt": "What is 0?"}, r":1 is no line of rlft sample with the reward math"),
    ({}, {}, r"has none of the training prompts"),
])  # fmt: skip
def test_other_files_are_refused(write, rewards, changed, fragment):
    with pytest.raises(UserError, match=f"curriculum.path: .*{fragment}"):
        read_pass_rates(write(rewards, **changed), "math", 1, PROMPTS)
