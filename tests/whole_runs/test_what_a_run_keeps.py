"""What a run has measured, counted, read off the clock or learned when it began stays with it, wherever it goes on."""

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from run_folders import RANKS, chain, checkpoints, files_of, metrics, rollouts, tiny, whole_lines
from slow_cases import slow

import rlft
from rlft import cli
from rlft.commands import eval as evaluation, resume
from rlft.commands.sweep import checks as sweep
from rlft.config import compose as configs
from rlft.config.resolved import resolve
from rlft.config.schema import WEIGHTS
from rlft.generation import transformers
from rlft.generation.transformers import Weights
from rlft.runs import run_folder
from rlft.system import machine
from rlft.tokens import text

# -- weights for decoding that were measured ---------------------------------------------------------------------------
WORDS = ["+recipe=grpo_arithmetic", "generation=transformers", f"{WEIGHTS}=fastest", "resume=auto",
         "prompts_per_step=4", "group_size=6", "data.size=16", "data.held_out_size=8", "eval.every=0",
         "generation.max_tokens=12", "checkpoint.every=1", "trainer.schedule=constant"]  # fmt: skip


@pytest.mark.parametrize("weights", [Weights.merged_bfloat16, slow(Weights.merged_int8)])
def test_a_resume_keeps_the_weights_and_says_that_the_processor_is_another(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers, "_fastest", lambda: weights)
    assert cli.run(["train", *WORDS, "steps=3", "hydra.run.dir=whole"]) == 0
    printed = capsys.readouterr()
    assert "token_truncate" in printed.out + printed.err
    assert cli.run(["train", *WORDS, "steps=2", "hydra.run.dir=resumed"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(transformers, "_fastest", lambda: Weights.merged)
    (tmp_path / "cpuinfo").write_text("model name\t: Another 9000\n")
    here = machine.processor()
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert cli.run(["train", *WORDS, "steps=3", "hydra.run.dir=resumed"]) == 0
    said = capsys.readouterr().err
    assert f"note: the processor is {machine.processor()}, and was {here}: numbers may have other last bits" in said
    for name in ("whole", "resumed"):
        config = yaml.safe_load(Path(name, "config.yaml").read_text())
        assert config["generation"]["transformers"]["weights"] == weights
    assert metrics(Path("resumed")) == metrics(Path("whole"))
    tensors = [[{**line, "machine": None} for line in chain(Path(name))] for name in ("whole", "resumed")]
    assert tensors[0] == tensors[1]


def test_an_older_run_with_rounded_weights_resumes_with_what_they_were(tmp_path, monkeypatch):
    """Without the LM head among them, and without a correction of the mismatch."""
    monkeypatch.chdir(tmp_path)
    words = [word for word in WORDS if WEIGHTS not in word]
    for name, steps in (("whole", 3), ("resumed", 2)):
        asked = [*words, f"{WEIGHTS}=adapted_bfloat16", f"steps={steps}", f"hydra.run.dir={name}"]
        assert cli.run(["train", *asked]) == 0
    file = Path("resumed", "config.yaml")
    config = yaml.safe_load(file.read_text())
    del config["generation"]["drafts"], config["generation"]["draft_rows"]
    config["generation"]["transformers"]["weights"] = "merged_bfloat16"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    shutil.copytree("resumed", "again")
    assert cli.run(["resume", "resumed", "steps=3"]) == 0
    again = [*words, f"{WEIGHTS}=merged_bfloat16", "steps=3", "hydra.run.dir=again"]
    assert cli.run(["train", *again]) == 0
    for name in ("resumed", "again"):
        assert metrics(Path(name)) == metrics(Path("whole"))
        assert chain(Path(name)) == chain(Path("whole"))


# -- the date that a template writes ---------------------------------------------------------------------------------
Today = Callable[[str], None]


@pytest.fixture
def today(monkeypatch):
    def is_now(day: str) -> None:
        now = datetime.datetime.fromisoformat(day)
        monkeypatch.setattr(text, "_now", lambda: now)

    return is_now


@pytest.fixture(scope="module")
def dated_model(tmp_path_factory):
    """The embedded model with a template that begins with the day's number, as plain text."""
    folder = tmp_path_factory.mktemp("models") / "dated"
    shutil.copytree(Path(rlft.__file__).parent / "assets" / "tiny-arithmetic", folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    return folder


@pytest.mark.slow
def test_a_run_that_goes_on_another_day_is_the_uninterrupted_one_bit_for_bit(today, dated_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = (f"model.path={dated_model}", "checkpoint.every=1", "checkpoint.keep=9")
    words = [word for word in tiny("eval.every=0", *model) if not word.startswith("steps=")]
    today("2026-11-25T23:59")
    cli.run([*words, "steps=2", "hydra.run.dir=whole"])
    cli.run([*words, "steps=1", "hydra.run.dir=halved"])
    assert run_folder.read(Path("halved"))["model"]["date"] == "2026-11-25"
    today("2026-11-26T00:01")
    resume.command(["halved", "steps=2"])
    for read in (metrics, rollouts):
        assert read(Path("halved")) == read(Path("whole"))
    whole, halved = (files_of(checkpoints(Path(run))[-1]) for run in ("whole", "halved"))
    assert whole == halved
    resume.command(["halved/checkpoints/step_000001", "hydra.run.dir=forked"])
    assert run_folder.read(Path("forked"))["model"]["date"] == "2026-11-25"
    assert rollouts(Path("forked")) == rollouts(Path("whole"))
    evaluation.command(["run=halved", "eval.num_prompts=2"])
    # A new run has the new day, and other prompts.
    cli.run([*words, "steps=1", "hydra.run.dir=new"])
    prints = [run_folder.read(Path(run))["origin"]["data_fingerprint"] for run in ("whole", "halved", "new")]
    assert prints[0] == prints[1] != prints[2]
    assert json.loads(json.dumps(run_folder.read(Path("new"))["model"]))["date"] == "2026-11-26"


@pytest.mark.slow
def test_jobs_of_a_sweep_have_the_date_on_which_it_was_begun(today, tmp_path):
    today("2026-11-25T12:00")
    config = resolve(configs.compose([]))
    plain = config.plain
    word = sweep.date_word([plain, plain], None)
    assert word == "model.date=2026-11-25"
    (tmp_path / "0").mkdir()
    run_folder.write_config(tmp_path / "0", sweep.dated(config, word).plain, {})
    today("2026-11-26T12:00")
    assert sweep.date_word([plain], tmp_path) == word, "a job that is begun the next day"
    assert sweep.date_word([plain], tmp_path / "another") == "model.date=2026-11-26"
    assert sweep.date_word([sweep.dated(config, "model.date=2001-02-03").plain], None) is None, "the config names one"


# -- lanes, and a reward that was trained in the loop ------------------------------------------------------------------
@pytest.mark.slow
def test_the_lanes_of_a_run_are_its_first_ranks(forks, tmp_path):
    """And `auto` means them in every later resume, whatever the ranks are then."""
    auto = tuple("cluster.lanes=auto" if key == "cluster.lanes=4" else key for key in RANKS)
    kill = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "kill"}
    assert (
        forks.run(*auto, "checkpoint.every=1", "hydra.run.dir=run", "cluster.ranks=2", cwd=tmp_path, events=[kill]).code
        == -9
    )
    assert "lanes: 2" in (tmp_path / "run" / "config.yaml").read_text()
    assert forks.run("resume", "run", "cluster.ranks=4", cwd=tmp_path).code == 2
    forks.run("resume", "run", "cluster.ranks=1", "steps=1", cwd=tmp_path, ends=0)
    assert "lanes: 2" in (tmp_path / "run" / "config.yaml").read_text()
    assert "lanes/balance" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_run_whose_reward_was_trained_in_the_loop_is_evaluated_with_the_trained_one(forks, tmp_path):
    keys = ("steps=2", "generation.max_tokens=32", "reward=[exact_match,format,learned]")
    keys = (*keys, "reward_model.refresh_every=2", "reward_model.labels=exact_match", "hydra.run.dir=run")
    forks.run(*tiny(*keys), cwd=tmp_path, ends=0)
    last = json.loads(whole_lines(tmp_path / "run" / "eval.jsonl")[-1])
    assert last["step"] == 2
    assert last["eval/reward/learned"] != 0, "a fresh head scores 0: this one was trained"
    forks.run("eval", "run=run", cwd=tmp_path, ends=0)
    [file] = (tmp_path / "run" / "evaluations").iterdir()
    again = json.loads(file.read_text().splitlines()[0])
    names = [name for name in last if name.startswith("eval/")]
    assert {name: again[name] for name in names} == {name: last[name] for name in names}
