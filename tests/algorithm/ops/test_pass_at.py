"""pass@k, against all subsets of the samples."""

from __future__ import annotations

import itertools

import pytest
from in_one_test import each

from rlft.algorithm.ops.pass_at import pass_at, pass_sizes


@each(("k", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_pass_at_is_given_for_powers_of_two_and_for_all_samples(k, sizes):
    assert pass_sizes(k) == sizes


def test_pass_at_is_the_share_of_subsets_with_a_right_sample():
    for n, right, size in itertools.product(range(1, 7), range(7), range(1, 7)):
        if right <= n and size <= n:
            subsets = list(itertools.combinations(range(n), size))
            share = sum(min(subset) < right for subset in subsets) / len(subsets)
            assert pass_at(size, n, right) == pytest.approx(share, abs=1e-12)
