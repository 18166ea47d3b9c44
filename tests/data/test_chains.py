import random

from rlft.data.chains import Chain, Chains, draw
from rlft.types import Split


def test_a_chain_is_asked_in_words_and_answered_by_its_last_result():
    chain = Chain(47, (("+", 38), ("-", 59), ("*", 3)))
    assert chain.results == (85, 26, 78)
    assert chain.question == "Take 47, then +38, -59, *3."
    assert chain.identity == "47+38-59*3"


def test_no_number_leaves_the_range_and_every_operation_occurs():
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


def test_the_prompts_are_those_chains():
    prompts = Chains(steps=5, largest=99, size=300, held_out_size=60, seed=0).load(Split.train)
    assert len({prompt.id for prompt in prompts}) == 300
    for prompt in prompts:
        words = prompt.messages[0]["content"].removeprefix("Take ").removesuffix(".").replace("then ", "")
        start, *rest = words.split(", ")
        chain = Chain(int(start), tuple((step[0], int(step[1:])) for step in rest))
        assert (chain.identity, str(chain.results[-1]), len(chain.steps)) == (prompt.id, prompt.answer, 5)
