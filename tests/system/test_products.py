"""Products with rounded weights: how far they may be off, what they never depend on, and which is chosen."""

import pytest
import torch

from rlft.system import products
from rlft.system.products import Weight, adds_exactly, fastest_dtype

CPU = torch.device("cpu")


@pytest.fixture
def numbers():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 96, generator=generator), torch.randn(96, 40, generator=generator)


@pytest.mark.parametrize("exact", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("dtype", "bound", "held"),
    [(None, 1e-6, None), (torch.bfloat16, 0.006, torch.bfloat16), (torch.int8, 0.008, torch.int8)],
)
def test_a_product_is_off_by_its_rounding_alone(dtype, bound, held, exact, numbers):
    x, matrix = (each.to(exact) for each in numbers)
    bias = torch.arange(40).to(exact)
    weight = Weight.of(matrix, dtype or exact)
    found, expected = weight.times(x, bias), x @ matrix + bias
    assert found.dtype == exact
    assert (found - expected).norm() <= bound * (x @ matrix).norm()
    assert (weight.values.dtype, weight.dtype) == (held or exact, dtype or exact)
    assert not weight.differs(Weight.of(matrix, dtype or exact))
    changed = matrix.clone()
    changed[3, 4] *= 3
    assert weight.differs(Weight.of(changed, dtype or exact))


def test_in_int8_a_row_depends_on_no_other_row_and_one_that_is_not_finite_stays_so(numbers):
    x, matrix = numbers
    weight, rows = Weight.of(matrix, torch.int8), x.flatten(0, 1)
    together = weight.times(rows)
    assert all(torch.equal(together[i : i + 1], weight.times(rows[i : i + 1])) for i in range(len(rows)))
    rows[2, 7], rows[4] = torch.nan, 0
    found = weight.times(rows)
    assert found[2].isnan().all()
    assert not found[4].any()
    assert torch.equal(found[5:], together[5:])


def test_where_a_processor_cuts_sums_off_the_same_integers_are_multiplied_in_float32(numbers, monkeypatch):
    x, matrix = numbers
    exact = Weight.of(matrix, torch.int8)
    monkeypatch.setattr(products, "adds_exactly", lambda device: False)
    weight = Weight.of(matrix, torch.int8)
    assert weight.values.dtype == torch.float32
    assert torch.equal(weight.values, exact.values.float())
    torch.testing.assert_close(weight.times(x), exact.times(x), rtol=1e-6, atol=1e-6)


def test_a_processor_whose_sums_are_cut_off_is_found_out(monkeypatch):
    monkeypatch.setattr(products.torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(-(2**15), 2**15 - 1))
    assert not adds_exactly.__wrapped__(CPU)
    assert not adds_exactly.__wrapped__(torch.device("cuda"))


@pytest.mark.parametrize(
    ("seconds", "is_exact", "chosen"),
    [
        ({"float32": 2.64, "bfloat16": 1.22, "int8": 1.61}, True, "bfloat16"),  # an EPYC with all instructions
        ({"float32": 2.7, "bfloat16": 1.28, "int8": 0.57}, False, "bfloat16"),
        ({"float32": 2.7, "bfloat16": 98.0, "int8": 1.8}, False, "float32"),  # AVX2 alone
        ({"float32": 2.7, "bfloat16": 6.5, "int8": 1.6}, True, "int8"),  # VNNI without bfloat16
        ({"float32": 1.0, "bfloat16": 0.85, "int8": 0.85}, True, "float32"),  # not worth the rounding
        ({"float32": 1.0, "bfloat16": 0.5, "int8": 0.45}, True, "bfloat16"),
    ],
)
def test_a_less_exact_dtype_is_chosen_only_for_a_fifth_less_time(seconds, is_exact, chosen, monkeypatch):
    monkeypatch.setattr(products, "seconds", seconds.get)
    monkeypatch.setattr(products, "adds_exactly", lambda device: is_exact)
    assert fastest_dtype.__wrapped__() == chosen


def test_it_is_measured_in_a_moment_and_without_the_numbers_that_a_run_draws():
    before = torch.random.get_rng_state()
    assert fastest_dtype.__wrapped__() in ("float32", "bfloat16", "int8")
    assert torch.equal(before, torch.random.get_rng_state())
