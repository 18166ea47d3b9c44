from in_one_test import each

from rlft.tokens.reasoning import MARKERS, without_reasoning


@each(("opens", "closes"), MARKERS.items())
def test_the_reasoning_of_every_family_is_left_out(opens, closes):
    for text, spoken in (
        (f"{opens}a{closes}b", "b"),
        (f"a{opens}b{closes}c{opens}d{closes}e", "ace"),
        (f"a{opens}b", "a"),
        (f"{opens}a{opens}b{closes}c", "c"),
    ):
        assert without_reasoning(text).replace(" ", "") == spoken, text
        assert len(without_reasoning(text)) == len(text), "offsets stay"


@each(
    ("text", "spoken"),
    [
        ("", ""),
        ("a", "a"),
        ("a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("a</think>b<think>c</think>d", "bd"),
        ("<think>a[/THINK]b</think>c", "c"),
        ("<think>a<thinking>b</think>c", "c"),
        ("a<|end|>", "a<|end|>"),
        ("a <Think>b", "a<Think>b"),
        ("I think>b", "Ithink>b"),
    ],
)
def test_only_what_the_markers_of_one_kind_enclose_is_reasoning(text, spoken):
    assert without_reasoning(text).replace(" ", "") == spoken
