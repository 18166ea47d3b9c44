"""stop.when=flat ends a run after a whole step, and a resumed one at the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlft import cli
from rlft.loop.driver import RunDriver
from rlft.runs import run_status
from rlft.runs.run_status import Status

# Nothing is learned at this rate, so the sixth evaluation, after step 5, shows that the curve is flat.
WORDS = (
    "preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64", "rankings_per_step=2", "steps=8",
    "lora.rank=2", "lora.alpha=4", "model.device=cpu", "console=null", "eval.every=1", "eval.num_rankings=4",
    "trainer.lr=1e-12", "checkpoint.every=2",
)  # fmt: skip


def steps_in(folder: Path, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


def test_a_flat_curve_ends_the_run_where_it_would_end_without_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, again = tmp_path / "run", tmp_path / "again"
    assert cli.run(["dpo", *WORDS, "stop.when=flat", f"hydra.run.dir={folder}"]) == 0
    assert (steps_in(folder, "metrics.jsonl"), steps_in(folder, "eval.jsonl")) == ([*range(1, 6)], [*range(6)])
    assert saved(folder)[-1] == "step_000005"
    assert run_status.read(folder)[0] is Status.finished

    judge = RunDriver.judge

    def fail_at_5(self: RunDriver, step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt
        judge(self, step)

    with monkeypatch.context() as patched:  # it ends at once after the evaluation, before its checkpoint
        patched.setattr(RunDriver, "judge", fail_at_5)
        assert cli.run(["dpo", *WORDS, "stop.when=flat", f"hydra.run.dir={again}"]) == 130
    assert saved(again)[-1] == "step_000004"
    for _ in range(2):  # the second time there is nothing more to do
        assert cli.run(["resume", str(again)]) == 0
        assert (steps_in(again, "metrics.jsonl"), steps_in(again, "eval.jsonl")) == ([*range(1, 6)], [*range(6)])
        assert (saved(again), run_status.read(again)[0]) == (saved(folder), Status.finished)
    capsys.readouterr()
    assert cli.run(["resume", str(again), "stop.when=never"]) == 0
    assert steps_in(again, "metrics.jsonl") == [*range(1, 9)]
