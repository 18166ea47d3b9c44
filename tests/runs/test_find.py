"""Runs and checkpoints by name, and notes about a run whose libraries or config.yaml have changed."""

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from in_one_test import each

from rlft import cli
from rlft.config.compose import compose
from rlft.runs import checkpoint, run_folder
from rlft.runs.chain import Chain
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.find import adapter_references, changes_since, folder_of, named_folder, one_run, with_named_runs
from rlft.runs.fork import FORKED_FROM
from rlft.types import UserError


@pytest.fixture
def make_run(here):
    """Makes a run's folder in a working directory of the test's own, and sets how long ago it was worked in."""

    def make(folder, *, age, metrics=True):
        run = Path(folder)
        run.mkdir(parents=True)
        config = {"command": "train", "name": run.parent.name, "lora": {"rank": 2}}
        run_folder.write_config(run, config, {})
        (run / "status.json").write_text('{"status": "finished", "steps": 1}')
        if metrics:
            (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        for file in run.iterdir():
            os.utime(file, (10**9 - age, 10**9 - age))
        return run

    return make


@pytest.fixture
def three(make_run):
    """runs/first/a, the oldest, runs/first/b, the newest, and runs/second/c."""
    return make_run("runs/first/a", age=3), make_run("runs/first/b", age=1), make_run("runs/second/c", age=2)


def said(name):
    """What `one_run` takes, and what it says."""
    lines = []
    return one_run(name, "run", lines.append), lines


def test_latest_is_the_run_that_was_worked_in_last_and_is_named(three):
    for name in ("report.html", "evaluations/step_000001.jsonl"):  # of an older run, which do not make it the latest
        (three[2] / name).parent.mkdir(exist_ok=True)
        (three[2] / name).touch()
    assert said("latest") == (Path("runs/first/b"), ["latest: runs/first/b"])
    assert said("latest/checkpoints/step_000040")[0] == Path("runs/first/b/checkpoints/step_000040")
    with (three[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.5}\n')  # the oldest one goes on
    assert said("latest")[0] == Path("runs/first/a")
    Path("latest").mkdir()
    assert said("latest") == (Path("latest"), []), "a folder that is called so goes first"


def test_without_any_run_latest_is_refused_with_what_to_do(here):
    for write_other_yaml in (False, True):
        if write_other_yaml:  # not of a run
            (here / "runs" / "x").mkdir(parents=True)
            (here / "runs" / "x" / "config.yaml").write_text("a: 1")
        with pytest.raises(UserError, match=r"^run: there is no run below .*/runs yet, got latest; train one first"):
            said("latest")


def test_the_one_run_below_a_folder_is_taken_and_named_and_of_several_none(make_run):
    make_run("runs/second/c", age=2)
    assert said("runs/second") == (Path("runs/second/c"), ["runs/second: runs/second/c, the only run there"])
    Path("empty").mkdir()
    for name in ("runs/second/c", "empty", "nowhere", "runs/second/c/checkpoints/step_000001"):
        assert said(name) == (Path(name), []), "what is no run is left to the command"
    for i in range(7):
        make_run(f"runs/many/{i}", age=i)
    with pytest.raises(UserError) as error:
        said("runs/many")
    newest = "the newest is runs/many/0, before it came runs/many/1, runs/many/2, runs/many/3, runs/many/4"
    choice = f"name one of them; {newest} and 2 more, which rlft runs lists"
    assert str(error.value) == f"run: there are 7 runs in that folder, got runs/many; {choice}"


@pytest.mark.parametrize("words", [
    "eval run=", "chat run=", "chat ", "export out=out run=", "sample run=", "resume ", "resume run=", "watch ",
    "train resume=", "diff runs/second ", "plan lora.path=", "train lora.path=", "sample adapter=",
])  # fmt: skip
def test_every_command_of_one_run_refuses_several_and_an_unknown_latest(words, three, capsys):
    assert cli.run(f"{words}runs/first".split()) == 2
    problem = "there are 2 runs in that folder, got runs/first; name one of them; the newest is runs/first/b, before"
    assert problem in capsys.readouterr().err
    Path("runs").rename("elsewhere")
    assert cli.run(f"{words}latest".replace("runs/second", "elsewhere/second").split()) == 2
    assert "yet, got latest; train one first" in capsys.readouterr().err


def test_the_commands_that_only_read_take_latest(three, capsys):
    for words in (
        "watch latest",
        "report latest",
        "diff latest runs/first/a",
        "runs latest --json",
        "watch runs/second",
    ):
        assert cli.run(words.split()) == 0, words
    printed = capsys.readouterr()
    assert printed.err.count("latest: runs/first/b\n") == 4
    assert Path("runs/first/b/report.html").is_file()
    assert '"folder": "runs/first/b"' in printed.out


def test_report_takes_all_runs_below_a_folder_and_names_those_without_metrics(three, make_run, ran, capsys):
    make_run("runs/first/loading", age=0, metrics=False)
    for words in (["runs/first"], ["runs/first/loading", "runs/first/a", "runs/first/b"]):
        assert cli.run(["report", *words, "out=all.html"]) == 0
        left_out = "runs/first/loading is left out: the run has no metrics.jsonl"
        assert capsys.readouterr().err.splitlines() == [left_out]
    assert "the run has no metrics.jsonl" in ran(["report", "runs/first/loading"], ends=2).err


def test_latest_names_an_adapter(three, capsys):
    saved = Checkpoint(step=1, adapters={"policy": {}}, adapter_config={}, optimizer={}, state={})
    folder = checkpoint.save(run_folder.checkpoints(three[1]), saved, keep=1)
    found = with_named_runs({"lora": {"path": "latest"}, "snapshot": {"reference": "base"}})
    assert found == {"lora": {"path": str(folder / "policy")}, "snapshot": {"reference": "base"}}
    assert capsys.readouterr().err == "latest: runs/first/b\n"


def test_a_word_of_a_key_and_a_name_that_was_typed_are_what_they_were(three):
    assert named_folder("runs", "runs", lambda text: None) == Path("runs")
    Path("runs/first").rename("base")
    assert folder_of("base", ("policy",), "snapshot.reference") == "base"


def begun(folder, **config):
    """A run without a checkpoint."""
    folder.mkdir()
    run_folder.write_config(folder, config, {})
    return folder


def reached(run, step, *roles):
    """A checkpoint of the run with an adapter in each of these roles; `model` is a folder of its own kind."""
    saved = Checkpoint(
        step=step,
        adapters={role: {"a": torch.full((1,), float(step))} for role in roles if role != "model"},
        adapter_config={},
        optimizer={},
        state={},
        write_folders={"model": Path.mkdir} if "model" in roles else {},
    )
    return checkpoint.save(run_folder.checkpoints(run), saved, keep=9)


@pytest.fixture
def run(tmp_path):
    """A run of two checkpoints with policy and critic."""
    made = begun(tmp_path / "run")
    for step in (1, 2):
        reached(made, step, "policy", "critic")
    return made


def test_a_run_is_its_newest_whole_checkpoints_role_and_a_checkpoint_its_own(run):
    newest, before = run / "checkpoints" / "step_000002", run / "checkpoints" / "step_000001"
    assert folder_of(str(run), ["policy"], "lora.path") == str(newest / "policy")
    assert folder_of(str(run), ["reward", "critic"], "critic.init") == str(newest / "critic")
    assert folder_of(str(before), ["policy"], "lora.path") == str(before / "policy")
    (newest / "state.json").write_text("{}")  # not what its MANIFEST says
    assert folder_of(str(run), ["policy"], "lora.path") == str(before / "policy")


def test_any_other_name_stays_as_it_is(run, tmp_path, tiny_path):
    adapter = str(run / "checkpoints" / "step_000002" / "policy")
    (tmp_path / "config.yaml").touch()  # a model's folder that somebody keeps a config.yaml in
    (tmp_path / "config.json").touch()
    for name in (adapter, "embedded:tiny-arithmetic", "somebody/model", "base", "copy", "nowhere", str(tmp_path)):
        assert folder_of(name, ["policy"], "lora.path") == name
    assert folder_of(str(tiny_path), ["model"], "model.path") == str(tiny_path)


def test_the_first_role_that_is_there_is_taken_and_none_is_refused_with_what_there_is(tmp_path):
    run = begun(tmp_path / "run")
    with pytest.raises(UserError, match=r"^lora\.path: that run has no checkpoint, got .*run; let it reach one first"):
        folder_of(str(run), ["policy"], "lora.path")
    reached(run, 1, "model")
    with pytest.raises(UserError, match=r"^lora\.path: that checkpoint has no policy, only model, got .*step_000001; "):
        folder_of(str(run), ["policy"], "lora.path")
    newest = reached(run, 3, "critic", "reward", "reward_taste")
    for roles, name in ((("critic", "reward"), "critic"), (("reward", "reward_taste"), "reward")):
        assert folder_of(str(run), roles, "key") == str(newest / name)
    assert folder_of(str(run), ("reward_taste",), "key") == str(newest / "reward_taste")


def test_every_key_that_may_name_a_run_is_looked_at(run):
    plain = {
        "command": "train", "lora": {"path": str(run), "rank": 4}, "snapshot": {"reference": str(run)},
        "critic": {"init": "base"}, "model": {"path": "embedded:tiny-arithmetic"},
        "reward": {"learned": {"path": "there"}, "format": {"weight": 1.0}}, "adapter": None,
    }  # fmt: skip
    assert dict(adapter_references(plain)) == {
        "snapshot.reference": ("policy",), "lora.path": ("policy",), "critic.init": ("critic", "reward"),
        "model.path": ("model",), "reward.learned.path": ("reward", "reward_learned"),
    }  # fmt: skip
    policy = str(run / "checkpoints" / "step_000002" / "policy")
    found = with_named_runs(plain)
    assert found["lora"] == {"path": policy, "rank": 4}
    assert found["snapshot"]["reference"] == policy
    assert found["reward"] == plain["reward"]
    assert plain["lora"]["path"] == str(run), "what was given is left alone"
    assert with_named_runs(found) == found


def test_a_reward_model_goes_on_from_a_reward_model_or_begins_as_a_policy(run, tmp_path):
    other = begun(tmp_path / "other", command="rm")
    newest = reached(other, 1, "reward")
    for path, expected in ((other, newest / "reward"), (run, run / "checkpoints" / "step_000002" / "policy")):
        assert with_named_runs({"command": "rm", "lora": {"path": str(path)}})["lora"]["path"] == str(expected)
    assert with_named_runs({"command": "sft", "lora": None}) == {"command": "sft", "lora": None}


@cache
def composed():
    return compose([])


def begin(folder, steps, origin=None):
    """A run that has made the chain of these steps."""
    folder.mkdir()
    run_folder.write_config(folder, composed(), {}, origin)
    add_steps(folder, 0, steps)
    return folder


def add_steps(folder, first, last):
    chain = Chain(folder)
    chain.start(first - 1, {}, {})
    for step in range(first, last + 1):
        chain.seal(step)
    chain.close()


def test_any_change_of_its_config_by_hand_is_noted_until_a_step_is_made_with_it(tmp_path):
    run = begin(tmp_path / "run", 3)
    assert changes_since(run) == []
    config = run / "config.yaml"
    text = config.read_text()
    for old, new in (("lr:", "lr:  "), ("seed: 0", "seed: 1"), ("group_size: 8", "group_size: 4")):
        assert text.count(old) >= 1
        config.write_text(text.replace(old, new, 1))
        [note] = changes_since(run)
        assert note.startswith("config.yaml changed since step 3: keys were edited in it")
    add_steps(run, 4, 4)
    assert changes_since(run) == []
    (tmp_path / "samples").mkdir()  # a run without a chain has no note about its config
    run_folder.write_config(tmp_path / "samples", compose([], command="sample"), {})
    assert changes_since(tmp_path / "samples") == []


def test_a_fork_has_a_config_of_its_own_from_its_first_step_on(tmp_path):
    fork = begin(tmp_path / "fork", 3)
    run_folder.write_config(fork, compose(["seed=3"]), {}, {FORKED_FROM: {"step": 3}})
    assert changes_since(fork) == []
    add_steps(fork, 4, 4)
    assert changes_since(fork) == []
    run_folder.write_config(fork, compose(["seed=4"]), {}, {FORKED_FROM: {"step": 3}})
    assert len(changes_since(fork)) == 1


@each("package", [name for name in run_folder.PACKAGES if name in run_folder.versions(run_folder.PACKAGES)])
def test_a_library_of_another_version_is_noted_and_another_build_is_not(package, tmp_path):
    version = run_folder.versions([package])[package].split("+")[0]
    for name, origin in (("build", f"{version}+cu999"), ("older", "0.0.1")):
        run = begin(tmp_path / f"{package}_{name}", 1, {package: origin})
        expected = [f"libraries changed since the run began: {package} 0.0.1 -> {version}"] if name == "older" else []
        assert changes_since(run) == expected
