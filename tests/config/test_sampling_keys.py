"""Settings of sampling that are refused, with their reasons."""

from __future__ import annotations

import pytest

from rlft.config.sampling_keys import REFUSED, SECTIONS, refusal
from rlft.config.suggest import known_keys


@pytest.mark.parametrize("section", SECTIONS)
def test_a_refused_name_is_refused_in_every_section_of_sampling(section: str) -> None:
    for name in REFUSED:
        problem, remedy = refusal(f"{section}.{name}" if section else name) or ("", "")
        assert problem
        assert remedy


def test_no_key_of_rlft_is_refused() -> None:
    for verb in ("train", "sft", "rm", "sample"):
        assert [key for key in known_keys(verb) if refusal(key)] == []
