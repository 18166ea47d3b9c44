"""Sums in a fixed order, for a while."""

from __future__ import annotations

import pytest
import torch

from rlft.system.device import repeatable


@pytest.mark.parametrize("only_warns", [False, True])
@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_what_it_sets_is_set_inside_alone(before: tuple[bool, bool], only_warns: bool) -> None:
    at_first = settings()
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        with pytest.raises(ValueError, match="of the block"):
            fail_inside(only_warns)
        assert settings() == (*before, at_first[2])
    finally:
        torch.use_deterministic_algorithms(at_first[0], warn_only=at_first[1])


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def fail_inside(only_warns: bool) -> None:
    with repeatable(only_warns=only_warns):
        assert settings() == (True, only_warns, False)
        raise ValueError("of the block")
