"""The rule that stands for a person's taste in scripts/rlhf_text.sh, and the rankings that it writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_one_test import each

from rlft.commands.rank import read_rows

FOLDER = Path(__file__).parents[1] / "scripts" / "rlhf_text"
spec = importlib.util.spec_from_file_location("taste", FOLDER / "taste.py")
assert spec is not None
assert spec.loader is not None
taste: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(taste)


@each(
    ("text", "liked"),
    [
        ("The apple is sweet and red.", 3), ("It is a sweet and red fruit.", 2), ("the apple is sweet and red.", 2),
        ("The apple is sweet. It is red.", 2), ("The apple is sweet and red", 2),
        ("Apples are red and sweet fruits!", 3),
        ("Apple.", 2 + 1 / 6), ("Apple sauce is good.", 2 + 4 / 6), ("The apple" + " is" * 16 + ".", 2.5),
        ("The apple" + " is" * 99 + ".", 2), ("", 0), ("a b c d e f", 1),
    ],
)  # fmt: skip
def test_a_sentence_of_six_to_twelve_words_about_the_subject_is_liked_best(text: str, liked: float) -> None:
    assert taste.liking(text, "apple") == pytest.approx(liked / 3)
    group = SimpleNamespace(
        prompt=SimpleNamespace(answer="apple"), rollouts=[SimpleNamespace(completion=SimpleNamespace(text=text))]
    )
    assert taste.taste(group) == [taste.liking(text, "apple")]


def test_answers_are_ranked_as_liked_and_each_prompt_once(tmp_path: Path) -> None:
    taste.write_prompts(tmp_path / "prompts.jsonl")
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({prompt["answer"] for prompt in prompts}) == len(prompts) > 100
    answers = ["{} is what I think of now.", "No.", "Yes.", "{} and more"]
    lines = [
        {
            "prompt_id": row["answer"], "index": index, "prompt": [{"role": "user", "content": row["prompt"]}],
            "answer": row["answer"], "completion": text.format(row["answer"].capitalize()), "token_ids": [1],
            "finish_reason": "stop", "rewards": {}, "reward": 0.0, "model": "m", "tokenizer": "t",
        }
        for row in prompts[:3]
        for index, text in enumerate(answers)
    ]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        taste.rank(tmp_path / "samples.jsonl", tmp_path / "rankings.jsonl")
    rows = [row for _, row in read_rows(tmp_path / "rankings.jsonl", "out")]
    assert len(rows) == 3
    for row in rows:
        scores = dict(zip(row["completions"], row["scores"], strict=True))
        assert scores["No."] == scores["Yes."] == 0
        assert [score for text, score in scores.items() if "think" in text] == [max(scores.values())] == [2]
