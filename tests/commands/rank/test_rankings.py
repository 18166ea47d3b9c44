"""The prompts to rank, the file of rankings, and that `rlft rm` and `rlft dpo` read it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_one_test import each

from rlft.commands.rank import MOST_ANSWERS, Rankings, questions_of
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.resolved import resolve
from rlft.system import disk, files
from rlft.types import Split, UserError


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_seed_and_ranker_give_the_order_and_equal_answers_are_shown_once(write_samples: Callable[..., Path]) -> None:
    samples = [str(write_samples(30, ("a", "b", "b", "c")))]
    orders = {(ranker, seed): questions_of(samples, ranker, seed) for ranker in ("anna", "ben") for seed in (0, 1)}
    assert questions_of(samples, "anna", 0) == orders["anna", 0]
    for key in ("prompt_id", "completions"):
        assert len({json.dumps([row[key] for row in rows]) for rows in orders.values()}) == 4
    for rows in orders.values():
        assert sorted(row["prompt_id"] for row in rows) == sorted(f"p{p}" for p in range(30))
        assert all(len(row["completions"]) == 3 for row in rows)
        firsts = [row["completions"][0][0] for row in rows]
        assert {*firsts} == {*"abc"}, "no answer is always the first"
    [many] = questions_of([str(write_samples(1, tuple("abcdefghijkl")))], "anna", 0)
    assert len({*many["completions"]}) == MOST_ANSWERS
    with pytest.raises(UserError, match="no prompt has two different answers"):
        questions_of([str(write_samples(3, ("a", "a")))], "anna", 0)


def test_two_files_are_ranked_together(write_samples: Callable[..., Path]) -> None:
    both = [str(write_samples(2, ("a", "b"), "one")), str(write_samples(2, ("b", "c"), "two"))]
    assert [sorted(text[0] for text in row["completions"]) for row in questions_of(both, "x", 0)] == [[*"abc"]] * 2


def test_any_course_of_rankings_is_on_disk_after_each_step_and_continues_in_a_new_process(
    tmp_path: Path, write_samples: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(files.os, "fsync", lambda handle: flushed.append(handle))
    questions = questions_of([str(write_samples(40, ("a", "b", "c")))], "anna", 0)
    file, rng, expected = tmp_path / "new" / "out.jsonl", random.Random(0), []
    rankings = Rankings(file, questions)
    for _ in range(120):
        flushed.clear()
        scores = rng.choice([[0, 1, 2], [2, 0, 1], [0, 1, 1], [0, 0, 0], None])
        if expected and (rng.random() < 0.3 or not rankings.left):
            rankings.undo()
            expected.pop()
        else:
            expected.append((rankings.left[-1]["prompt_id"], scores or [0, 0, 0], scores is None))
            rankings.add(scores)
        assert flushed
        assert [(row["prompt_id"], row["scores"], row["skipped"]) for row in rows_of(file)] == expected
        if rng.random() < 0.3:
            next_one = rankings.left[-1:]
            with file.open("ab") as torn:  # a kill in the middle of a row
                torn.write(b'{"ranker": "anna", "prompt_id": "p1", "mess'[: rng.randint(0, 40)])
            rankings._stream.close()
            rankings = Rankings(file, questions)
            assert len(rankings.done) == len(expected)
            assert not expected or rankings.done[-1][1]["prompt_id"] == expected[-1][0]
            assert rankings.left[-1:] == next_one or {*map(str, next_one)} <= {*map(str, rankings.left)}
    assert {row["ranker"] for row in rows_of(file)} == {"anna"}
    assert all(f"secret-model-{'abc'.index(row['completions'][0][0]) % 2}" == row["models"][0] for row in rows_of(file))


def test_a_full_disk_leaves_the_file_and_the_question_as_they_were(
    tmp_path: Path, write_samples: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rankings = Rankings(tmp_path / "out.jsonl", questions_of([str(write_samples())], "anna", 0))
    rankings.add([0, 1, 2])
    before = rankings.shown(), rankings.file.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(disk.DiskError, match="disk is full"):
        rankings.add([0, 1, 2])
    assert (rankings.shown(), rankings.file.read_bytes()) == before


@each("how", ["removed", "replaced"])
def test_a_file_that_was_moved_meanwhile_takes_no_ranking(
    how: str, tmp_path: Path, write_samples: Callable[..., Path]
) -> None:
    rankings = Rankings(tmp_path / "out.jsonl", questions_of([str(write_samples())], "anna", 0))
    rankings.add([0, 1, 2])
    rankings.file.rename(tmp_path / "moved.jsonl")
    if how == "replaced":
        rankings.file.write_bytes((tmp_path / "moved.jsonl").read_bytes())
    before = rankings.shown()
    for change in (lambda: rankings.add([0, 1, 2]), rankings.undo):
        with pytest.raises(disk.DiskError):
            change()
        assert rankings.shown() == before
    assert len(rows_of(tmp_path / "moved.jsonl")) == 1


@each(
    "content", ['{"prompt": "?", "chosen": "a"}\n', "text", '{"prompt": "?"', "[1]\n", "\n", "{}\n", '{"ranker": 1}\n']
)
def test_another_file_is_refused_and_left_alone(
    content: str, tmp_path: Path, write_samples: Callable[..., Path]
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=r"^out: .*name another file"):
        Rankings(file, questions_of([str(write_samples())], "anna", 0))
    assert file.read_text() == content


def test_a_file_belongs_to_one_person_one_set_of_samples_and_one_process(
    tmp_path: Path, write_samples: Callable[..., Path]
) -> None:
    samples, other = write_samples(), write_samples(2, ("a", "b"), "other")
    file = tmp_path / "out.jsonl"
    rankings = Rankings(file, questions_of([str(samples)], "anna", 0))
    for _ in range(6):
        rankings.add([0, 1, 2])
    with pytest.raises(UserError, match="another rlft rank writes it"):
        Rankings(file, questions_of([str(samples)], "anna", 0))
    rankings._stream.close()
    for others in (questions_of([str(samples)], "ben", 0), questions_of([str(other)], "anna", 0)):
        with pytest.raises(UserError, match=r"ranking . is by another person or of other samples"):
            Rankings(file, others)
    with pytest.raises(UserError, match="out: cannot be written"):
        Rankings(tmp_path, [])


def test_rm_and_dpo_read_each_pair_and_no_tie(tmp_path: Path, write_samples: Callable[..., Path]) -> None:
    questions = questions_of([str(write_samples(40))], "anna", 0)
    rankings = Rankings(tmp_path / "out.jsonl", questions)
    for i in range(40):
        rankings.add([[2, 1, 0], [0, 1, 1], [0, 0, 0], None][i % 4])
    scores_of = {
        q["messages"][1]["content"]: [[2, 1, 0], [0, 1, 1]][i % 2] for i, q in enumerate(questions) if i % 4 < 2
    }
    for command in ("rm", "dpo"):
        words = [f"preferences.path={rankings.file}", "max_completion_tokens=16", "rankings_per_step=4"]
        resolved = resolve(compose(words, command=command))
        preferences = instantiate(resolved.config.preferences, "preferences")
        read = [ranking for split in Split for ranking in preferences.load(split).rankings]
        assert len(read) == 20, "a prompt of ties alone and a skipped one teach nothing"
        for ranking in read:
            system, user = ranking.prompt.messages
            question = next(q for q in questions if q["messages"] == [system, user])
            scores = dict(zip(question["completions"], scores_of[user["content"]], strict=True))
            assert [scores[text] for text in ranking.completions] == sorted(scores.values(), reverse=True)
            assert [*ranking.scores] == sorted(scores.values(), reverse=True)
        plan = resolved.plan()
        assert len(plan.train.rankings) + len(plan.held_out.rankings) == 20
