"""Runs outlive versions: folders that commit 787aee2 recorded are used by every later one.

tests/runs/recorded/ holds a run of each command (`steps=2 lora.rank=1 lora.target_modules=[q_proj]
trainer.schedule=constant checkpoint.keep=1`, four rows a step, on the embedded model), and keys.txt all keys that there
were then.
"""

import dataclasses
import io
import json
import random
import shutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pytest
import yaml
from in_one_test import each
from slow_cases import slow

from rlft import cli
from rlft.config import catalog, command as commands
from rlft.config.instantiate import locate
from rlft.config.keys import ABSENT, Key, keys_of, written_at
from rlft.config.schema import engine_classes
from rlft.runs import run_folder
from rlft.runs.run_folder import NOT_TRACKERS

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def run(request, here):
    """A copy of the recorded run of this kind; the working directory is the one it is in."""
    kind = getattr(request, "param", "train")
    shutil.copytree(RECORDED / kind, here / "runs" / kind)
    return Path("runs") / kind


@pytest.mark.parametrize("run", ["train", "rm", *map(slow, ("ppo", "sft", "dpo"))], indirect=True)
def test_a_recorded_run_is_resumed(run, capsys):
    assert cli.run(["resume", str(run), "steps=3", "model.device=cpu"]) == 0, capsys.readouterr().err
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_what_trained_it_resumes_it_as_well(run, capsys):
    """The recipe is composed again, with the keys that are newer than the run."""
    small = ("prompts_per_step=2", "group_size=4", "eval.every=0", "lora.rank=1", "lora.target_modules=[q_proj]")
    words = ("+recipe=grpo_arithmetic", *small, "trainer.schedule=constant", "console=null", "checkpoint.every=1")
    assert cli.run(["train", *words, f"resume={run}", "steps=3"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("run", ["sample"], indirect=True)
def test_recorded_samples_go_on(run, capsys):
    assert cli.run(["resume", str(run), "num_prompts=6"]) == 0, capsys.readouterr().err
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len({sample["prompt_id"] for sample in samples}) == 6


def test_a_recorded_run_is_evaluated_exported_reported_and_talked_to(run, capsys, monkeypatch):
    assert cli.run(["eval", f"run={run}", "eval.num_samples=1", "eval.num_prompts=2"]) == 0
    assert cli.run(["export", f"run={run}", "out=exports/merged"]) == 0
    assert cli.run(["export", f"run={run}", "out=exports/adapter", "as=adapter"]) == 0
    assert cli.run(["report", str(run)]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 12 + 30?\n"))
    assert cli.run(["chat", f"run={run}"]) == 0
    assert cli.run(["sample", f"run={run}", "num_prompts=1", "n=2", "hydra.run.dir=sampled"]) == 0
    assert cli.run(["resume", str(run / "checkpoints" / "step_000002"), "steps=3", "hydra.run.dir=fork"]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("run", ["train", "ppo", "sft", "rm", "dpo"], indirect=True)
def test_the_files_of_a_recorded_run_are_audited(run, capsys):
    """Recomputed numbers depend on the processor."""
    assert cli.run(["audit", str(run), "recompute=0", "replay=0"]) == 0, capsys.readouterr().out


def test_every_newer_key_says_what_older_runs_did():
    """All keys of all commands, engines and components of rlft that 787aee2 did not have."""
    recorded = set((RECORDED / "keys.txt").read_text().split())
    newer = {key: before for key, before in all_keys() if key not in recorded}
    assert [key for key, before in newer.items() if before is ABSENT] == []


CONSOLE = {"live": False, "plain_seconds": 1.0}
SCREEN, FILES = {"_target_": NOT_TRACKERS["console"], **CONSOLE}, {"_target_": NOT_TRACKERS["jsonl"]}
OWN = {"_target_": "x.Y"}


@each(("loggers", "console", "trackers"), [
    ({"screen": SCREEN, "jsonl": FILES}, CONSOLE, {}), ({"console": SCREEN}, CONSOLE, {}),
    ({"files": FILES, "mine": OWN}, None, {"mine": OWN}), ({}, None, {}), (None, None, {}),
])  # fmt: skip
def test_the_terminal_and_the_files_were_loggers(loggers, console, trackers):
    recorded = {"command": "rm"} if loggers is None else {"command": "rm", "logger": loggers}
    for config in (recorded, {"logger": trackers, "console": console}):  # the second is a run's of today
        read = run_folder.completed(config, commands.named("rm").root)
        assert (read["console"], read["logger"]) == (console, trackers)


def all_keys():
    """(`<command or class>:<key>`, its value before it existed)."""
    for command in commands.OWN:
        yield from ((f"{command}:{key}", known.before) for key, known in keys_of(commands.named(command).root).items())
    classes = {*engine_classes({}).values(), *components()}
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        hints = get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            yield f"{cls.__module__}.{cls.__name__}:{field.name}", written_at(hints[field.name]).before


def components():
    """The dataclasses that `_target_` names in the YAML files of rlft."""
    for file in sorted(catalog.config_folder().rglob("*.yaml")):
        for target in targets(yaml.safe_load(file.read_text())):
            if target.startswith("rlft.") and dataclasses.is_dataclass(cls := locate(target, str(file))):
                assert isinstance(cls, type)
                yield cls


def targets(value):
    if isinstance(value, Mapping):
        yield from ([value["_target_"]] if isinstance(value.get("_target_"), str) else [])
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from targets(inner)


@each("number", range(300))
def test_a_config_without_newer_keys_reads_as_one_with_the_values_from_before(number):
    """Random trees of sections, in which half of the keys are newer than the recorded config."""
    rng = random.Random(number)
    root, whole = made_section(rng, depth=3)
    recorded = without_newer(rng, root, whole)
    assert run_folder.completed(recorded, root) == whole


def made_section(rng, depth):
    """A class of a section, and a config of it in which newer keys have the values from before they existed."""
    fields, values = [], {}
    for index in range(rng.randint(1, 4)):
        name = f"key{index}"
        if depth and rng.random() < 0.4:
            cls, values[name] = made_section(rng, depth - 1)
            fields.append((name, cls))
        else:
            values[name] = rng.choice([None, 0, 1.5, False, "text", [], [1], {}])
            newer = rng.random() < 0.5
            fields.append((name, Annotated[Any, Key(before=values[name])] if newer else Any))
    return dataclasses.make_dataclass("Section", fields, kw_only=True), values


def without_newer(rng, cls, values):
    """The config without some of its newer keys, and without sections that hold nothing else."""
    recorded = {}
    hints = get_type_hints(cls, include_extras=True)
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            inner = without_newer(rng, hints[name], value)
            if inner:
                recorded[name] = inner
        elif written_at(hints[name]).before is ABSENT or rng.random() < 0.3:
            recorded[name] = value
    return recorded


def test_components_and_engines_of_a_recorded_run_have_their_newer_keys(monkeypatch):
    made_up = types.ModuleType("rlft.made_up")
    made_up.Reward = dataclasses.make_dataclass(
        "Reward", [("old", int), ("new", Annotated[bool | None, Key(before=None)])], kw_only=True
    )
    monkeypatch.setitem(sys.modules, made_up.__name__, made_up)
    engine = dataclasses.make_dataclass("Engine", [("size", Annotated[int, Key(before=7)])], kw_only=True)
    monkeypatch.setattr(run_folder, "engine_classes", lambda section: {"lately": engine})
    config = run_folder.read(RECORDED / "train")
    config["reward"] = {"mine": {"_target_": "rlft.made_up.Reward", "old": 1}, "yours": {"_target_": "else.where"}}
    config["environment"] = {"tools": [{"_target_": "rlft.made_up.Reward", "old": 1}]}
    read = run_folder.completed(config, commands.named("train").root)
    assert read["reward"]["mine"] == {"_target_": "rlft.made_up.Reward", "old": 1, "new": None}
    assert read["reward"]["yours"] == {"_target_": "else.where"}
    assert read["environment"]["tools"][0]["new"] is None
    assert read["generation"] == {**config["generation"], "lately": {"size": 7}}


def test_a_policy_that_was_merged_into_a_shared_base_is_a_copy_now_and_a_resume_keeps_what_was_recorded():
    config = run_folder.read(RECORDED / "train")
    config["generation"]["vllm"] |= {"weights": "merged", "share_base": True}
    read = run_folder.completed(config, commands.named("train").root)["generation"]["vllm"]
    assert (read["weights"], read["share_base"]) == ("copy", "auto")
    now = {"generation": {"vllm": {"weights": "auto", "share_base": "auto"}, "engine": "vllm"}}
    assert run_folder.with_kept_values(now, None) == now
    kept = run_folder.with_kept_values(now, RECORDED / "train")["generation"]
    assert kept == {"vllm": {"weights": "adapter", "share_base": "auto"}, "engine": "vllm"}


def test_older_rounded_weights_are_what_they_were_and_of_a_whole_model_they_were_not_rounded():
    for lora, weights in (({"rank": 4}, "adapted_bfloat16"), (None, "merged")):
        config = run_folder.read(RECORDED / "train") | {"lora": lora}
        del config["generation"]["drafts"]
        config["generation"]["transformers"]["weights"] = "merged_bfloat16"
        read = run_folder.completed(config, commands.named("train").root)["generation"]["transformers"]
        assert read["weights"] == weights


def write_keys():
    """Wrote keys.txt, at 787aee2."""
    (RECORDED / "keys.txt").write_text("".join(f"{key}\n" for key, _ in all_keys()))
