import hashlib

import pytest
from in_one_test import each

from rlft.data.arithmetic import Arithmetic, split_of
from rlft.data.chains import Chain, Chains
from rlft.data.shapes import Shapes
from rlft.types import Split

SOURCES = {
    "arithmetic": lambda **keys: Arithmetic(difficulty=2, operations=["+", "-"], **keys),
    "chains": lambda **keys: Chains(steps=5, largest=20, **keys),
    "shapes": lambda **keys: Shapes(most=9, **keys),
}
DIGESTS = {"arithmetic": "f1050c687b01b9a1", "chains": "ff8c56f295e395ef", "shapes": "80337ee8605b128c"}


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_keys_draw_the_same_prompts_and_another_seed_or_size_others(name):
    def drawn(split, seed=3, size=100):
        return SOURCES[name](size=size, held_out_size=20, seed=seed).load(split)

    by_split = {split: drawn(split) for split in Split}
    assert [len(by_split[split]) for split in (Split.train, Split.held_out)] == [100, 20]
    assert all(split_of(p.id) is split for split, prompts in by_split.items() for p in prompts)
    text = "\n".join(f"{p.id} {p.messages[0]['content']} {p.answer}" for split in Split for p in by_split[split])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]
    train = by_split[Split.train]
    assert train == drawn(Split.train) != drawn(Split.train, seed=4)
    assert train[:50] == drawn(Split.train, size=50)


@each("made", SOURCES.values(), ids=list(SOURCES))
def test_the_splits_share_no_problem_whatever_the_seeds(made):
    train = {p.id for p in made(seed=0, size=1000, held_out_size=1).load(Split.train)}
    for seed in (0, 1, 2):
        held_out = {p.id for p in made(seed=seed, size=1, held_out_size=200).load(Split.held_out)}
        assert len(held_out) == 200
        assert not train & held_out


def test_the_split_of_a_problem_is_fixed():
    # The embedded model was trained on the training side: moving the boundary would leak held-out problems into it.
    # The first bytes of the sha256 are 25 < 0.1 * 256 = 25.6, and 26.
    assert {split_of(problem) for problem in ("12+59", Chain(1, (("+", 40),)).identity)} == {Split.held_out}
    assert {split_of(problem) for problem in ("12+83", Chain(2, (("+", 2),)).identity)} == {Split.train}


def test_answers_are_right_and_never_negative():
    seen = set()
    problems = Arithmetic(difficulty=2, operations=["+", "-", "*"], size=300, held_out_size=60, seed=0)
    for prompt in problems.load(Split.train):
        a, operation, b = prompt.messages[0]["content"].removeprefix("What is ").removesuffix("?").split()
        results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert int(prompt.answer) == results[operation] >= 0
        seen.add(operation)
    assert seen == {"+", "-", "*"}


def test_the_config_gives_the_documented_sizes(make_data):
    data = make_data("arithmetic")
    assert (len(data.load(Split.train)), len(data.load(Split.held_out))) == (4096, 256)
