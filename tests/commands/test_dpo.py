"""Preference optimisation: what an update learns, what is compared with a reference, what a run leaves behind."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlft import cli
from rlft.commands.preferences import REFERENCE_LOGPROBS, open_task
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.runs.find import with_named_runs

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # of LoRA on GPT-2

TINY = (
    "+recipe=dpo_arithmetic",
    "lora.rank=4",
    "lora.alpha=8",
    "steps=3",
    "rankings_per_step=8",
    "model.device=cpu",
    "eval.num_rankings=12",
    "logger=[jsonl]",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert cli.run(["dpo", *TINY, f"hydra.run.dir={folder}"]) == 0
    return folder


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def test_three_updates_move_the_pairs_apart(trained: Path) -> None:
    first, last = evaluations(trained)
    assert (first["eval/margin"], first["accuracy"]) == (0.0, 0.5)
    assert last["eval/margin"] > 0.005
    assert last["accuracy"] > 0.7
    files = {file.name for file in (trained / "checkpoints" / "step_000003").iterdir()}
    assert {"policy", f"{REFERENCE_LOGPROBS}.safetensors"} < files
    kept = load_file(trained / "checkpoints" / "step_000003" / f"{REFERENCE_LOGPROBS}.safetensors")
    assert (len(kept["positions"]), len(kept["logprobs"])) == (24, 48)  # 3 updates x 8 pairs, and both ends of each


def test_another_round_begins_as_its_reference_wherever_the_first_one_ended(trained: Path) -> None:
    """lora.path=<run> is the policy's start and, by snapshot.reference=auto, the reference: their log-ratios are 0."""
    with ExitStack() as stack:
        task = open_task(resolve(with_named_runs(compose([*TINY, f"lora.path={trained}"], verb="dpo"))).plan(), stack)
        assert task.plan.reference == str(trained / "checkpoints" / "step_000003" / "policy")
        metrics = task.evaluate(0).metrics
        assert metrics["eval/margin"] == 0.0
        assert metrics["eval/chosen_logprob"] == pytest.approx(
            evaluations(trained)[-1]["eval/chosen_logprob"], rel=1e-5
        )
    with ExitStack() as stack:  # held to the base, it begins where the first round ended
        words = [*TINY, f"lora.path={trained}", "snapshot.reference=base"]
        metrics = open_task(resolve(with_named_runs(compose(words, verb="dpo"))).plan(), stack).evaluate(0).metrics
        assert metrics["eval/margin"] == pytest.approx(evaluations(trained)[-1]["eval/margin"], rel=1e-4)


def test_its_run_is_evaluated_talked_to_and_exported_as_any_policys(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    small = ["generation=transformers", "generation.max_tokens=16", "model.device=cpu"]
    words = [f"run={trained}", "data=arithmetic", "data.size=16", "data.held_out_size=4", "scoring.workers=0", *small]
    assert cli.run(["eval", *words, "eval.num_samples=2"]) == 0
    assert "pass@2" in capfd.readouterr().out
    assert cli.run(["chat", f"run={trained}", "model.device=cpu"]) == 0
    assert cli.run(["export", f"run={trained}", f"out={tmp_path / 'model'}"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| Loss | dpo: beta=0.1, " in card
    assert "- dpo" in card
    assert "| margin | 0.0000 |" in card


def test_its_plan_counts_the_log_probs_that_a_checkpoint_keeps() -> None:
    """926 pairs: a position and two log-probs each, of 8 bytes, are 2 x 3 x 926 numbers of 4; three copies are kept."""
    made = resolve(compose(TINY, verb="dpo")).plan()
    free = resolve(compose([*TINY, "loss=simpo"], verb="dpo")).plan()
    assert len(made.train.rankings) == 926
    every = made.config.checkpoint
    copies = min(every.keep + 1, 1 + (made.num_steps - 1) // every.every)
    assert made.disk_bytes()["checkpoints"] - free.disk_bytes()["checkpoints"] == copies * 4 * 2 * 3 * 926
