"""Full keys of a nested config."""

from rlft.config.flat import flatten


def test_an_empty_section_is_a_value() -> None:
    assert flatten({"data": {}, "a": {"b": {"c": None}}, "d": [{"e": 1}]}) == {
        "data": {},
        "a.b.c": None,
        "d": [{"e": 1}],
    }
