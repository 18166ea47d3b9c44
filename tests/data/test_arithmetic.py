import pytest
from in_one_test import each

from rlft.data.arithmetic import Arithmetic
from rlft.data.chains import Chains
from rlft.data.drawn import split_of
from rlft.types import Split, UserError

KEYS = {"difficulty": 2, "operations": ["+", "-"], "size": 300, "held_out_size": 60, "seed": 0}


def make(**overrides) -> Arithmetic:
    return Arithmetic(**{**KEYS, **overrides})


def chains(**overrides) -> Chains:
    return Chains(**{"steps": 2, "largest": 99, "size": 300, "held_out_size": 60, "seed": 0, **overrides})


@each("of", [make, chains])
def test_the_splits_share_no_problem_whatever_the_seeds(of) -> None:
    train = {p.id for p in of(size=3000).load(Split.train)}
    for seed in (0, 1, 2):
        held_out = {p.id for p in of(seed=seed, held_out_size=300).load(Split.held_out)}
        assert len(held_out) == 300
        assert not train & held_out


@each("of", [make, chains])
def test_the_same_keys_give_the_same_prompts_and_another_seed_or_size_others(of) -> None:
    prompts = of().load(Split.train)
    assert prompts == of().load(Split.train)
    assert prompts != of(seed=1).load(Split.train)
    assert prompts[:100] == of(size=100).load(Split.train)


def test_answers_are_right_and_never_negative() -> None:
    seen = set()
    for prompt in make(operations=["+", "-", "*"]).load(Split.train):
        a, operation, b = prompt.messages[0]["content"].removeprefix("What is ").removesuffix("?").split()
        results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert int(prompt.answer) == results[operation] >= 0
        seen.add(operation)
    assert seen == {"+", "-", "*"}


def test_the_split_of_a_problem_is_fixed() -> None:
    # The embedded model was trained on the training side: moving the boundary would leak held-out problems into it.
    # The first byte of sha256("12+59") is 25 < 0.1 * 256 = 25.6, that of sha256("12+83") is 26.
    assert split_of(12, "+", 59) is Split.held_out
    assert split_of(12, "+", 83) is Split.train


@each(
    ("overrides", "split", "key"),
    [
        ({"difficulty": 0}, Split.train, "data.difficulty"),
        ({"difficulty": 10}, Split.train, "data.difficulty"),
        ({"operations": []}, Split.train, "data.operations"),
        ({"operations": ["/"]}, Split.train, "data.operations"),
        ({"difficulty": 1, "size": 200}, Split.train, "data.size"),  # 100 sums + 55 differences of one digit
        ({"difficulty": 1, "held_out_size": 100}, Split.held_out, "data.held_out_size"),
    ],
)
def test_what_cannot_be_made_is_refused(overrides, split: Split, key: str) -> None:
    with pytest.raises(UserError) as refusal:
        make(**overrides).load(split)
    assert refusal.value.key == key


def test_the_config_gives_the_documented_sizes(make_data) -> None:
    data = make_data("arithmetic")
    assert (len(data.load(Split.train)), len(data.load(Split.held_out))) == (4096, 256)
