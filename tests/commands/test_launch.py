"""What is said of finished runs, and of folders that cannot be written; the rest of launching is seen in whole runs."""

import errno
import itertools
import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from in_one_test import each
from slow_cases import slow
from transformers import PreTrainedModel

from rlft import cli
from rlft.commands.launch import after_the_end, launch
from rlft.config import command as commands
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.transformers import Weights
from rlft.model.backbone import load_backbone
from rlft.system.interrupt import Reported

RUN = Path("run")
MORE, EVALUATE = "raise steps (rlft resume run steps=10)", "rlft eval run=run"


@each(("command", "schedule", "remedy"), [
    ("train", "constant", f"{MORE}, or {EVALUATE}"),
    ("sft", "constant", f"{MORE}, or {EVALUATE}"),
    ("sft", "cosine", EVALUATE),  # every rate so far would have been another; without a checkpoint
    ("rm", "constant", MORE),  # a reward model has nothing to sample
    ("rm", "linear", "start another one"),
    ("sample", None, "start another one"),
])  # fmt: skip
def test_what_can_be_done_with_a_finished_run(command, schedule, remedy):
    assert after_the_end(commands.named(command), schedule, RUN, 5) == remedy


NOT_WRITTEN = "hydra.run.dir: cannot be written"


@each(("place", "code", "line", "exit_code"), [
    ("pathlib.Path.rename", errno.EXDEV, f"{NOT_WRITTEN} (Invalid cross-device link), got run;", 2),
    ("pathlib.Path.touch", errno.EROFS, f"{NOT_WRITTEN} (Read-only file system), got run;", 2),
    ("pathlib.Path.touch", errno.ENOSPC, "stopped: the disk is full (No space left on device): ", 1),
    ("os.fsync", errno.EIO, "stopped: the disk failed (Input/output error): ", 1),
])  # fmt: skip
def test_what_a_run_cannot_do_in_its_folder_is_known_before_it_begins(
    place, code, line, exit_code, here, monkeypatch, capsys
):
    def refuse(*args, **keywords):
        raise OSError(code, os.strerror(code))

    shutil.rmtree("run", ignore_errors=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(place, refuse)
        assert cli.run(["train", "+recipe=grpo_arithmetic", "hydra.run.dir=run"]) == exit_code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"rlft: {line}")
    assert list(here.rglob("*")) in ([], [here / "run"])


SHORT = ["hydra.run.dir=run", "resume=auto", "eval.every=0", "trainer.schedule=constant"]
SMALL = ["prompts_per_step=2", "group_size=2", "generation.max_tokens=8", "minibatches=1", "data.size=64"]
ROWS = {  # {command: rows that the config decides, that the plan adds, and that the loaded model adds}
    "train": (["model", "algorithm", "completions a step", "updates a step"], ["prompts", "total"], ["trainable"]),
    "sft": (["model", "a step"], ["demonstrations", "total"], ["trainable", "kernels"]),
    "rm": (["model", "a step"], ["rankings", "total"], ["trainable", "kernels"]),
    "dpo": (["model", "loss", "a step"], ["reference", "rankings", "total"], ["trainable", "kernels"]),
}


@pytest.mark.parametrize("command", ["train", *map(slow, ("sft", "rm", "dpo"))])
def test_rows_of_the_start_table_are_shown_once_each_as_they_become_known(command, here, monkeypatch, capsys):
    def shown(*words):
        """The names of all rows up to the first note, evaluation or step."""
        recipe, more = ("grpo", SMALL) if command == "train" else (command, [])
        cli.run([command, f"+recipe={recipe}_arithmetic", *SHORT, *more, *words])
        title, *lines = capsys.readouterr().out.splitlines()
        assert title.endswith("_arithmetic in run")
        table = itertools.takewhile(lambda line: not line.startswith(("note: ", "step ")), lines)
        return [line[:18].rstrip() for line in table if line[:1].strip()]

    def refuse(*args, **keywords):
        raise ValueError("the weights cannot be read")

    of_config, of_plan, of_model = ROWS[command]
    monkeypatch.setattr(sys, "path", list(sys.path))
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "from_pretrained", refuse)
        load_backbone.cache_clear()
        early = shown("steps=1")
    assert early[: len(of_config)] == of_config
    assert set(early) >= {*of_plan}
    late = shown("steps=1")  # resumes the run, which has no step yet
    assert (late[: len(early)], len({*late})) == (early, len(late))
    assert set(late[len(early) :]) >= {"parameters", *of_model}
    assert shown("steps=2") == late


def test_what_was_measured_is_in_the_config_that_other_processes_get(here, monkeypatch):
    monkeypatch.setattr("rlft.generation.transformers._fastest", lambda: Weights.merged_int8)
    words = ["+recipe=grpo_arithmetic", "generation=transformers", "generation.transformers.weights=fastest"]
    resolved, handed_on = resolve(compose([*words, "data.size=64"])), []

    def run(plan, *_):
        handed_on.append(pickle.loads(pickle.dumps(plan.config)))
        raise KeyboardInterrupt

    with pytest.raises(Reported):
        launch(replace(resolved, command=replace(resolved.command, run=run)), Path("run"))
    assert handed_on[0].generation.named("transformers").weights is Weights.merged_int8
