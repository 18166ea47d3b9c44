"""What rlft uses of other libraries, end to end and small, and that none of them warns on the user's terminal.

scripts/test_versions.py runs this file with the oldest and with the newest versions that pyproject.toml allows.
"""

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft import cli

pytestmark = pytest.mark.slow

HIDDEN_BY_PYTHON = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Warnings that Python by itself shows to nobody."""

TRAIN = (
    "+recipe=grpo_arithmetic", "steps=2", "prompts_per_step=2", "group_size=2", "generation=transformers",
    "generation.max_tokens=16", "lora.rank=2", "lora.alpha=4", "data.size=16", "data.held_out_size=8", "eval.every=2",
    "eval.num_prompts=4", "checkpoint.every=1", "trainer.schedule=constant", "model.device=cpu", "scoring.workers=0",
    "console=null",
)  # fmt: skip
COMMON = ("steps=1", "lora.rank=2", "lora.alpha=4", "model.device=cpu", "console=null", "max_completion_tokens=64")

Command = Callable[..., str]


@pytest.fixture
def command(capfd):
    """Runs a command line that ends well and returns what it printed; no library may warn."""

    def run(*words: object) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            code = cli.run([str(word) for word in words])
        told = capfd.readouterr()
        assert code == 0, told.err
        seen = [str(w.message) for w in caught if not issubclass(w.category, HIDDEN_BY_PYTHON)]
        assert seen == [], words
        strange = [line for line in told.err.splitlines() if "Warning" in line or "deprecated" in line]
        assert strange == [], words
        return told.out

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps that was resumed to four."""
    folder = tmp_path_factory.mktemp("versions") / "run"
    assert cli.run(["train", *TRAIN, f"hydra.run.dir={folder}"]) == 0
    assert cli.run(["resume", str(folder), "steps=4"]) == 0
    return folder


def losses(folder, name="loss/total"):
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_trained_and_goes_on_as_if_never_stopped(command, run, tmp_path):
    words = ["steps=4" if word == "steps=2" else word for word in TRAIN]
    command("train", *words, f"hydra.run.dir={tmp_path / 'whole'}")
    assert len(losses(run)) == 4
    for name in ("reward/mean", "loss/total"):
        assert losses(run, name) == losses(tmp_path / "whole", name)


@pytest.mark.parametrize("setting", ["true", "false", "auto"])
def test_gradient_checkpointing_is_switched_without_a_warning(setting, command, tmp_path):
    words = ["demonstrations.path=embedded:arithmetic-demonstrations", f"model.gradient_checkpointing={setting}"]
    command("sft", *words, *COMMON, "examples_per_step=2", "eval.every=0", f"hydra.run.dir={tmp_path / 'run'}")
    assert len(losses(tmp_path / "run")) == 1


def test_a_critic_a_moving_reference_and_a_reward_model_are_trained(command, tmp_path):
    words = [word for word in TRAIN if not word.startswith(("+recipe", "eval."))]
    words += ["+recipe=ppo_arithmetic", "snapshot.reference=copy", "eval.every=0"]
    command("train", *words, f"hydra.run.dir={tmp_path / 'ppo'}")
    assert len(losses(tmp_path / "ppo")) == 2
    words = ["preferences.path=embedded:arithmetic-preferences", "rankings_per_step=2", "eval.every=1"]
    command("rm", *words, *COMMON, f"hydra.run.dir={tmp_path / 'rm'}")
    assert len(losses(tmp_path / "rm")) == 1


def test_a_run_is_evaluated_and_sampled(command, run, tmp_path):
    assert "mean@2" in command("eval", f"run={run}", "eval.num_samples=2")
    command("sample", f"run={run}", "n=2", "num_prompts=2", "dedupe=false", f"hydra.run.dir={tmp_path / 'drawn'}")
    assert len((tmp_path / "drawn" / "samples.jsonl").read_text().splitlines()) == 4


def test_exports_are_loaded_by_transformers_with_their_chat_template(command, run, tmp_path):
    command("export", f"run={run}", f"out={tmp_path / 'model'}")
    command("export", f"run={run}", f"out={tmp_path / 'adapter'}", "as=adapter")
    texts = []
    for name in ("model", "adapter"):
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / name)
        texts.append(tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1?"}], tokenize=False))
    assert texts[0] == texts[1]
    assert "1 + 1?" in texts[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = tokenizer("1 + 1?", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape[:2] == ids.shape


def test_a_run_is_planned_and_a_sweep_expanded_by_hydra(command, tmp_path):
    assert json.loads(command("plan", "+recipe=grpo_arithmetic", "model.device=cpu", "--json"))["fits"]
    words = ["steps=1", "trainer.lr=1e-3,2e-3", "eval.every=0", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    command("train", "-m", *[word for word in TRAIN if not word.startswith(("steps", "eval"))], *words)
    assert [len(losses(tmp_path / "sweep" / job)) for job in ("0", "1")] == [1, 1]
