"""`rlft audit of=trl` of the real TRL: a healthy run agrees, and each bug that is planted in it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trl_runs import BUGS, recorded

from rlft import cli


def audited(file: Path, claimed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """(exit code, {name of the row: the row})."""
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in claimed.items()]
    capsys.readouterr()
    code = cli.run(["audit", str(file), "of=trl", *words, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    return code, {row["name"]: row for row in rows}


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_healthy_run_agrees_to_a_millionth(
    loss_type: str, tmp_path: Path, tiny_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(tmp_path, tiny_path, loss_type=loss_type, log_completions=True)
    code, rows = audited(file, {}, capsys)
    assert code == 0
    wanted = {"advantages", "masks", "losses", "ratios"}
    assert {name for name, row in rows.items() if row["status"] == "ok"} == wanted
    # 16 completions in the one step; four updates, each with a KL, and all but cispo's and sapo's with two shares.
    shares = 0 if loss_type in ("cispo", "sapo") else 2
    for name, number in (("advantages", 16), ("masks", 16), ("losses", 4), ("ratios", 4 + 4 * shares)):
        assert rows[name]["numbers"]["numbers"] == number
        assert rows[name]["numbers"]["furthest"] <= 1e-6, name
    ratios = [json.loads(line) for line in file.read_text().splitlines() if "loss" in json.loads(line)]
    assert ratios[-1]["kl"] > 1e-3, "the second time the policy has moved"

    # The tables that TRL itself writes, in which advantages alone can be recomputed.
    code, rows = audited(tmp_path, {"reward_weights": [1.0, 0.5]}, capsys)
    assert code == 0
    assert {name: row["status"] for name, row in rows.items()} == {
        "rewards": "skipped", "advantages": "ok", "masks": "skipped", "ratios": "skipped", "losses": "skipped",
    }  # fmt: skip
    code, rows = audited(tmp_path, {"reward_weights": [1.0, 0.5], "scale_rewards": "none"}, capsys)
    assert code == 1
    assert rows["advantages"]["value"].endswith("; all numbers agree with scale_rewards=group")


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_named(
    name: str,
    tmp_path: Path,
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, plant, claimed, row, explanation = BUGS[name]
    plant(monkeypatch)
    code, rows = audited(recorded(tmp_path, tiny_path, **settings), claimed, capsys)
    assert code == 1
    assert rows[row]["status"] == "wrong"
    assert rows[row]["value"].endswith(f"; all numbers agree with {explanation}"), rows[row]["value"]
