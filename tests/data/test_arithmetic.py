from rlft.data.arithmetic import Arithmetic
from rlft.types import Split


def test_answers_are_right_and_never_negative() -> None:
    seen = set()
    problems = Arithmetic(difficulty=2, operations=["+", "-", "*"], size=300, held_out_size=60, seed=0)
    for prompt in problems.load(Split.train):
        a, operation, b = prompt.messages[0]["content"].removeprefix("What is ").removesuffix("?").split()
        results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert int(prompt.answer) == results[operation] >= 0
        seen.add(operation)
    assert seen == {"+", "-", "*"}


def test_the_config_gives_the_documented_sizes(make_data) -> None:
    data = make_data("arithmetic")
    assert (len(data.load(Split.train)), len(data.load(Split.held_out))) == (4096, 256)
