"""A forger who writes the chain anew is found by what is recomputed, without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from audited_runs import audited, edited, key_set, lines_of, nested, rechained, rollouts, write, wrong
from in_one_test import each

from rlft.system.terminal import Status

R2 = "rollouts/step_000002.jsonl"


def all_right(line: dict[str, Any]) -> None:
    """Another text, with the rewards that it would have got."""
    line["completion"] = f"<think>so</think><answer>{line['answer']}</answer>"
    line["rewards"] = dict.fromkeys(line["rewards"], 1.0)


def of_another_prompt(folder: Path) -> None:
    """A group gets the prompt of another step, with its id, messages and answer."""
    lines, other = lines_of(folder / R2), lines_of(rollouts(folder, 3))[0]
    for line in lines[:4]:
        line |= {name: other[name] for name in ("prompt_id", "prompt", "answer")}
    write(folder / R2, lines)


def renumbered(folder: Path) -> None:
    second, third = (lines_of(rollouts(folder, step)) for step in (2, 3))
    write(rollouts(folder, 2), [{**line, "step": 2, "policy_version": 1} for line in third])
    write(rollouts(folder, 3), [{**line, "step": 3, "policy_version": 2} for line in second])


def reversed_data(folder: Path) -> None:
    file = folder.parent / "data.jsonl"
    write(file, lines_of(file)[::-1])


def flipped(folder: Path) -> None:
    file = folder.parent / "base" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a reward": (edited(R2, 5, nested("rewards", "exact_match", 0.25)), f"{R2}: step 2, prompt "),
    "a total": (edited(R2, 5, key_set(reward=0.25)), "total reward is 0.25, its parts give "),
    "an advantage": (edited(R2, 5, key_set(advantage=0.25)), "completion 1: advantage is 0.25, recomputed "),
    "a text and its rewards": (edited(R2, 5, all_right), "a completion's text is not that of its tokens"),
    "a token": (edited(R2, 5, lambda line: line["token_ids"].__setitem__(0, 7)), "step 2: tokens or masks are not"),
    "a policy version": (edited(R2, 5, key_set(policy_version=0)), "policy version 0 sampled it instead of 1"),
    "an answer": (edited(R2, 5, key_set(answer="0")), "completion 1: prompt or answer are not those of the data"),
    "a step's number": (edited(R2, 5, key_set(step=3)), "completion 1: is of another step or prompt"),
    "a group's prompt": (of_another_prompt, "step 2: its prompts are not those that data and seed give"),
    "the completions of two steps": (renumbered, "step 2: its prompts are not those that data and seed give"),
    "the seed": (lambda folder: config_edited(folder, seed=5), "its prompts are not those that data and seed give"),
}
"""{what was changed, and the chain with it: (how, what the finding holds)}."""
INPUTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "data in another order": (reversed_data, "training data: data.path has the fingerprint"),
    "an answer in the data": (edited("../data.jsonl", 3, key_set(answer="0")), "data.path has the fingerprint"),
    "a bit of the base": (flipped, "base: model.path has other weights ("),
}


def config_edited(folder: Path, **keys: Any) -> None:
    plain = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**plain, **keys}, sort_keys=False))


@each("what", FORGED)
def test_a_forger_who_writes_the_chain_anew_is_found_by_what_is_recomputed(
    what: str, copies: Callable[[], Path]
) -> None:
    tamper, expected = FORGED[what]
    folder = copies()
    tamper(folder)
    rechained(folder)
    assert wrong(audited(folder)) == [], "the chain fits"
    found = wrong(audited(folder, recompute=9))
    assert any(expected in row for row in found), (what, found)


@each("what", INPUTS)
def test_other_data_or_another_base_is_found(what: str, copies: Callable[[], Path]) -> None:
    tamper, expected = INPUTS[what]
    folder = copies()
    tamper(folder)
    rows = audited(folder, recompute=9)
    assert any(expected in row for row in wrong(rows)), (what, rows)
    assert [row.name for row in rows if row.status is Status.skipped] == ["recomputed"]


def test_what_is_not_there_is_left_open_and_not_accused(copies: Callable[[], Path]) -> None:
    folder = copies()
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("/data.jsonl", "/nowhere.jsonl"))
    rechained(folder)
    rows = audited(folder, recompute=9, replay=1)
    assert [row.name for row in rows if row.status is not Status.ok] == ["inputs"]
    assert "nowhere.jsonl" in rows[-1].value


class Unsure:
    """A reward that gives another score each time."""

    calls = 0

    def __call__(self, group: Any) -> Sequence[float]:
        Unsure.calls += 1
        return [float(Unsure.calls)] * len(group.rollouts)


def test_a_reward_that_is_random_is_named_and_not_accused(copies: Callable[[], Path], monkeypatch: Any) -> None:
    folder = copies()
    monkeypatch.setattr("rlft.reward.exact_match.ExactMatch.__call__", lambda self, group: Unsure()(group))
    rows = audited(folder, recompute=9)
    assert wrong(rows) == []
    [left] = [row for row in rows if row.name == "rewards"]
    assert left.status is Status.skipped
    assert left.value == "exact_match scores the same completions differently each time"


def test_without_completions_on_disk_rewards_are_left_open(copies: Callable[[], Path]) -> None:
    folder = copies()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["rollouts"]["every"] = 0
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rechained(folder)
    for file in (folder / "rollouts").iterdir():
        file.unlink()
    rows = audited(folder, recompute=9)
    left = {row.name: row.value for row in rows if row.status is not Status.ok}
    assert left.keys() == {"rollouts", "recomputed"}
    assert left["rollouts"] == "steps 1, 2, 3, 4: completions are not on disk"
