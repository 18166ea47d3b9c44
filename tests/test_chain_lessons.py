"""What the embedded model for chains is taught: right working, no held-out chain, shares of what it is to unlearn."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import chain_lessons
import pytest
from chain_lessons import CLEAN, MIXED, Shares

from rlft.data.arithmetic import OPERATIONS
from rlft.data.chains import Chain, Chains
from rlft.reward.equations import equations
from rlft.types import Split


def drawn(shares: Shares, count: int = 3000) -> list[tuple[Chain, str]]:
    rng = random.Random(3)
    chains = [chain_lessons.problem(rng) for _ in range(count)]
    return [(chain, chain_lessons.response(chain, shares, rng)) for chain in chains]


def test_chains_are_of_the_training_split_alone_and_as_the_data_asks_them(tmp_path: Path) -> None:
    chain_lessons.write_lessons(tmp_path / "lessons.jsonl", 500, True, random.Random(0))
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "lessons.jsonl").read_text().splitlines()]
    keys = {"steps": chain_lessons.STEPS, "largest": chain_lessons.LARGEST, "size": 1, "held_out_size": 400, "seed": 0}
    held_out = {prompt.messages[0]["content"] for prompt in Chains(**keys).load(Split.held_out)}
    assert len(asked) == 500
    assert not held_out & {*asked}
    assert all(chain.split is Split.train for chain, _ in drawn(MIXED))


def test_clean_lessons_have_a_right_equation_for_each_step_and_the_last_result_as_the_answer() -> None:
    for chain, text in drawn(CLEAN, 500):
        assert [holds for _, holds in equations(text)] == [True] * chain_lessons.STEPS
        assert text.endswith(f"={chain.results[-1]}</think><answer>{chain.results[-1]}</answer>")


def test_the_working_of_a_chain_goes_from_result_to_result() -> None:
    chain = Chain(47, (("+", 38), ("-", 59), ("*", 3)))
    assert chain_lessons.equations(chain, chain.results) == ["47+38=85", "85-59=26", "26*3=78"]


@pytest.mark.parametrize("kind", ["guess", "bad_format"])
def test_the_mixture_has_its_shares(kind: str) -> None:
    # Of 3000 lessons the share p of a kind has the standard deviation sqrt(p (1 - p) / 3000) < 0.0074: four of them.
    lessons = drawn(MIXED)
    formatted = [text.startswith("<think>") and text.endswith("</answer>") and "</think><answer>" in text
                 for _, text in lessons]  # fmt: skip
    share = {
        "guess": sum(text.startswith("<think></think>") for _, text in lessons),
        "bad_format": sum(not well for well in formatted),
    }[kind]
    assert share / len(lessons) == pytest.approx(getattr(MIXED, kind), abs=0.03)


def written(text: str) -> list[int]:
    """The result of each equation of a response."""
    return [int(result) for result in re.findall(r"=(\d+)", text)]


def test_of_the_steps_of_the_mixture_its_share_slips_by_a_little_and_the_chain_goes_on_from_there() -> None:
    slips, total = [], 0
    for chain, text in drawn(MIXED):
        value = chain.start
        for (operation, number), result in zip(chain.steps, written(text), strict=False):
            slips.append(result - OPERATIONS[operation](value, number))
            assert 0 <= result <= chain_lessons.LARGEST
            value = result
        total += len(written(text))
    assert {*slips} == {0, *chain_lessons.OFF}
    # 85 of 100 lessons have a working: 12,750 steps of which 0.42 would slip (standard deviation 0.0044), fewer at the
    # ends of the range, where no slip keeps the rest of the chain inside; 2,000 other chains say how many.
    assert sum(slip != 0 for slip in slips) / len(slips) == pytest.approx(possible_slips() * MIXED.slip, abs=0.02)


def possible_slips() -> float:
    """Of the steps of right chains those after which a slip stays in the range."""
    rng = random.Random(5)
    found = []
    for chain in (chain_lessons.problem(rng) for _ in range(2000)):
        for i, result in enumerate(chain.results):
            rest = chain.steps[i + 1 :]
            found.append(any(chain_lessons.stays(result + off, rest) for off in chain_lessons.OFF))
    return sum(found) / len(found)


def test_what_is_written_after_a_slip_stays_in_what_has_been_taught() -> None:
    rng = random.Random(1)
    for _ in range(500):
        chain = chain_lessons.problem(rng)
        assert all(0 <= result <= chain_lessons.LARGEST for result in chain_lessons.worked(chain, 1.0, rng))


def test_the_answer_is_the_last_result_that_was_written_also_after_a_slip() -> None:
    for _, text in drawn(Shares(slip=0.5), 300):
        assert text.endswith(f"<answer>{written(text)[-1]}</answer>")


def test_without_a_share_of_slips_the_working_is_right() -> None:
    shares = Shares(guess=MIXED.guess, bad_format=MIXED.bad_format)
    assert all(holds for _, text in drawn(shares) for _, holds in equations(text))
