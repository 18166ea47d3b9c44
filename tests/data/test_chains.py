import random

import pytest

from rlft.data.chains import Chain, Chains, draw
from rlft.data.drawn import split_of
from rlft.types import Split, UserError

KEYS = {"steps": 5, "largest": 99, "size": 300, "held_out_size": 60, "seed": 0}


def make(**overrides) -> Chains:
    return Chains(**{**KEYS, **overrides})


def test_a_chain_is_asked_in_words_and_answered_by_its_last_result() -> None:
    chain = Chain(47, (("+", 38), ("-", 59), ("*", 3)))
    assert chain.results == (85, 26, 78)
    assert chain.question == "Take 47, then +38, -59, *3."
    assert chain.identity == "47+38-59*3"


def test_no_number_leaves_the_range_and_every_operation_occurs() -> None:
    rng, seen = random.Random(0), set()
    for largest in (9, 99, 500):
        for _ in range(500):
            chain = draw(rng, 6, largest)
            assert len(chain.steps) == 6
            assert all(0 <= number <= largest for number in (chain.start, *chain.results))
            assert all(1 <= number <= largest for _, number in chain.steps)
            assert all(2 <= number <= 9 for operation, number in chain.steps if operation == "*")
            seen |= {operation for operation, _ in chain.steps}
    assert seen == {"+", "-", "*"}


def test_the_prompts_are_those_chains() -> None:
    prompts = make().load(Split.train)
    assert len({prompt.id for prompt in prompts}) == 300
    for prompt in prompts:
        words = prompt.messages[0]["content"].removeprefix("Take ").removesuffix(".").replace("then ", "")
        start, *rest = words.split(", ")
        chain = Chain(int(start), tuple((step[0], int(step[1:])) for step in rest))
        assert (chain.identity, str(chain.results[-1]), len(chain.steps)) == (prompt.id, prompt.answer, 5)


def test_the_split_of_a_chain_is_fixed() -> None:
    # The embedded model was taught the training side: moving the boundary would leak held-out chains into it.
    # The first byte of sha256("1+40") is 25 < 0.1 * 256 = 25.6, that of sha256("2+2") is 26.
    assert split_of(Chain(1, (("+", 40),)).identity) is Split.held_out
    assert split_of(Chain(2, (("+", 2),)).identity) is Split.train


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"steps": 0}, "data.steps"),
        ({"steps": 21}, "data.steps"),
        ({"largest": 8}, "data.largest"),
        ({"largest": 10_000}, "data.largest"),
        ({"steps": 1, "largest": 9, "size": 200}, "data.size"),
        ({"steps": 1, "largest": 9, "held_out_size": 100}, "data.held_out_size"),
    ],
)
def test_what_cannot_be_made_is_refused(overrides, key: str) -> None:
    with pytest.raises(UserError) as refusal:
        make(**overrides).load(Split.held_out if key == "data.held_out_size" else Split.train)
    assert refusal.value.key == key
