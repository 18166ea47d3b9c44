import time

from in_one_test import each

from rlft.reward.literal import literal
from rlft.reward.notation import differ, plain, spaced, words
from rlft.reward.quantity import quantity


@each("piece", [
    "{", "}", r"\text{", "$", "**", r"\(", "(", ",", "1,", "_8", " ", r"\ ", "a ", "^", "=", "9", ".", r"\overline{3}",
])  # fmt: skip
def test_long_answers_take_no_time(piece):
    text = piece * (2000 // len(piece))  # the longest answer that is looked at
    start = time.process_time()
    bare = plain(text)
    quantity(bare), literal(bare), words(bare), differ(bare, bare), spaced(bare)
    assert time.process_time() - start < 1
