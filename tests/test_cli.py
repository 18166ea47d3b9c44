"""The command line as a user meets it: commands, exit codes, what is printed, and what is not imported."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from in_one_test import each
from run_processes import Ended, Nursery
from slow_cases import slow

import rlft as package
from rlft import cli
from rlft.commands.lists import GROUPS, group_of
from rlft.commands.translate import LIBRARIES
from rlft.config import catalog, command as commands
from rlft.config.suggest import translated_peers
from rlft.plan.cards import CARDS

# A run of two steps: 2 prompts x 2 completions, evaluated on 2 prompts.
TINY = [
    "+recipe=grpo_arithmetic", "steps=2", "prompts_per_step=2", "group_size=2", "generation.max_tokens=16",
    "scoring.workers=1", "eval.num_prompts=2", "eval.num_samples=2", "generation=transformers", "model.device=cpu",
]  # fmt: skip


def fresh_rlft(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The console script, as its entry point starts it: the current folder is not on Python's path."""
    command = [sys.executable, "-P", "-c", "from rlft.cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def trained(forks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    place = tmp_path_factory.mktemp("trained")
    done = forks.run("train", *TINY, "checkpoint.every=1", cwd=place)
    assert done.code == 0, done.err
    (folder,) = (place / "runs" / "grpo_arithmetic").iterdir()
    return folder


@pytest.mark.parametrize("words", ["--help", "train --help", "recipes", "algorithms gspo", "models qwen"])
def test_help_takes_a_few_imports_of_hydra_and_no_torch(words: str) -> None:
    code = (
        "import sys; from rlft import cli; c = cli.run(sys.argv[1:]); print([m for m in sys.modules if m in HEAVY]); "
    )
    heavy = ("torch", "transformers", "peft", "datasets", "vllm")
    command = [sys.executable, "-c", f"HEAVY = {heavy}; {code} sys.exit(c)", *words.split()]

    def processor_seconds(words: list[str]) -> tuple[float, str]:
        before = os.times()
        shown = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
        after = os.times()
        user, system = after.children_user - before.children_user, after.children_system - before.children_system
        return user + system, shown

    # 4 to 6 times as much, on whatever machine: `train --help` composes a config, which Hydra does once more.
    hydra, _ = processor_seconds([sys.executable, "-c", "import hydra, hydra._internal.hydra, omegaconf, rich.console"])
    taken, shown = processor_seconds(command)
    assert shown.splitlines()[-1] == "[]"
    assert taken < 12 * hydra


@pytest.mark.parametrize("words", ["train --help", "train --cfg job", "train --cfg nonsense"])
def test_what_hydra_answers_leaves_the_process_as_it_was(words: str) -> None:
    root = logging.getLogger()
    before = [*root.handlers], root.level, sys.argv
    cli.run(words.split())
    assert ([*root.handlers], root.level, sys.argv) == before


def test_train_help_shows_groups_recipes_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "rlft train +recipe=grpo_arithmetic " in shown
    assert "--config-dir" in shown


@pytest.mark.parametrize("command", commands.OWN)
def test_a_commands_help_shows_its_own_groups_and_recipes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: rlft {command} " in shown
    told = dict(line.split(": ", 1) for line in shown.splitlines() if re.match(r"[a-z]+: ", line))
    others = set(catalog.groups()) - set(catalog.groups(command))
    assert not told.keys() & others
    for group in catalog.groups(command):
        if catalog.choices(group, command):
            assert told[group] == ", ".join(catalog.choices(group, command))


def test_recipes_are_listed_in_groups_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "qa.yaml").write_text("# @package _global_\n# My questions\ncommand: sft\n")
    assert cli.run(["recipes", "--config-dir", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert page.endswith("Yours\n  sft    qa                        My questions\n")
    assert len(page.splitlines()) <= 40 + 2  # those of the user's own group
    assert max(map(len, page.splitlines())) <= 80
    assert {*catalog.choices("recipe")} <= {*re.findall(r"\w+", page)}
    grouped = {group_of(catalog.files("recipe")[name]) for name in catalog.choices("recipe")}
    assert grouped == {*GROUPS} - {"Yours"}


def test_recipes_of_a_pattern_are_listed_with_their_whole_text(capsys: pytest.CaptureFixture[str]) -> None:
    for pattern, names in {"GSM8K": 5, "ppo_*": 5, "r1": 5}.items():
        assert cli.run(["recipes", pattern]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rlft ")]
        assert len(lines) >= names
        assert all(f"rlft {catalog.command_of(line.partition('=')[2])} +" in line for line in lines)


def test_cfg_job_prints_the_config_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "+recipe=grpo_arithmetic", "trainer.lr=0.5", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "name: grpo_arithmetic" in shown
    assert "  lr: 0.5" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--version"], ["version"], ["-V"]], ids=" ".join)
def test_the_version_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 0
    assert capsys.readouterr().out.startswith("rlft 0.")


@each("command", [*commands.OWN, *cli.TOOLS])
def test_the_help_of_every_command_begins_with_what_it_does_and_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([command, "--help"]) == 0
    what, space, example, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"rlft {command}: .{{10,}}", what)
    assert not space
    assert re.match(f"  rlft {command}( |$)", example)


def test_usages_list_all_choices_that_the_code_has() -> None:
    assert ", ".join(CARDS) in cli.usage_of("plan")[1]
    assert {*LIBRARIES.split("|")} == {*translated_peers()}
    assert all(LIBRARIES in cli.usage_of(tool)[1] for tool in ("init", "translate"))


def test_the_page_of_commands_fits_a_small_terminal() -> None:
    lines = cli.usage().splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[:2]] == ["rlft"] * 2
    parts = [line.split()[0] for line in lines[3:] if re.match("[A-Z][a-z]+  ", line)]
    assert parts == ["Train", "Inspect", "Use", "Help"]
    assert {line[9:].split()[0] for line in lines[3:-3]} == {*commands.OWN, *cli.TOOLS}


def evaluated(folder: Path) -> list[dict]:
    """The lines of the one evaluation file below a folder: metrics first, then a line a completion."""
    (file,) = folder.rglob("evaluations/*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_evaluation(done: Ended, lines: Sequence[dict], step: int) -> None:
    assert done.code == 0, done.err
    assert "mean@3 (exact_match)" in done.out
    assert "pass@1" in done.out
    assert "maj@3" in done.out
    assert "standard error" in done.out
    assert lines[0]["step"] == step
    assert len(lines) == 1 + 2 * 3  # metrics, then 2 prompts x 3 samples
    assert {"prompt_id", "prompt", "answer", "completion", "rewards"} <= lines[1].keys()
    assert all(line["read"].keys() == {"exact_match"} for line in lines[1:])
    assert all(line["read"]["exact_match"] == line["answer"] for line in lines[1:] if line["rewards"]["exact_match"])
    rights = [line["rewards"]["exact_match"] for line in lines[1:]]
    assert lines[0]["accuracy"] == pytest.approx(sum(rights) / 6)


@each("words", ["watch", "report", "resume", "resume steps=2", "chat", "chat raw=true", "eval", "eval seed=1"])
def test_without_a_name_it_is_the_latest_run(
    words: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained.parents[2])
    sources: list[object] = []
    for command in ("chat", "eval"):
        monkeypatch.setattr(f"rlft.commands.{command}.run", lambda resolved, source, *rest: sources.append(source.run))
    cli.run(words.split())
    run = trained.relative_to(trained.parents[2])
    assert f"latest: {run}\n" in capsys.readouterr().err
    assert sources == [run] * (words.split()[0] in ("chat", "eval"))


SAMPLES = ("eval.num_samples=3", "eval.num_prompts=2")


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("run={}",), 2),
        (("{}/checkpoints/step_000001",), 1),  # run= may be left out
        slow(("run={}", "data=arithmetic", "data.difficulty=3"), 2),
    ],
    ids=["the newest checkpoint", "a checkpoint", "other data"],
)
def test_a_run_is_evaluated(words: Sequence[str], step: int, forks: Nursery, trained: Path, tmp_path: Path) -> None:
    done = forks.run("eval", *(word.format(trained) for word in words), *SAMPLES, cwd=tmp_path)
    lines = evaluated(trained)
    check_evaluation(done, lines, step)
    of_difficulty_3 = [re.search(r"[0-9]{3} [+-] [0-9]{3}", line["prompt"][-1]["content"]) for line in lines[1:]]
    assert all(of_difficulty_3) == ("data.difficulty=3" in words)
    (file,) = trained.rglob("evaluations/*.jsonl")
    file.unlink()


def test_a_bare_model_is_evaluated(forks: Nursery, tmp_path: Path) -> None:
    words = ["model.path=embedded:tiny-arithmetic", "data=arithmetic", "generation.max_tokens=16"]
    done = forks.run("eval", *words, *SAMPLES, cwd=tmp_path)
    check_evaluation(done, evaluated(tmp_path / "runs" / "eval"), step=0)


MINE = """
def short(group):
    return [1.0 if len(r.completion.token_ids) < 12 else 0.0 for r in group.rollouts]

def broken(group):
    raise KeyError("no such thing")
"""


@pytest.fixture
def own_rewards(tmp_path: Path) -> Path:
    """A folder with a module of somebody's own beside where they run, and the YAML that names its rewards."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "yaml" / "reward").mkdir(parents=True)
    for name in ("short", "broken"):
        text = f"# Mine.\n{name}:\n  _target_: mine.{name}\n  weight: 0.5\n"
        (tmp_path / "yaml" / "reward" / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.mark.parametrize("beside", [slow("where it runs"), "the YAML"])
def test_a_reward_from_outside_the_tree_is_found_and_scores(forks: Nursery, own_rewards: Path, beside: str) -> None:
    if beside == "the YAML":
        (own_rewards / "mine.py").rename(own_rewards / "yaml" / "mine.py")
    done = forks.run("train", *TINY, "--config-dir", "yaml", "reward=[exact_match,short]", cwd=own_rewards)
    assert done.code == 0, done.err
    (metrics,) = own_rewards.rglob("metrics.jsonl")
    first = json.loads(metrics.read_text().splitlines()[0])
    assert {"reward/exact_match", "reward/short"} <= first.keys()


def test_a_reward_that_raises_ends_the_run_with_1_and_a_line(forks: Nursery, own_rewards: Path) -> None:
    done = forks.run("train", *TINY, "--config-dir", "yaml", "reward=[broken]", "eval.every=0", cwd=own_rewards)
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("rlft: stopped: ")
    assert "broken" in last
    assert "no such thing" in last
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    """As in `rlft train .. 2>&1 | head -1`: both streams are pipes whose reader has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from rlft.cli import main; main()", "train", *TINY, "eval.every=0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    try:
        code = subprocess.run(command, cwd=tmp_path, env=environment, stdout=writing, stderr=writing, timeout=300)
    finally:
        os.close(writing)
    (folder,) = (tmp_path / "runs" / "grpo_arithmetic").iterdir()
    told = json.loads((folder / "status.json").read_text())
    assert (code.returncode, told["status"]) == (0, "finished"), told
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_users_folder_named_like_a_library_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    assert fresh_rlft("train", *TINY, "steps=1", "eval.every=0", cwd=tmp_path).returncode == 2  # steps is given twice
    once = [word for word in TINY if not word.startswith("steps=")]
    done = fresh_rlft("train", *once, "steps=1", "eval.every=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
