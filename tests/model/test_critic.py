"""The unit of values: running statistics of returns, and a head that is rescaled with them (PopArt)."""

import json
import math

import pytest
import torch
from in_one_test import each

from rlft.model.critic import CRITIC, Critic, ReturnStatistics, ScalarHead

MASK = torch.tensor([[False, True, True], [True, False, False]])


def returns(*values):
    """`[2, 3]` float64: these under MASK (three of them), and nonsense elsewhere."""
    tensor = torch.full((2, 3), math.nan, dtype=torch.float64)
    tensor[MASK] = torch.tensor(values, dtype=torch.float64)
    return tensor


def critic(dtype=torch.float64, normalize=True, seed=0):
    """A critic whose head says something, and hidden states `[2, 3, 4]` to say it of."""
    generator = torch.Generator().manual_seed(seed)
    head = ScalarHead(4, torch.device("cpu"), dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    hidden = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).to(dtype)
    return Critic(CRITIC, head, normalize), hidden


def close(found, expected, tolerance):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# -- statistics ------------------------------------------------------------------------------------------------------
def test_two_steps_statistics_are_those_of_their_average_moments():
    # Means 3 and 6, mean squares 41/3 and 36 + 2/3 * 4 = 116/3: averages 9/2 and 157/6; variance 157/6 - 81/4 = 71/12.
    # (Steps count alike, however many tokens each has.)
    seen = ReturnStatistics().seen(returns(1, 2, 6), MASK).seen(returns(4, 6, 8), MASK)
    assert (seen.mean, seen.num_steps) == (pytest.approx(9 / 2, abs=1e-14), 2)
    assert seen.variance == pytest.approx(71 / 12, abs=1e-13)


def test_after_a_hundred_steps_each_new_one_counts_for_a_hundredth():
    # 100 steps of -1, 0, 1 (mean 0, mean square 2/3) by plain averages; then one of 5, 5, 5: 0.01 of (5, 25).
    seen = ReturnStatistics()
    for _ in range(100):
        seen = seen.seen(returns(-1, 0, 1), MASK)
    assert (seen.mean, seen.variance) == (pytest.approx(0, abs=1e-12), pytest.approx(2 / 3, abs=1e-12))
    seen = seen.seen(returns(5, 5, 5), MASK)
    assert seen.mean == pytest.approx(0.05, abs=1e-12)
    assert seen.variance == pytest.approx(0.99 * 2 / 3 + 0.25 - 0.05**2, abs=1e-12)
    # And so does the next, of 0, 0, 0: no longer a plain average.
    seen = seen.seen(returns(0, 0, 0), MASK)
    assert seen.mean == pytest.approx(0.99 * 0.05, abs=1e-12)
    assert seen.num_steps == 102


def test_variances_are_summed_in_float64_and_never_negative():
    # 1e4 +- 0.5 in float32: squares need 27 bits. Mean 1e4, variance 2/3 * 0.25.
    seen = ReturnStatistics().seen(returns(1e4 - 0.5, 1e4, 1e4 + 0.5).float(), MASK)
    assert seen.variance == pytest.approx(0.5 / 3, abs=1e-6)
    seen = ReturnStatistics()
    for _ in range(30):
        seen = seen.seen(returns(0.1, 0.1, 0.1), MASK)
        assert 0 <= seen.variance < 1e-15
        assert seen.std == 1e-4
    assert seen.seen(torch.full((2, 3), math.nan), torch.zeros(2, 3, dtype=torch.bool)) == seen, "no token, no step"


# -- the head goes with them -----------------------------------------------------------------------------------------
@each(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_no_value_changes_when_the_statistics_move(dtype, tolerance):
    subject, hidden = critic(dtype)
    values = subject.values(subject.head(hidden), MASK)
    parameters = [id(p) for p in subject.head.parameters()]
    assert values[MASK].abs().min() > 0.1
    for step in ((1, 2, 6), (-4, 6, 8), (0.5, 0.25, 0.125), (30, 10, -20)):
        before = subject.statistics
        subject.observe(returns(*step), MASK)
        assert subject.statistics != before
        close(subject.values(subject.head(hidden), MASK), values, tolerance)
    # An optimizer holds on to what the head is made of.
    assert [id(p) for p in subject.head.parameters()] == parameters
    assert all(p.requires_grad and p.grad is None and p.is_leaf for p in subject.head.parameters())


def test_the_head_learns_returns_in_units_of_their_statistics():
    # 1, 2, 6 have mean 3 and standard deviation s = sqrt(14/3): of a head that said x, (x - 3) / s.
    subject, hidden = critic()
    said = subject.head(hidden)
    subject.observe(returns(1, 2, 6), MASK)
    close(subject.head(hidden), (said - 3) / math.sqrt(14 / 3), 1e-13)
    assert subject.value_scale == pytest.approx(math.sqrt(14 / 3), abs=1e-13)


def test_a_fresh_critic_says_0_also_after_its_first_statistics():
    subject = Critic(CRITIC, ScalarHead(4, torch.device("cpu"), torch.float64), True)
    subject.observe(returns(1, 2, 6), MASK)
    assert subject.head.bias.item() == pytest.approx(-3 / math.sqrt(14 / 3), abs=1e-13)
    close(subject.values(subject.head(torch.randn(2, 3, 4).double()), MASK), torch.zeros(2, 3).double(), 1e-14)


def test_without_normalisation_nothing_moves_and_values_are_the_heads_own_numbers():
    subject, hidden = critic(normalize=False)
    weights = subject.head.weights()
    subject.observe(returns(1, 2, 6), MASK)
    assert (subject.statistics, subject.value_scale) == (ReturnStatistics(), 1.0)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in subject.head.weights().items())
    assert torch.equal(subject.values(subject.head(hidden), MASK), subject.head(hidden).where(MASK, 0.0))


# -- checkpoints -----------------------------------------------------------------------------------------------------
def test_a_critic_restored_from_json_goes_on_exactly():
    steps = ((1, 2, 6), (-4, 6, 8), (0.1, 0.2, 0.3))
    whole, hidden = critic()
    for step in steps:
        whole.observe(returns(*step), MASK)
    first, _ = critic()
    for step in steps[:2]:
        first.observe(returns(*step), MASK)
    saved, weights = json.loads(json.dumps(first.state())), first.head.weights()

    second, _ = critic(seed=5)
    second.head.load_state_dict(weights)
    second.restore_statistics(saved)
    assert second.statistics == first.statistics
    second.observe(returns(*steps[2]), MASK)
    assert second.statistics == whole.statistics
    assert torch.equal(second.values(second.head(hidden), MASK), whole.values(whole.head(hidden), MASK))


CPU = torch.device("cpu")


def test_a_head_is_a_weighted_sum_plus_a_bias_keeps_the_leading_shape_and_computes_in_float32_at_least():
    head = ScalarHead(2, CPU, torch.float64)
    head.load_state_dict({"weight": torch.tensor([[2.0, -3.0]]), "bias": torch.tensor([0.5])})
    hidden = torch.tensor([[[1.0, 1.0], [0.0, 2.0], [-1.0, 0.25]]], dtype=torch.float64)
    # 2 - 3 + 0.5; -6 + 0.5; -2 - 0.75 + 0.5.
    assert head(hidden).tolist() == [[-0.5, -5.5, -2.25]]
    for base in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        made = ScalarHead(2, CPU, base)
        at_least = torch.promote_types(base, torch.float32)
        assert {p.dtype for p in made.parameters()} == {made(torch.ones(4, 2, dtype=base)).dtype} == {at_least}
    # 1 + 2^-12 times 256 is 256 + 2^-4, which bfloat16 (8 bits) would round to 256.
    head = ScalarHead(1, CPU, torch.bfloat16)
    head.load_state_dict({"weight": torch.tensor([[1 + 2**-12]]), "bias": torch.tensor([0.0])})
    assert head(torch.tensor([[256.0]], dtype=torch.bfloat16)).item() == 256 + 2**-4


def test_weights_are_copies_and_come_back_exactly():
    head = critic()[0].head
    kept, parameters = head.weights(), [id(p) for p in head.parameters()]
    before = {name: tensor.clone() for name, tensor in kept.items()}
    with torch.no_grad():
        head.weight.add_(1)
    assert not any(tensor.requires_grad for tensor in kept.values())
    assert all(torch.equal(kept[name], before[name]) for name in before)
    head.load_state_dict(kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.weights().items())
    assert [id(p) for p in head.parameters()] == parameters  # an optimizer holds on to them
