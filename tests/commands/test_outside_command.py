"""A command from outside the tree, found by its entry point, is like rlft's own: that of docs/how-to/commands.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages import install
from run_folders import check_same, learned, metrics

import rlft

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "commands.md"
MOST_LINES = 80
"""Of the module, blank ones apart: the measure of what a command asks for."""
TINY = ("parrot", "text.path=texts.jsonl", "lora.rank=2", "trainer.lr=0.01", "model.device=cpu")
EVERY = ("checkpoint.every=1", "checkpoint.keep=9")


def block(name):
    """The file of this name on the page that says how to add a command."""
    return PAGE.read_text().partition(f" {name}\n")[2].partition("\n```\n")[0] + "\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages, which holds the command's."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "rlft-parrot", {"parrot": "parrot:PARROT"})
    for name in ("parrot.py", "parrot.yaml"):
        (folder / name).write_text(block(name))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where runs are: with twenty texts to learn."""
    folder = tmp_path_factory.mktemp("place")
    texts = [{"text": f"{n} + {n + 3} = {2 * n + 3}"} for n in range(20)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def rlft_of(forks, site, place):
    """Runs `rlft` where the package is installed."""
    return lambda *words, **keys: forks.run(*words, cwd=place, variables={"PYTHONPATH": str(site)}, **keys)


@pytest.fixture(scope="module")
def undisturbed(rlft_of, place):
    done = rlft_of(*TINY, *EVERY, "hydra.run.dir=undisturbed")
    assert done.code == 0, done.err
    return place / "undisturbed"


LIGHT = """
import contextlib, io, json, sys
from rlft import cli
told = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        told.append([cli.run(words), out, err])
assert not {"torch", "transformers", "peft", "datasets"} & sys.modules.keys()
print(json.dumps([[code, out.getvalue(), err.getvalue()] for code, out, err in told]))
"""


def light(site, cwd, *commands):
    """(exit code, output, errors) of each command line, in one interpreter that imports no library for them."""
    path = os.pathsep.join([str(Path(rlft.__file__).parents[1]), str(site)])
    words = json.dumps([command.split() for command in commands])
    how = {"cwd": cwd, "env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", LIGHT, words], **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_among_the_commands_and_has_help_without_torch(site, tmp_path):
    (_, page, _), (_, own, _) = light(site, tmp_path, "--help", "parrot --help")
    (line,) = (line.split() for line in page.splitlines() if "parrot" in line)
    assert line == ["Packages", "parrot", "an", "adapter", "learns", "texts", "by", "heart"]
    assert own.startswith("rlft parrot: an adapter learns texts by heart\n\n  rlft parrot --cfg job ")
    assert "\nUsage: rlft parrot text.path=<file> [...]\n" in own
    assert "\nlogger: mlflow, tensorboard, trackio, wandb\n" in own
    assert "\ndata: " not in own, "the command has no such group"


REFUSED = {
    "": "text.path: has no value yet; give text.path=<value> (JSONL with a text a line)",
    "text.path=x stepz=3": "stepz: there is no such key, got 3; did you mean steps?",
    "text.path=x steps=0": "steps: must be greater than 0, got 0; for instance 5 (optimizer updates)",
    "text.path=x +text.lines=3": "text.lines: there is no such key, got 3; ",
    "text.path=x command=train": "command: this is rlft parrot, got train; leave it as it is",
    "+recipe=sft_arithmetic": "+recipe: is for rlft sft, got sft_arithmetic; write rlft sft +recipe=sft_arithmetic",
    "-m text.path=x seed=0,0": "seed: has a value twice, got 0",
}


def test_a_wrong_word_is_refused_before_torch_is_imported(site, tmp_path):
    told = light(site, tmp_path, *(f"parrot {words}" for words in REFUSED))
    for (code, out, err), line in zip(told, REFUSED.values(), strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"rlft: {line}")
    assert list(tmp_path.iterdir()) == []


def test_it_asks_for_one_short_module():
    assert sum(bool(line.strip()) for line in block("parrot.py").splitlines()) <= MOST_LINES


def test_it_is_planned(rlft_of):
    done = rlft_of("plan", *TINY, "--json")
    assert done.code == 0, done.err
    planned = json.loads(done.out)
    assert planned["fits"]
    assert planned["parameters"] == {"base (frozen)": 823_424}
    parts = {part["part"]: part["bytes"] for part in planned["memory"]["as_planned"]}
    assert parts["adapters"] > 0
    assert parts["activations"] > 0


def test_killed_and_resumed_it_is_the_same_run(rlft_of, undisturbed, place):
    assert learned(undisturbed)
    killed = [
        {"at": "rlft.trainer.optimizer:Optimizer.update", "call": 2, "do": "kill", "when": "after"},
        {"at": "rlft.runs.checkpoint:save", "call": 1, "do": "kill", "when": "after"},
    ]
    assert rlft_of(*TINY, "hydra.run.dir=run", "checkpoint.every=2", events=killed[:1]).code == -9
    assert rlft_of("resume", "run", events=killed[1:]).code == -9
    done = rlft_of("resume", "run")
    assert done.code == 0, done.err
    check_same(place / "run", undisturbed)
    again = rlft_of("resume", "run")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "the run is finished: it has all its 5 steps, got run; raise steps (" in again.err
    assert again.err.endswith("or rlft eval run=run\n")
    (place / "other.jsonl").write_text((place / "texts.jsonl").read_text().replace("3 =", "4 ="))
    changed = rlft_of("resume", "run", "steps=6", "text.path=other.jsonl")
    assert changed.err.startswith("rlft: text.path: the text changed since the run began (fingerprint ")
    frozen = rlft_of("resume", "run", "steps=6", "text.max_tokens=9")
    assert frozen.err.startswith(
        "rlft: resume: the config differs from the run's (text.max_tokens: 32 -> 9), got run; "
    )


def test_its_runs_are_listed_and_watched_by_its_own_metric(rlft_of, undisturbed):
    (row,) = (row for row in json.loads(rlft_of("runs", ".", "--json").out) if row["folder"] == "undisturbed")
    last = metrics(undisturbed)[-1]
    assert (row["command"], row["status"], row["step"], row["steps"]) == ("parrot", "finished", 5, 5)
    assert (row["reward"], row["loss"]) == (last["text/likelihood"], None)
    page = rlft_of("watch", "undisturbed")
    assert (page.code, page.err) == (0, "")
    assert "undisturbed finished" in page.out


def test_an_error_inside_is_told_in_a_line_and_kept(rlft_of, place):
    failed = {"at": "rlft.loop.supervised:likelihood_gradient", "call": 3, "do": "fail"}
    done = rlft_of(*TINY, "hydra.run.dir=failed", events=[failed])
    assert done.code == 1
    told = "RuntimeError: this failure was planted; its traceback is in failed/error.txt; "
    assert f"rlft: stopped: {told}" in done.err
    assert "parrot.py" in (place / "failed" / "error.txt").read_text()
    (row,) = (row for row in json.loads(rlft_of("runs", "failed", "--json").out))
    assert (row["status"], row["step"]) == ("stopped", 1)
    assert row["reason"].startswith(told)


@pytest.mark.slow
def test_it_is_swept_and_its_policy_is_evaluated(rlft_of, undisturbed, place):
    swept = rlft_of(*TINY, "-m", "steps=1", "seed=0,1", "eval.every=1", "hydra.sweep.dir=sweep")
    assert swept.code == 0, swept.err
    assert len((place / "sweep" / "sweep.csv").read_text().splitlines()) == 3
    words = ("data=arithmetic", "data.held_out_size=4", "eval.num_prompts=2", "eval.num_samples=2")
    asked = rlft_of("eval", "run=undisturbed", *words, "generation=transformers", "generation.max_tokens=8")
    assert asked.code == 0, asked.err
    assert "undisturbed after step 5: 2 held-out prompts x 2 samples" in " ".join(asked.out.split())


def test_without_its_package_a_run_is_told_in_a_line(undisturbed, place, tmp_path):
    told = "there is no such command (of the run in undisturbed)"
    refused = [f"{command} run={undisturbed.name}" for command in ("resume", "watch", "eval", "export", "sample")]
    *results, (_, listed, _), (code, _, err) = light(tmp_path, place, *refused, "runs undisturbed --json", "parrot")
    remedy = "choose one of train, sft, rm, dpo, sample, or install the package that provides it"
    assert results == [[2, "", f"rlft: command: {told}, got parrot; {remedy}\n"]] * len(refused)
    assert [(row["status"], row["reason"]) for row in json.loads(listed)] == [("damaged", f"command {told}")]
    assert (code, err.split("; ")[0]) == (2, "rlft: parrot: there is no such command")


def test_packages_that_bring_no_command_are_named_and_disturb_no_other(tmp_path):
    install(tmp_path, "broken", {"broken": "not_there:COMMAND"})
    install(tmp_path, "odd", {"odd": "json:dumps"})
    install(tmp_path, "greedy", {"train": "json:dumps"})
    for package in ("one", "two"):
        install(tmp_path, package, {"twice": f"{package}:COMMAND"})
    (_, page, _), (code, _, err) = light(tmp_path, tmp_path, "--help", "broken seed=1")
    lines = dict(line[9:].split(maxsplit=1) for line in page.splitlines() if line[9:].strip())
    missing = "its package broken cannot be imported (ModuleNotFoundError: No module named 'not_there')"
    assert lines["broken"] == missing
    assert lines["odd"] == "json:dumps of its package odd is no rlft.config.command.Command of that name"
    assert lines["twice"] == "is provided by one and two"
    assert lines["train"].startswith("reinforcement learning"), "a name of rlft's own is not taken"
    assert (code, err) == (2, f"rlft: command: {missing}, got broken; repair that package, or remove it\n")
