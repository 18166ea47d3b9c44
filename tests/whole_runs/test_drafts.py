"""Runs that draft: the completions of those that do not, and interrupted = uninterrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_folders import CONVERSATIONS, chain, check_same, metrics, rollouts, tiny
from slow_cases import slow

from rlft import cli

KEYS = ("checkpoint.every=1", "checkpoint.keep=9", "trainer.lr=1e-3")
DRAFTS = ("generation.drafts=history", "generation.draft_rows=99")


def trained(folder: Path, *words: str) -> Path:
    assert cli.run([*tiny(*KEYS, *words), f"hydra.run.dir={folder}"]) == 0
    return folder


def said(folder: Path) -> list[tuple[str, Sequence[int], Sequence[float]]]:
    lines = [json.loads(line) for content in rollouts(folder).values() for line in content.splitlines()]
    return [(line["prompt_id"], line["token_ids"], line["logprobs"]) for line in lines]


@pytest.mark.parametrize(
    "words",
    [
        ("dynamic_sampling.max_rounds=1",),
        slow(("overlap.lag=1", "algorithm.mismatch=token_truncate")),
        slow(tuple(word for word in CONVERSATIONS if word.startswith("environment"))),
    ],
    ids=["plain", "sampled ahead", "conversations"],
)
def test_a_run_with_drafts_says_the_same_and_resumes_exactly(tmp_path: Path, words: tuple[str, ...]) -> None:
    plain = trained(tmp_path / "plain", *words, "steps=3")
    drafted = trained(tmp_path / "drafted", *words, *DRAFTS, "steps=3", "eval.every=1")
    for one, other in zip(said(plain), said(drafted), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], abs=1e-5, rel=1e-5)
    assert said(plain) != said(drafted), "the last bits follow the width of a pass"
    numbers = [(line["drafts/accepted_share"], line["drafts/tokens_per_pass"]) for line in metrics(drafted)[1:]]
    assert len(numbers) == 2, "before the first step there is nothing to draft from"
    assert all(0 < share < 1 < tokens for share, tokens in numbers)
    halted = trained(tmp_path / "halted", *words, *DRAFTS, "steps=2", "eval.every=1")
    assert cli.run(["resume", str(halted), "steps=3"]) == 0
    assert metrics(halted) == metrics(drafted)
    assert rollouts(halted) == rollouts(drafted)
    assert chain(halted) == chain(drafted)
    # With a lag this one holds completions that were sampled ahead.
    assert cli.run(["resume", str(drafted / "checkpoints" / "step_000002"), f"hydra.run.dir={tmp_path / 'ahead'}"]) == 0
    check_same(tmp_path / "ahead", drafted)
    other = trained(tmp_path / "other", *words, *DRAFTS, "steps=3", "eval.every=0")
    assert rollouts(other) == rollouts(drafted), "training does not depend on evaluations"
