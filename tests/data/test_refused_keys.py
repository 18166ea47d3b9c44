"""Keys and files that data of a kind cannot work with are refused, each by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_one_test import each

from rlft.types import Split, UserError

LINE = {"prompt": "{}?", "answer": "x", "completion": "x", "chosen": "good", "rejected": "bad"}
# {what is read: [(keys, the one that is named)]}
FILES = {
    "data": [
        ({"path": "missing.jsonl"}, "path"),
        ({"path": "folder"}, "path"),
        ({"path": "empty.jsonl"}, "path"),
        ({"path": "blank.jsonl"}, "path"),
        ({"held_out_path": "missing.jsonl"}, "held_out_path"),
        ({"held_out_path": "./good.jsonl"}, "held_out_path"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),  # nothing left to train on
        ({"held_out_fraction": 0.0}, "held_out_fraction"),
        ({"held_out_fraction": 1.5}, "held_out_fraction"),
        ({"held_out_path": "same_questions.jsonl"}, "path"),
        ({"answer_pattern": "("}, "answer_pattern"),
        ({"few_shot": -1}, "few_shot"),
        ({"few_shot": 5, "held_out_fraction": 1e-9}, "few_shot"),  # a question of 5 has 4 others
        ({"few_shot_template": "{anwser}"}, "few_shot_template"),
        ({"answer_field": None, "few_shot": 1}, "answer_field"),
        ({"prompt_template": "{question} {answer}"}, "prompt_template"),
        ({"prompt_template": r"\\boxed{question}"}, "prompt_template"),
        ({"prompt_template": "{qestion}"}, "prompt_template"),
        ({"promt_field": "x"}, "promt_field"),
        ({"prompt_field": 3}, "prompt_field"),
    ],
    "demonstrations": [
        ({"path": "missing.jsonl"}, "path"),
        ({"held_out_path": "missing.jsonl"}, "held_out_path"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),
        ({"prompt_template": "x"}, "prompt_template"),
        ({"turns": "first"}, "turns"),
        ({"token_ids": "both"}, "token_ids"),
    ],
    "preferences": [
        ({"path": "missing.jsonl"}, "path"),
        ({"held_out_path": "missing.jsonl"}, "held_out_path"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),
        ({"prompt_template": "x"}, "prompt_template"),
        ({"token_ids": "both"}, "token_ids"),
        ({"format": "HH"}, "format"),
        ({"prompt_template": "{chosen}"}, "prompt_template"),
    ],
}
DRAWN = {
    "arithmetic": [
        ({"difficulty": 0}, "difficulty"),
        ({"difficulty": 10}, "difficulty"),
        ({"operations": []}, "operations"),
        ({"operations": ["/"]}, "operations"),
        ({"difficulty": 1, "size": 200}, "size"),  # 100 sums + 55 differences of one digit
        ({"difficulty": 1, "held_out_size": 100}, "held_out_size"),
    ],
    "chains": [
        ({"steps": 0}, "steps"),
        ({"steps": 21}, "steps"),
        ({"largest": 8}, "largest"),
        ({"largest": 10_000}, "largest"),
        ({"steps": 1, "largest": 9, "size": 200}, "size"),
        ({"steps": 1, "largest": 9, "held_out_size": 100}, "held_out_size"),
    ],
    "shapes": [({"most": 10}, "most")],
}


@each("section, keys, key", [(section, *row) for section, rows in FILES.items() for row in rows])
def test_of_what_is_read_from_files(
    section: str, keys: dict[str, Any], key: str, request, write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = request.getfixturevalue(f"make_{section}")
    monkeypatch.chdir(tmp_path)
    for name, count in (("good", 5), ("same_questions", 9)):
        write(tmp_path / f"{name}.jsonl", *(LINE | {"prompt": f"{i}?"} for i in range(count)))
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(UserError) as refusal:
        make("jsonl", **{"path": "good.jsonl"} | keys).load(Split.train)
    assert refusal.value.key == f"{section}.{key}"


@each("kind, keys, key", [(kind, *row) for kind, rows in DRAWN.items() for row in rows])
def test_of_what_is_drawn(kind: str, keys: dict[str, Any], key: str, make_data) -> None:
    with pytest.raises(UserError) as refusal:
        make_data(kind, **keys).load(Split.held_out if key == "held_out_size" else Split.train)
    assert refusal.value.key == f"data.{key}"
