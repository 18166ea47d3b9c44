"""The word problems that stand in for GSM8K are right themselves."""

import json
import re
from fractions import Fraction
from pathlib import Path

from in_one_test import each

HERE = Path(__file__).parent / "gsm8k_mini"
PROBLEMS = [
    json.loads(line) for name in ("train", "test") for line in (HERE / f"{name}.jsonl").read_text().splitlines()
]


def value(expression: str) -> Fraction:
    """The exact value of numbers joined by + - * and /."""
    assert re.fullmatch(r"-?[0-9.]+([-+*/][0-9.]+)*", expression)
    return eval(re.sub(r"[0-9.]+", lambda number: f"Fraction('{number[0]}')", expression), {"Fraction": Fraction})


def test_there_are_enough_problems_and_none_twice() -> None:
    assert len((HERE / "train.jsonl").read_text().splitlines()) == 24
    assert len((HERE / "test.jsonl").read_text().splitlines()) == 8
    assert len({p["question"] for p in PROBLEMS}) == 32


@each("problem", PROBLEMS, ids=range(len(PROBLEMS)))
def test_every_worked_step_is_true_and_the_last_one_is_the_answer(problem: dict[str, str]) -> None:
    steps = re.findall(r"([-+*/0-9.]+)=<<([^=]+)=([^>]+)>>(-?[0-9.]+)", problem["answer"])
    assert len(steps) == problem["answer"].count("<<") >= 1
    for written, expression, result, shown in steps:
        assert value(written) == value(expression) == Fraction(result) == Fraction(shown.rstrip("."))
    final = problem["answer"].split("\n#### ")
    assert len(final) == 2
    assert Fraction(final[1].replace(",", "")) == Fraction(steps[-1][2])
