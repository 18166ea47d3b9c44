"""A run's config with changes from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlft.config.compose import changed, compose
from rlft.runs import run_folder
from rlft.types import UserError

PLAIN = compose(["generation.max_tokens=77", "generation.temperature=0.5", "reward.format.weight=3", "seed=9"])


def test_only_what_was_named_changes() -> None:
    after = changed(PLAIN, ["trainer.lr=0.5", "group_size=3"], None)
    assert (after["trainer"]["lr"], after["group_size"]) == (0.5, 3)
    after["trainer"]["lr"], after["group_size"] = PLAIN["trainer"]["lr"], PLAIN["group_size"]
    assert after == PLAIN


def test_a_choice_of_a_group_changes_the_whole_section_and_its_keys_follow_in_any_order() -> None:
    after = changed(PLAIN, ["data.path=rows.jsonl", "data=jsonl"], None)
    assert after["data"]["path"] == "rows.jsonl"
    assert "difficulty" not in after["data"]
    assert after["seed"] == 9


def test_what_a_recipe_refers_to_does_not_change_that_order(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n# Mine\nname: ${data.path}_${data.subset}\n")
    after = changed(PLAIN, ["data.subset=main", "data.path=rows", "data=hub"], tmp_path)
    assert (after["data"]["path"], after["data"]["subset"]) == ("rows", "main")


def test_other_rewards_refer_to_the_runs_own_limits() -> None:
    after = changed(PLAIN, ["reward=[exact_match,overlong]"], None)
    assert list(after["reward"]) == ["exact_match", "overlong"]
    assert after["reward"]["overlong"]["max_tokens"] == 77
    again = changed(PLAIN, ["reward=[overlong]", "generation.max_tokens=55"], None)
    assert again["reward"]["overlong"]["max_tokens"] == 55, "whatever the order"


def test_another_engine_samples_as_the_run_did() -> None:
    after = changed(PLAIN, ["generation=vllm"], None)
    assert after["generation"] == {**PLAIN["generation"], "engine": "vllm"}


@pytest.mark.parametrize(
    ("override", "command", "message"),
    [
        ("grop_size=3", "train", "grop_size: there is no such key, got 3; did you mean group_size?"),
        ("group_size=3", "sft", "group_size: is a key of rlft train"),
        ("data=arithmetik", "train", "data: is not one of its choices, got arithmetik; did you mean arithmetic?"),
    ],
)
def test_what_is_not_there_is_refused(override: str, command: str, message: str) -> None:
    plain = PLAIN if command == "train" else compose(["demonstrations.path=x"], command=command)
    with pytest.raises(UserError) as refused:
        changed(plain, [override], None, command)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("began", ["snapshot.teacher_fingerprint", "teacher_fingerprint"])
def test_a_run_goes_on_with_its_teacher_in_another_place_and_with_no_other(began: str, tmp_path: Path) -> None:
    """An adapter's fingerprint and that of a separate model have names of their own."""
    before, now, base = (
        {**PLAIN, "snapshot": {**PLAIN["snapshot"], "teacher": teacher}} for teacher in ("here", "there", "base")
    )
    run_folder.write_config(tmp_path, before, {began: "a" * 64})
    run_folder.check_same_config(tmp_path, now)
    run_folder.check_same_inputs({began: "a" * 64}, {began: "a" * 64})
    [other] = {"snapshot.teacher_fingerprint", "teacher_fingerprint"} - {began}
    for fingerprints in ({began: "b" * 64}, {other: "b" * 64}):
        with pytest.raises(UserError, match=r"^snapshot\.teacher: the .* \(fingerprint aaaaaaaaaaaa "):
            run_folder.check_same_inputs({began: "a" * 64}, fingerprints)
    with pytest.raises(UserError, match=r"snapshot\.teacher: here -> base"):
        run_folder.check_same_config(tmp_path, base)
