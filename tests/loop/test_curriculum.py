"""Runs whose prompts are chosen by pass rates: what is counted, and that a resumed run is the same run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from run_folders import check_same, metrics
from slow_cases import slow

from rlft import cli

WORDS = (
    "steps=4", "prompts_per_step=3", "group_size=4", "generation=transformers", "generation.max_tokens=24",
    "lora.rank=2", "trainer.lr=3e-3", "model.device=cpu", "data.size=12", "eval.every=0", "scoring.workers=0",
    "console=null", "name=x", "checkpoint.every=1", "checkpoint.keep=9", "token_values=null",
    "curriculum.running=true", "curriculum.replay=0.4", "curriculum.memory=0.5", "curriculum.below=1",
)  # fmt: skip
AHEAD = ("overlap.lag=1", "algorithm.mismatch=token_truncate", "dynamic_sampling.max_rounds=1")


def train(folder: Path, *words: str) -> int:
    given = {word.partition("=")[0] for word in words}
    kept = (word for word in WORDS if word.partition("=")[0] not in given)
    return cli.run(["train", *kept, *words, f"hydra.run.dir={folder}"])


def run(folder: Path, *words: str) -> Path:
    assert train(folder, *words) == 0
    return folder


def rows_of(folder: Path, step: int) -> dict[str, list[float]]:
    """{prompt id: the first rewards of its completions} of a step."""
    found: dict[str, list[float]] = {}
    for line in (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["prompt_id"], []).append(row["rewards"]["exact_match"])
    return found


@pytest.mark.parametrize("ahead", [slow(()), AHEAD], ids=["in time", "a step ahead, with dynamic sampling"])
def test_a_resumed_run_and_a_longer_one_are_the_same_run(ahead: tuple[str, ...], tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", *ahead)
    assert all(len(rows_of(straight, step)) == 3 for step in range(1, 5))
    plain = run(tmp_path / "plain", *ahead, "curriculum.running=false", "curriculum.replay=0", "curriculum.below=null")
    assert [set(rows_of(plain, step)) for step in range(1, 5)] != [set(rows_of(straight, s)) for s in range(1, 5)]
    assert not any(name.startswith("curriculum/") for name in metrics(plain)[-1])

    shutil.copytree(straight, tmp_path / "resumed")
    for later in (3, 4):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{later:06d}")
    assert cli.run(["resume", str(tmp_path / "resumed")]) == 0
    check_same(tmp_path / "resumed", straight)

    longer = run(tmp_path / "longer", *ahead, "steps=2")
    assert cli.run(["resume", str(longer), "steps=4"]) == 0
    shutil.rmtree(longer / "checkpoints" / "step_000002")
    shutil.copytree(straight / "checkpoints" / "step_000002", longer / "checkpoints" / "step_000002")
    check_same(longer, straight)


def test_the_runs_own_groups_are_counted(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "steps=2", "curriculum.memory=1.0")
    counted: dict[str, list[float]] = {}
    for step in (1, 2):
        for name, rewards in rows_of(folder, step).items():
            counted.setdefault(name, []).extend(rewards)
    from safetensors.torch import load_file

    saved = load_file(folder / "checkpoints" / "step_000002" / "curriculum.safetensors")
    expected = sorted((sum(rewards), len(rewards) - sum(rewards)) for rewards in counted.values())
    assert sorted(zip(saved["right"].tolist(), saved["wrong"].tolist(), strict=True)) == expected
    left_out = sum(right > 0 == wrong for right, wrong in expected) / 12
    last = metrics(folder)[-1]
    assert last["curriculum/known_fraction"] == len(counted) / 12
    assert last["curriculum/left_out_fraction"] == left_out


def test_pass_rates_of_a_file_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generation=transformers", "generation.max_tokens=24", "model.device=cpu", "data.size=12", "dedupe=false")
    sampled = tmp_path / "sampled"
    assert cli.run(["sample", *words, "n=4", "scoring.workers=0", f"hydra.run.dir={sampled}"]) == 0
    rates: dict[str, float] = {}
    for line in (sampled / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        rates[row["prompt_id"]] = rates.get(row["prompt_id"], 0.0) + row["rewards"]["exact_match"] / 4
    between = {name for name, rate in rates.items() if 0 < rate < 1}
    assert 3 <= len(between) < 12
    fixed = ("curriculum.running=false", f"curriculum.path={sampled / 'samples.jsonl'}", "curriculum.above=0")
    folder = run(tmp_path / "run", *fixed)
    assert all(set(rows_of(folder, step)) <= between for step in range(1, 5))
    assert {line["curriculum/left_out_fraction"] for line in metrics(folder)} == {1 - len(between) / 12}

    assert train(tmp_path / "other", *fixed, f"prompts_per_step={len(between) + 1}") == 2
    assert f"the curriculum leaves {len(between)} of 12 train prompts" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    lines = (sampled / "samples.jsonl").read_text().replace('"exact_match": 1.0', '"exact_match": 0.0', 1)
    (sampled / "samples.jsonl").write_text(lines)
    capsys.readouterr()
    assert cli.run(["resume", str(folder)]) == 2
    assert "curriculum.path: the file of pass rates changed since the run began" in capsys.readouterr().err
