"""What is said of a run that has all its steps; the rest of launching is seen in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlft.launch import after_the_end

RUN = Path("run")
MORE, EVALUATE = "raise steps (rlft resume run steps=10)", "rlft eval run=run"


@pytest.mark.parametrize(
    ("verb", "schedule", "remedy"),
    [
        ("train", "constant", f"{MORE}, or {EVALUATE}"),
        ("sft", "constant", f"{MORE}, or {EVALUATE}"),
        ("sft", "cosine", EVALUATE),  # every rate so far would have been another
        ("rm", "constant", MORE),  # a reward model has nothing to sample
        ("rm", "linear", "start another one"),
        ("sample", None, "start another one"),
    ],
)
def test_what_can_be_done_with_a_finished_run(verb: str, schedule: str | None, remedy: str) -> None:
    plain = {"verb": verb} | ({"trainer": {"schedule": schedule}} if schedule else {})
    assert after_the_end(plain, RUN, 5) == remedy
