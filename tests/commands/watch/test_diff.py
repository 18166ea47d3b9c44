"""`rlft diff`: the keys and metrics in which two runs differ, and at which steps they are compared."""

import json
import shutil

import pytest
from audited_runs import lines_of, write


def test_what_differs_is_the_key_that_was_changed(made, ran):
    pair = [str(made / "first" / name) for name in "ab"]
    told = json.loads(ran(["diff", *pair, "--json"]).out)
    assert [(row["name"], row["second"]) for row in told["config"]] == [("trainer.lr", 0.01)]
    metrics = {row["name"]: row for row in told["metrics"]}
    assert (metrics["steps"]["first"], metrics["steps"]["second"]) == (3, 3)
    last = lines_of(made / "first" / "b" / "metrics.jsonl")[-1]
    assert metrics["reward/mean"]["second"] == last["reward/mean"], "a tenth of three steps is the last one"
    assert metrics["policy/lr"]["second"] == 0.01
    page = ran(["diff", *pair]).out
    assert "trainer.lr" in page
    assert "accuracy at last (step 3)" in page
    assert "metrics up to the last step that both have done: means of step 3\n" in page


@pytest.mark.parametrize(("at", "spans", "evaluated", "sentence"), [
    ("common", [[37, 40], [37, 40]], [20, 20], "the last step that both have done: means of steps 37 to 40\n"),
    ("last", [[91, 100], [37, 40]], [100, 40], "own last step: means of steps 91 to 100 and steps 37 to 40\n"),
])  # fmt: skip
def test_it_is_said_at_which_steps_runs_are_compared(at, spans, evaluated, sentence, made, tmp_path, ran):
    """Runs of 100 and 40 steps, whose reward is the step and whose accuracy is the step / 200."""
    pair = []
    for name, steps in (("long", 100), ("short", 40)):
        shutil.copytree(made / "first" / "a", tmp_path / name)
        pair.append(str(tmp_path / name))
        lines = [{"step": step, "reward/mean": float(step)} for step in range(1, steps + 1)]
        write(tmp_path / name / "metrics.jsonl", lines)
        measured = [{"step": step, "accuracy": step / 200} for step in (0, 20, steps)]
        write(tmp_path / name / "eval.jsonl", measured)
    told = json.loads(ran(["diff", *pair, f"at={at}", "--json"]).out)
    assert (told["at"], told["steps_of_means"]) == (at, spans), "a tenth of 100 and of 40 steps"
    rows = {row["name"]: row for row in told["metrics"]}
    assert [rows["steps"][name] for name in ("first", "second")] == [100, 40]
    assert rows["reward/mean"]["second"] == sum(spans[1]) / 2
    assert (rows["accuracy at last"]["steps"], rows["accuracy at first"]["steps"]) == (evaluated, [0, 0])
    assert [rows["accuracy at last"][name] for name in ("first", "second")] == [step / 200 for step in evaluated]
    assert rows["reward/mean"]["first"] == sum(spans[0]) / 2
    assert sentence in ran(["diff", *pair, f"at={at}"]).out
