"""What the embedded model for chains is taught: right working, no held-out chain, shares of what it is to unlearn."""

from __future__ import annotations

import json
import random
from pathlib import Path

import chain_lessons
from chain_lessons import CLEAN, MIXED, Shares

from rlft.data.arithmetic import split_of
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
    assert all(split_of(chain.identity) is Split.train for chain, _ in drawn(MIXED))


def test_clean_lessons_have_a_right_equation_for_each_step_and_the_last_result_as_the_answer() -> None:
    for chain, text in drawn(CLEAN, 500):
        assert [holds for _, holds in equations(text)] == [True] * chain_lessons.STEPS
        assert text.endswith(f"={chain.results[-1]}</think><answer>{chain.results[-1]}</answer>")
