"""Files of a newer rlft are told apart from damaged ones."""

import pytest

from rlft.system.versions import FORMAT, problem_of_format


@pytest.mark.parametrize(
    "values", [{}, {"format": FORMAT}, {"format": "2"}, {"format": True}, {"format": None}, [], None]
)
def test_what_this_version_and_older_ones_wrote_can_be_read(values: object) -> None:
    assert problem_of_format(values) is None


def test_a_newer_format_is_named() -> None:
    assert problem_of_format({"format": FORMAT + 1}) == (
        f"was written by a newer rlft (format {FORMAT + 1}, this one reads up to {FORMAT})"
    )
