"""The pipelines' scripts: what they check first, what each stage is and reached, and what stands for a taste."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import stage_table
import torch
import yaml
from fresh_export import fresh_export

from rlft.commands.rank import read_rows
from rlft.config import command as commands
from rlft.config.compose import compose
from rlft.config.instantiate import from_mapping
from rlft.config.resolved import build, resolve
from rlft.config.trainer import TrainerConfig
from rlft.loop.supervised import open_preferences
from rlft.trainer.optimizer import Optimizer, learning_rate

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "scripts"
PIPELINES = ("rlhf_arithmetic", "r1_arithmetic")
# What a recipe must be given before it composes: here things that are there.
NAMED = {"rlhf_rm_arithmetic": ["preferences.path=embedded:arithmetic-preferences"]}

Recorded = Callable[[], list[list[str]]]

# Stand in for rlft: a line of JSON a command, and for the Python that prints the table of stages, which left nothing.
RECORDER = """#!/bin/bash
{python} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >> {calls}
"""
NO_TABLE = """#!/bin/bash
case "$1" in *stage_table.py) exit 0 ;; esac
exec {python} "$@"
"""


@pytest.fixture
def recorder(tmp_path):
    """tmp_path/bin/rlft writes down its words; called, this returns those of every command so far."""
    calls = tmp_path / "calls.jsonl"
    (tmp_path / "bin").mkdir()
    for name, text in (("rlft", RECORDER), ("python", NO_TABLE)):
        (tmp_path / "bin" / name).write_text(text.format(python=sys.executable, calls=calls))
        (tmp_path / "bin" / name).chmod(0o755)
    return lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def start(script, *words, path="/usr/bin:/bin", **variables):
    """Runs a script with this PATH; rlft is imported from the repository."""
    unset = ("RLFT", "PYTHON", "SEED", "PTX")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"PATH": path, "PYTHONPATH": str(SCRIPTS.parent), **variables}
    command = ["bash", str(script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def composed(command, words):
    """The stage's config. A run that a stage names stands for what it made, which is not there: its place is kept."""
    return compose([word for word in words if not word.startswith(("resume=", "run="))], command=command)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_stage_is_a_config_that_passes_with_the_seed_that_was_set(pipeline, tmp_path, recorder):
    done = start(SCRIPTS / f"{pipeline}.sh", str(tmp_path / "out"), RLFT=str(tmp_path / "bin" / "rlft"), SEED="3")
    assert done.returncode == 0, done.stderr
    stages = [call for call in recorder() if call[0] != "export"]
    exported = len(recorder()) - len(stages)
    assert (len(stages), exported) == {"rlhf_arithmetic": (4, 0), "r1_arithmetic": (13, 1)}[pipeline]
    for command, *words in stages:
        config = build(composed(command, words), commands.named(command).root, command)
        [folder] = [Path(word).name for word in words if word.startswith("hydra.run.dir=")]
        assert config.seed == 3, folder
        assert "resume=auto" in words, folder
        assert re.search(rf'={folder}["\s]', (SCRIPTS / f"{pipeline}.sh").read_text()), "the table has it"


def test_a_model_is_exported_again_where_its_run_is_another_one(tmp_path):
    calls: list[tuple[str, ...]] = []

    def rlft(*words: str) -> None:
        calls.append(words)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(str(len(calls)))

    def made(step: int, manifest: str) -> int:
        """Exports after the run has this checkpoint; returns how often that has been done."""
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "MANIFEST").write_text(manifest)
        fresh_export(tmp_path / "run", tmp_path / "model", rlft)
        assert (tmp_path / "model" / "config.json").read_text() == str(len(calls))
        return len(calls)

    assert [made(1, "a"), made(1, "a"), made(1, "b"), made(2, "b2"), made(2, "b2"), made(1, "c")] == [1, 1, 2, 3, 3, 3]
    assert set(calls) == {("export", f"run={tmp_path / 'run'}", f"out={tmp_path / 'model'}")}
    (tmp_path / "model.made_from").unlink()  # as in folders from before there was one, or after a kill
    assert made(2, "b2") == 4


def test_a_missing_rlft_or_extra_is_named_before_the_first_stage(tmp_path, recorder):
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for pipeline in PIPELINES:
        done = start(tmp_path / "scripts" / f"{pipeline}.sh")
        what = "rlft is neither on PATH nor in .venv/bin; run `make demo` once, or set RLFT=<path of the command>"
        assert (done.returncode, done.stderr) == (2, f"{pipeline}.sh: {what}\n")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("import sys\nsys.modules['py3langid'] = None\n")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    hidden = {"PYTHONPATH": f"{tmp_path / 'hidden'}:{SCRIPTS.parent}"}
    done = start(SCRIPTS / "r1_arithmetic.sh", str(tmp_path / "out"), path=path, **hidden)
    assert done.returncode == 2
    assert "needs py3langid, which is not installed; run `" in done.stderr
    assert "scripts/install.py --extras language`" in done.stderr
    assert recorder() == []
    # The other pipeline has no need of it.
    assert start(SCRIPTS / "rlhf_arithmetic.sh", str(tmp_path / "out"), path=path, **hidden).returncode == 0


# -- the table of stages -----------------------------------------------------------------------------------------------
def make_stage(folder, command, *accuracies, progress=None):
    folder.mkdir(parents=True)
    config = {"command": command, "model": {"path": "embedded:tiny"}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in accuracies))
    (folder / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.5}\n{"step": 2, "time/step": 2.0}\n')
    if progress is not None:
        (folder / "progress.json").write_text(json.dumps(progress))


def accuracy(value, **rewards):
    scores = {f"eval/reward/{name}": reward for name, reward in rewards.items()}
    return {"step": 2, "accuracy": value, "accuracy_se": 0.01, **scores}


def test_the_table_has_each_stages_last_numbers_and_the_model_it_began_from(tmp_path, capsys):
    make_stage(tmp_path / "1", "sft", accuracy(0.25, format=0.5), accuracy(0.5, format=1.0))
    make_stage(tmp_path / "2", "sample", progress={"kept": 7, "sampled": 9, "prompts_kept": 3})
    make_stage(tmp_path / "3", "rm", accuracy(0.5), accuracy(0.75))
    make_stage(tmp_path / "4", "train", accuracy(0.5), accuracy(0.875, learned=1.25))
    make_stage(tmp_path / "5", "train", accuracy(0.5), accuracy(0.75))
    steps = ({"step": step, "time/step": 1.75, "teacher/agreement": step / 4} for step in (1, 2, 3))
    (tmp_path / "5" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    numbers = tmp_path / "stages.json"
    words = ["SFT=1", "samples=2", "judge=3", "PPO=4", "judged=5"]
    stage_table.main(["--in", str(tmp_path), "--json", str(numbers), *words])
    assert json.loads(numbers.read_text()) == [
        {"stage": "embedded:tiny, as it is", "accuracy": 0.25, "accuracy_se": 0.01, "format": 0.5},
        {"stage": "SFT", "accuracy": 0.5, "accuracy_se": 0.01, "format": 1.0, "seconds": 3.5},
        {"stage": "samples", "kept": 7, "sampled": 9, "prompts": 3},
        {"stage": "judge", "pairs": 0.75, "pairs_se": 0.01, "seconds": 3.5},
        {"stage": "PPO", "accuracy": 0.875, "accuracy_se": 0.01, "learned": 1.25, "seconds": 3.5},
        {"stage": "judged", "accuracy": 0.75, "accuracy_se": 0.01, "agreement": 0.75, "seconds": 5.25},
    ]
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("0.875 ± 0.010", "7 of 9, 3 prompts", "in common"))


# -- a person's taste --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def taste():
    spec = importlib.util.spec_from_file_location("taste", SCRIPTS / "rlhf_text" / "taste.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIKED = {
    "The apple is sweet and red.": 3, "It is a sweet and red fruit.": 2, "the apple is sweet and red.": 2,
    "The apple is sweet. It is red.": 2, "The apple is sweet and red": 2, "Apples are red and sweet fruits!": 3,
    "Apple.": 2 + 1 / 6, "Apple sauce is good.": 2 + 4 / 6, "The apple" + " is" * 16 + ".": 2.5,
    "The apple" + " is" * 99 + ".": 2, "": 0, "a b c d e f": 1,
}  # fmt: skip


def test_a_sentence_of_six_to_twelve_words_about_the_subject_is_liked_best(taste):
    for text, liked in LIKED.items():
        assert taste.liking(text, "apple") == pytest.approx(liked / 3), text
    rollouts = [SimpleNamespace(completion=SimpleNamespace(text=text)) for text in LIKED]
    group = SimpleNamespace(prompt=SimpleNamespace(answer="apple"), rollouts=rollouts)
    assert taste.taste(group) == [taste.liking(text, "apple") for text in LIKED]


def test_answers_are_ranked_as_liked_and_each_prompt_once(taste, tmp_path):
    taste.write_prompts(tmp_path / "prompts.jsonl")
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({prompt["answer"] for prompt in prompts}) == len(prompts) > 100
    answers = ["{} is what I think of now.", "No.", "Yes.", "{} and more"]
    lines = [
        {
            "prompt_id": row["answer"], "index": index, "prompt": [{"role": "user", "content": row["prompt"]}],
            "answer": row["answer"], "completion": text.format(row["answer"].capitalize()), "token_ids": [1],
            "finish_reason": "stop", "rewards": {}, "reward": 0.0, "model": "m", "tokenizer": "t",
        }
        for row in prompts[:3]
        for index, text in enumerate(answers)
    ]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        taste.rank(tmp_path / "samples.jsonl", tmp_path / "rankings.jsonl")
    rows = [row for _, row in read_rows(tmp_path / "rankings.jsonl", "out")]
    assert len(rows) == 3
    for row in rows:
        scores = dict(zip(row["completions"], row["scores"], strict=True))
        assert scores["No."] == scores["Yes."] == 0
        assert [score for text, score in scores.items() if "think" in text] == [max(scores.values())] == [2]


# -- results that last bits do not decide ------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", ["rlhf_rm_arithmetic", "rlhf_ppo_arithmetic", "r1_cold_start_arithmetic"])
def test_a_stage_whose_updates_amplify_differences_ends_at_a_rate_of_almost_zero(recipe):
    """At a constant rate the result would be wherever the last update threw it; recipes built on these inherit it."""
    config = yaml.safe_load((SCRIPTS.parent / "recipes" / f"{recipe}.yaml").read_text())
    trainer = composed(config.get("command", "train"), [f"+recipe={recipe}", *NAMED.get(recipe, ())])["trainer"]
    last = learning_rate(from_mapping(TrainerConfig, trainer, "trainer"), 199, 200)
    assert 0 < last < 1e-3 * trainer["lr"]


def test_a_reward_models_first_updates_keep_a_last_bit_small():
    """Weights that differ by 1e-7 of themselves, as after sums in another order, give scores that differ by less than
    2e-6 of their deviation after ten updates: 9e-7 was measured; at five times the rate 2.8e-6, at 25 times 1.3e-3.
    """
    words = ["+recipe=rlhf_rm_arithmetic", "preferences.path=embedded:arithmetic-preferences", "rankings_per_step=8"]
    plan = resolve(composed("rm", [*words, "model.device=cpu"])).plan()

    def scores(perturbation: float) -> torch.Tensor:
        with ExitStack() as stack:
            task = open_preferences(plan, stack)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for _, parameter in task.parameters():
                    parameter.mul_(1 + perturbation * torch.randn(parameter.shape, generator=generator))
            optimizer = Optimizer(task.parameters(), plan.config.trainer, task.role)
            for step in range(10):
                task.backward(step)
                optimizer.update(learning_rate(plan.config.trainer, step, plan.num_steps))
            return task._values_by(task.role, plan.held_out.rankings[:20])

    one, other = scores(0.0), scores(1e-7)
    assert 0 < (one - other).abs().max() < 2e-6 * one.std()
