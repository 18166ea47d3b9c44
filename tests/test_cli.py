"""The command line as a user meets it: commands, exit codes, what is printed, and what is not imported."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from in_one_test import each
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


def run_here(folder, *words):
    """Runs a command in this folder, as in a process of its own that Python's path ends with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        try:
            return cli.run(list(words))
        finally:
            sys.modules.pop("rewards_here", None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run."""
    place = tmp_path_factory.mktemp("trained")
    assert run_here(place, "train", *TINY, "checkpoint.every=1") == 0
    (folder,) = (place / "runs" / "grpo_arithmetic").iterdir()
    return folder


def processor_seconds(words):
    before = os.times()
    shown = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    after = os.times()
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return user + system, shown


def test_help_takes_a_few_imports_of_hydra_and_no_torch():
    heavy = ("torch", "transformers", "peft", "datasets", "vllm")
    typed = ["train --help", "--help", "recipes", "algorithms gspo", "models qwen"]
    code = f"import sys\nfrom rlft import cli\ncodes = [cli.run(words.split()) for words in {typed[:1]}]\n"
    told = f"\nprint(codes, [m for m in sys.modules if m in {heavy}])"
    # 4 to 6 times as much, on whatever machine: `train --help` composes a config, which Hydra does once more.
    hydra, _ = processor_seconds([sys.executable, "-c", "import hydra, hydra._internal.hydra, omegaconf, rich.console"])
    taken, shown = processor_seconds([sys.executable, "-c", code + told])
    assert shown.splitlines()[-1] == "[0] []"
    assert taken < 12 * hydra
    _, shown = processor_seconds([sys.executable, "-c", code.replace(repr(typed[:1]), repr(typed)) + told])
    assert shown.splitlines()[-1] == "[0, 0, 0, 0, 0] []"


@each("words", ["train --help", "train --cfg job", "train --cfg nonsense"])
def test_what_hydra_answers_leaves_the_process_as_it_was(words):
    root = logging.getLogger()
    before = [*root.handlers], root.level, sys.argv
    cli.run(words.split())
    assert ([*root.handlers], root.level, sys.argv) == before


@each("command", [*commands.OWN, *cli.TOOLS])
def test_the_help_of_every_command_begins_with_what_it_does_and_an_example(command, capsys):
    assert cli.run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    what, space, example, *_ = shown.splitlines()
    assert re.fullmatch(f"rlft {command}: .{{10,}}", what)
    assert not space
    assert re.match(f"  rlft {command}( |$)", example)
    if command in commands.OWN:  # and has its own groups and recipes
        assert f"Usage: rlft {command} " in shown
        assert ("--config-dir" in shown) == (command == "train")
        told = dict(line.split(": ", 1) for line in shown.splitlines() if re.match(r"[a-z]+: ", line))
        assert not told.keys() & (set(catalog.groups()) - set(catalog.groups(command)))
        for group in catalog.groups(command):
            if catalog.choices(group, command):
                assert told[group] == ", ".join(catalog.choices(group, command))


def test_recipes_are_listed_in_groups_on_one_page(tmp_path, capsys):
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


def test_recipes_of_a_pattern_are_listed_with_their_whole_text(capsys):
    for pattern, names in {"GSM8K": 5, "ppo_*": 5, "r1": 5}.items():
        assert cli.run(["recipes", pattern]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rlft ")]
        assert len(lines) >= names
        assert all(f"rlft {catalog.command_of(line.partition('=')[2])} +" in line for line in lines)


def test_cfg_job_prints_the_config_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "+recipe=grpo_arithmetic", "trainer.lr=0.5", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "name: grpo_arithmetic" in shown
    assert "  lr: 0.5" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--version"], ["version"], ["-V"]], ids=" ".join)
def test_the_version_is_told(arguments, capsys):
    assert cli.run(arguments) == 0
    assert capsys.readouterr().out.startswith("rlft 0.")


def test_usages_list_all_choices_that_the_code_has():
    assert ", ".join(CARDS) in cli.usage_of("plan")[1]
    assert {*LIBRARIES.split("|")} == {*translated_peers()}
    assert all(LIBRARIES in cli.usage_of(tool)[1] for tool in ("init", "translate"))


def test_the_page_of_commands_fits_a_small_terminal():
    lines = cli.usage().splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[:2]] == ["rlft"] * 2
    parts = [line.split()[0] for line in lines[3:] if re.match("[A-Z][a-z]+  ", line)]
    assert parts == ["Train", "Inspect", "Use", "Help"]
    assert {line[9:].split()[0] for line in lines[3:-3]} == {*commands.OWN, *cli.TOOLS}


@each("words", ["watch", "report", "resume", "resume steps=2", "chat", "chat raw=true", "eval", "eval seed=1"])
def test_without_a_name_it_is_the_latest_run(words, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained.parents[2])
    sources: list[object] = []
    for command in ("chat", "eval"):
        monkeypatch.setattr(f"rlft.commands.{command}.run", lambda resolved, source, *rest: sources.append(source.run))
    cli.run(words.split())
    monkeypatch.undo()
    run = trained.relative_to(trained.parents[2])
    assert f"latest: {run}\n" in capsys.readouterr().err
    assert sources == [run] * (words.split()[0] in ("chat", "eval"))


BARE = "model.path=embedded:tiny-arithmetic data=arithmetic generation.max_tokens=16"


@pytest.mark.parametrize(("words", "step"), [
    ("run={}", 2),
    ("{}/checkpoints/step_000001", 1),  # run= may be left out
    slow("run={} data=arithmetic data.difficulty=3", 2),
    slow(BARE, 0),
], ids=["the newest checkpoint", "a checkpoint", "other data", "a bare model"])  # fmt: skip
def test_a_run_or_a_model_is_evaluated(words, step, trained, tmp_path, capfd):
    typed = words.format(trained).split()
    few = ("eval.num_samples=3", "eval.num_prompts=2", "scoring.workers=0")
    assert run_here(tmp_path, "eval", *typed, *few) == 0
    told = capfd.readouterr().out
    assert all(text in told for text in ("mean@3 (exact_match)", "pass@1", "maj@3", "standard error"))
    (file,) = (tmp_path if words == BARE else trained).rglob("evaluations/*.jsonl")
    metrics, *lines = (json.loads(line) for line in file.read_text().splitlines())
    file.unlink()
    assert (metrics["step"], len(lines)) == (step, 2 * 3)  # 2 prompts x 3 samples
    assert {"prompt_id", "prompt", "answer", "completion", "rewards"} <= lines[0].keys()
    assert all(line["read"].keys() == {"exact_match"} for line in lines)
    assert all(line["read"]["exact_match"] == line["answer"] for line in lines if line["rewards"]["exact_match"])
    assert metrics["accuracy"] == pytest.approx(sum(line["rewards"]["exact_match"] for line in lines) / 6)
    of_difficulty_3 = [re.search(r"[0-9]{3} [+-] [0-9]{3}", line["prompt"][-1]["content"]) for line in lines]
    assert all(of_difficulty_3) == ("data.difficulty=3" in words)


MINE = """
def short(group):
    return [1.0 if len(r.completion.token_ids) < 12 else 0.0 for r in group.rollouts]

def broken(group):
    raise KeyError("no such thing")
"""


@pytest.mark.parametrize("place", [slow("."), "yaml"])
def test_a_reward_from_outside_the_tree_is_found_and_scores_and_ends_the_run_where_it_raises(place, tmp_path, capsys):
    """Its module lies where the command runs, or beside the YAML that names it."""
    (tmp_path / "yaml" / "reward").mkdir(parents=True)
    (tmp_path / place / "rewards_here.py").write_text(MINE)
    for name in ("short", "broken"):
        text = f"# Mine.\n{name}:\n  _target_: rewards_here.{name}\n  weight: 0.5\n"
        (tmp_path / "yaml" / "reward" / f"{name}.yaml").write_text(text)
    words = ["train", *TINY, "--config-dir", "yaml", "eval.every=0"]
    assert run_here(tmp_path, *words, "reward=[exact_match,short]") == 0
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert {"reward/exact_match", "reward/short"} <= json.loads(metrics.read_text().splitlines()[0]).keys()
    capsys.readouterr()
    assert run_here(tmp_path, *words, "reward=[broken]", "hydra.run.dir=broken") == 1
    told = capsys.readouterr().err
    last = told.splitlines()[-1]
    assert last.startswith("rlft: stopped: ")
    assert "broken" in last
    assert "no such thing" in last
    assert "Traceback" not in told


def fresh_rlft(*arguments, cwd, **options):
    """The console script, as its entry point starts it: the current folder is not on Python's path."""
    command = [sys.executable, "-P", "-c", "from rlft.cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, timeout=300, check=False, **options)


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path):
    """As in `rlft train .. 2>&1 | head -1`: both streams are pipes whose reader has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = fresh_rlft("train", *TINY, "eval.every=0", cwd=tmp_path, stdout=writing, stderr=writing)
    finally:
        os.close(writing)
    (folder,) = (tmp_path / "runs" / "grpo_arithmetic").iterdir()
    told = json.loads((folder / "status.json").read_text())
    assert (done.returncode, told["status"]) == (0, "finished"), told
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_users_folder_named_like_a_library_hides_nothing(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    done = fresh_rlft("train", *TINY, "eval.every=0", cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
