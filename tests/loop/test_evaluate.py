from __future__ import annotations

import math

import pytest
import torch

from rlft.generation.scripted import ScriptedGenerator
from rlft.loop.metrics import evaluate, kl_to_base, mean_and_error, summarise
from rlft.system.seeds import sampling_seeds
from rlft.types import Sampling, Scores

SAMPLING = Sampling(max_tokens=10, temperature=1.0)


@pytest.fixture
def groups(backbone, make_prompt):
    """Two prompts, four completions each: every other one is cut at 4 tokens."""
    generator = ScriptedGenerator({"*": ["ok", "nonsense"]}, backbone.tokenizer)
    sampling = Sampling(max_tokens=4, temperature=1.0)
    return generator.sample([make_prompt("1+1=?"), make_prompt("2+2=?")], 4, [0, 0], sampling)


def scores(**by_reward):
    values = {name: torch.tensor(rows) for name, rows in by_reward.items()}
    return Scores(total=sum(values.values()), by_reward=values)


def test_accuracy_and_pass_at_k_are_the_numbers_one_gets_by_hand(groups):
    # Right: 1 of 4 and 4 of 4. mean@4 = (1/4 + 1) / 2 = 5/8; the two differ by 3/4, so their standard deviation is
    # 3/4 / sqrt 2 and the standard error 3/8. pass@2 of the first: 1 - C(3,2)/C(4,2) = 1 - 3/6 = 1/2; mean 3/4,
    # error 1/4.
    measured = summarise(groups, scores(math=[[0.0, 1.0, 0.0, 0.0], [1.0] * 4]), step=3, correct_at=1.0, num_examples=1)
    assert (measured.step, measured.accuracy, measured.accuracy_se) == (3, 5 / 8, 3 / 8)
    expected = {
        "eval/math": 5 / 8,
        "eval/math_se": 3 / 8,
        "eval/pass@1": 5 / 8,
        "eval/pass@1_se": 3 / 8,
        "eval/pass@2": 3 / 4,
        "eval/pass@2_se": 1 / 4,
        "eval/pass@4": 1.0,
        "eval/pass@4_se": 0.0,
        "eval/reward/math": 5 / 8,
    }
    found = {name: value for name, value in measured.metrics.items() if "length" not in name}
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_first_reward_decides_what_is_right_and_by_its_threshold(groups):
    values = scores(math=[[0.4, 0.5, 0.6, 0.0], [0.0] * 4], style=[[1.0] * 4, [1.0] * 4])
    measured = summarise(groups, values, step=0, correct_at=0.5, num_examples=2)
    assert measured.accuracy == 2 / 8
    assert measured.metrics["eval/reward/style"] == 1.0
    assert measured.metrics["eval/reward/math"] == pytest.approx(1.5 / 8)


def test_examples_are_the_first_completion_of_the_first_prompts_with_their_reward(groups):
    measured = summarise(groups, scores(math=[[0.5, 1, 1, 1], [0.25, 1, 1, 1]]), step=0, correct_at=1, num_examples=2)
    assert measured.examples == (groups[0].rollouts[0], groups[1].rollouts[0])
    assert measured.example_scores == (0.5, 0.25)
    none = summarise(groups, scores(math=[[1.0] * 4] * 2), step=0, correct_at=1, num_examples=0)
    assert (none.examples, none.example_scores) == ((), ())
    more = summarise(groups, scores(math=[[1.0] * 4] * 2), step=0, correct_at=1, num_examples=9)
    assert len(more.examples) == len(more.example_scores) == 2


def test_lengths_are_counted_in_tokens(groups):
    lengths = [len(r.completion.token_ids) for g in groups for r in g.rollouts]
    assert lengths == [3, 4] * 4  # "ok" and the end token; "nonsense" cut at 4
    measured = summarise(groups, scores(math=[[0.0] * 4] * 2), step=0, correct_at=1, num_examples=0)
    assert measured.metrics["eval/length/mean"] == 3.5
    assert measured.metrics["eval/length/truncated_fraction"] == 0.5


def test_the_standard_error_is_that_of_the_mean_over_prompts():
    # 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, variance 14/3, error sqrt(14/3/4).
    assert mean_and_error([1, 2, 3, 6]) == (3, pytest.approx(math.sqrt(14 / 12), abs=1e-12))
    assert mean_and_error([0.7]) == (0.7, 0.0)
    assert mean_and_error([0.5] * 5) == (0.5, 0.0)


def test_the_same_prompts_and_seeds_are_drawn_at_every_step(backbone, make_prompt):
    generator, asked = ScriptedGenerator({"*": ["a", "b"]}, backbone.tokenizer), []
    sample = generator.sample

    def watched(prompts, n, seeds, sampling):
        asked.append((tuple(p.id for p in prompts), n, tuple(seeds), sampling))
        return sample(prompts, n, seeds, sampling)

    generator.sample = watched
    prompts = [make_prompt("1+1=?"), make_prompt("2+2=?")]

    def right_when_a(groups):
        return scores(is_a=[[float(r.completion.text == "a") for r in g.rollouts] for g in groups])

    results = [
        evaluate(
            generator, right_when_a, prompts, step=step, seed=5, num_samples=2, sampling=SAMPLING, correct_at=1.0,
            num_examples=1,
        )
        for step in (0, 10)
    ]  # fmt: skip
    assert asked[0] == asked[1] == (("1+1=?", "2+2=?"), 2, tuple(sampling_seeds(5, 0, 2, 2, "evaluate")), SAMPLING)
    for evaluation, groups, found in results:
        assert evaluation.accuracy == 0.5  # of two neighbouring seeds one says "a"
        assert found.by_reward["is_a"].shape == (2, 2)
        assert len(groups) == 2
    assert [evaluation.step for evaluation, _, _ in results] == [0, 10]


def test_the_kl_to_the_base_is_that_of_the_completions_tokens(make_roles, make_batch):
    rows = [(0, [5, 6, 7], [20, 21]), (1, [9, 8], [22, 23, 24])]
    batch = make_batch(rows)
    assert kl_to_base(make_roles(), batch) == 0  # a fresh adapter changes nothing
    roles = make_roles(noise=0.05)
    # exp(-d) - 1 + d with d = log pi - log base, one row at a time, over the five completion tokens.
    gaps = []
    for _, prompt, completion in rows:
        sequence = [*prompt, *completion]
        [policy] = roles.score([sequence])
        with torch.no_grad(), roles.using(None) as base:
            logits = base(input_ids=torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        reference = logits.gather(-1, torch.tensor(sequence)[1:, None])[:, 0].tolist()
        pairs = list(zip(policy, reference, strict=True))[len(prompt) - 1 :]
        gaps += [math.exp(q - p) - 1 + p - q for p, q in pairs]
    assert len(gaps) == 5
    assert sum(gaps) / 5 > 1e-3
    assert kl_to_base(roles, batch) == pytest.approx(sum(gaps) / 5, rel=1e-4)
