import time

from in_one_test import each

from rlft.reward.literal import literal
from rlft.reward.notation import differ, plain, same_text, words
from rlft.reward.quantity import quantity, same_number


@each(
    ("text", "bare"),
    [
        (r"\boxed{\left(\dfrac{1}{2},\,3\right)}.", r"(\frac{1}{2}, 3)"),
        (r"\[ \begin{pmatrix} 1 \\ 2 \end{pmatrix} \]", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\(1\) or \(2\)", r"\(1\) or \(2\)"),
        ("$17$ and $18$", "$17$ and $18$"),
        (r"\boxed{17}\boxed{18}", r"\boxed{17}\boxed{18}"),
        (r"\{1,2\}", r"\{1,2\}"),
        ("1, 2, ...", "1, 2, ..."),
        (r"\leftarrow", r"\leftarrow"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        ("", ""),
        ("$", "$"),
    ],
)
def test_what_stands_around_an_answer_is_removed_once_it_is_around_all_of_it(text, bare):
    assert plain(text) == bare
    assert plain(plain(text)) == plain(text)


def test_a_number_is_read_with_what_may_stand_beside_it():
    values = {
        r"-18^\circ": -18,
        r"\$1,000": 1000,
        r"- 5": -5,
        r"n = 12": 12,
        r"2.5\times10^{-1}": 0.25,
        r"3 \text{ m}": 3,
    }
    assert {text: quantity(plain(text)).number for text in values} == values
    assert [
        text
        for text in ("1,00", "18 19", "x", "", r"\infty", r"1\times10^{999}", "1_000")
        if quantity(plain(text)).number
    ] == []


def test_differences_that_a_parser_drops_are_seen_in_both_directions():
    apart = [
        ("10_8", "10_{16}"),
        ("(1,2)", "[1,2]"),
        ("x=1", "y=1"),
    ]
    alike = [("10_8", r"10_{\text{eight}}"), ("(1,2),(3,4)", r"\{(1,2),(3,4)\}")]
    assert [pair for pair in apart if not (differ(*pair) and differ(*reversed(pair)))] == []
    assert [pair for pair in alike if differ(*pair) or differ(*reversed(pair))] == []
    assert same_number(quantity("0.5%"), quantity("0.5")) is False
    assert words("Anna, Bob") == words("Bob and Anna")
    assert not same_text("1 2", "12")


@each("piece", [
    "{", "}", r"\text{", "$", "**", r"\(", "(", ",", "1,", "_8", " ", r"\ ", "a ", "^", "=", "9", ".", r"\overline{3}",
])  # fmt: skip
def test_long_answers_take_no_time(piece):
    text = piece * (2000 // len(piece))  # the longest answer that is looked at
    start = time.process_time()
    bare = plain(text)
    quantity(bare), literal(bare), words(bare), differ(bare, bare), same_text(bare, bare)
    assert time.process_time() - start < 1
