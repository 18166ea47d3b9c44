"""A run's folder: how its config.yaml is read, folders that have moved, stages of pipelines, and changed lengths."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import contents
from slow_cases import slow

from rlft import cli
from rlft.runs import run_folder
from rlft.runs.find import find
from rlft.runs.run_folder import CONFIG, path_keys


@pytest.mark.parametrize(
    "content", [slow("[" * 100_000), slow("a: " + "{" * 50_000), "a:\n" + " -" * 50_000, "? " * 50_000]
)
def test_what_is_nested_too_deeply_is_damage_and_no_crash(content, tmp_path):
    """libyaml's loader overflows the stack there, so this is asked in a process of its own."""
    (tmp_path / CONFIG).write_text(content)
    asked = "import sys; from pathlib import Path; from rlft.runs.run_folder import whole_config\n"
    asked += "try: whole_config(Path(sys.argv[1]))\nexcept ValueError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", asked, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "it is no YAML\n"), done.stderr


SMALL = ("generation=transformers", "generation.max_tokens=24", "scoring.workers=0", "model.device=cpu")
OFTEN = ("checkpoint.every=1", "checkpoint.keep=9", "console=null")
LORA = ("lora.rank=2", "lora.alpha=4")
SAMPLED = ("num_prompts=2", "n=4", "data.size=16", "data.held_out_size=4", "prompts_per_step=1", *SMALL,
           "generation.temperature=2")  # fmt: skip
FIRST = "1-sft"


def run_in(folder, *words):
    return cli.run([*words, f"hydra.run.dir={folder}"])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with `work/pipe`: a pipeline of four stages, named by paths relative to `work`; data beside it."""
    root = tmp_path_factory.mktemp("built")
    work = root / "work"
    work.mkdir()
    lines = [{"prompt": f"What is {n} + 7?", "answer": str(n + 7)} for n in range(10, 30)]
    (work / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        learn = ("max_completion_tokens=64", "prompts.max_tokens=64", "eval.every=0", "model.device=cpu", *OFTEN, *LORA)
        shown = "demonstrations.path=embedded:arithmetic-demonstrations"
        assert run_in(f"pipe/{FIRST}", "sft", shown, "examples_per_step=2", "steps=1", *learn) == 0
        assert run_in("pipe/2-sample", "sample", f"adapter=pipe/{FIRST}", *SAMPLED) == 0
        ranked = "preferences.path=pipe/ranked.jsonl"
        shutil.copyfile(Path(cli.__file__).parent / "assets" / "arithmetic-preferences.jsonl", "pipe/ranked.jsonl")
        from_sft = f"lora.path=pipe/{FIRST}"
        assert run_in("pipe/3-rm", "rm", ranked, from_sft, "rankings_per_step=2", "steps=1", *learn) == 0
        train = ("train", "data=jsonl", "data.path=data.jsonl", "prompts_per_step=2", "group_size=2", "steps=2")
        roles = (from_sft, f"snapshot.reference={work}/pipe/{FIRST}", "algorithm.kl_coef=0.1")
        rewards = ("reward=[exact_match,learned]", "reward.learned.path=pipe/3-rm", "trainer.schedule=constant")
        evaluated = ("eval.every=2", "eval.num_prompts=2", "eval.num_samples=1")
        assert run_in("pipe/4-train", *train, *roles, *rewards, *evaluated, *SMALL, *OFTEN, *LORA) == 0
    return root


@pytest.fixture
def moved(built, here):
    """The pipeline under another name in another place, its old place gone; the working directory is elsewhere, too."""
    shutil.copytree(built / "work" / "pipe", here / "elsewhere" / "renamed")
    shutil.copyfile(built / "work" / "data.jsonl", here / "elsewhere" / "data.jsonl")
    (built / "work").rename(built / "gone")
    yield Path("elsewhere/renamed")
    (built / "gone").rename(built / "work")


@pytest.mark.slow
def test_every_stage_of_a_moved_pipeline_works(moved, ran):
    assert cli.run(["resume", str(moved / "4-train"), "steps=3"]) == 0
    assert cli.run(["eval", f"run={moved / '4-train'}"]) == 0
    assert cli.run(["sample", f"run={moved / '4-train'}", "num_prompts=1", "n=2", "hydra.run.dir=sampled"]) == 0
    assert cli.run(["export", f"run={moved / '4-train'}", "out=adapter", "as=adapter"]) == 0
    assert cli.run(["resume", str(moved / "4-train" / "checkpoints" / "step_000002"), "hydra.run.dir=fork"]) == 0
    assert cli.run(["resume", str(moved / "3-rm"), "steps=2"]) == 0
    (moved / "2-sample" / "progress.json").unlink()
    assert "error" not in ran(["resume", str(moved / "2-sample")]).err
    for run in (moved / "4-train", moved / "3-rm", moved / "2-sample", Path("fork")):
        paths = [path for _, path in path_keys(find(run).config) if not path.startswith("embedded:")]
        assert [path for path in paths if not Path(path).exists()] == []
    moved.parent.rename("again")  # what a resume writes into config.yaml is found again after another move
    assert cli.run(["resume", "again/renamed/3-rm", "steps=3"]) == 0


def test_what_a_stage_was_made_from_is_still_compared(moved, capsys):
    weights = moved / FIRST / "checkpoints" / "step_000001" / "policy" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert cli.run(["resume", str(moved / "4-train"), "steps=3"]) == 2
    assert "the adapter in that folder changed since the run began" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_are_used_from_their_own_folder_and_from_beside_it(built, tmp_path, monkeypatch):
    shutil.copytree(built / "work", tmp_path / "work")
    run = tmp_path / "work" / "pipe" / "4-train"
    monkeypatch.chdir(run)
    assert cli.run(["eval", "run=."]) == 0
    assert cli.run(["eval", "run=checkpoints/step_000001"]) == 0
    monkeypatch.chdir(tmp_path / "work" / "pipe" / FIRST)
    assert cli.run(["resume", "../4-train", "steps=3"]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    monkeypatch.chdir(run / "checkpoints" / "step_000003")
    assert cli.run(["export", "run=.", f"out={tmp_path / 'out'}", "as=adapter"]) == 0


def test_a_pipeline_that_is_repeated_after_it_was_moved_goes_on_where_it_was_and_leaves_what_is_finished(moved, ran):
    words = ["sample", *SAMPLED, "resume=auto", f"hydra.run.dir={moved / '2-sample'}"]
    before = contents(moved)
    for name in (str(moved), str(moved.resolve())):
        assert "finished already, with the same config and inputs" in ran([*words, f"adapter={name}/{FIRST}"]).err
    assert "seed: 0 -> 1" in ran([*words, f"adapter={moved}/{FIRST}", "seed=1"], ends=2).err
    assert contents(moved) == before
    (moved / "2-sample" / "progress.json").unlink()  # as if it had been stopped before its first step was written down
    assert cli.run([*words, f"adapter={moved}/{FIRST}"]) == 0
    again = (moved / "2-sample" / "samples.jsonl").read_bytes()
    assert again.replace(str(moved).encode(), b"pipe") == before["2-sample/samples.jsonl"], "but for their model's path"


def test_a_path_that_was_changed_by_hand_is_what_it_was_changed_to(built, tmp_path):
    shutil.copytree(built / "work" / "pipe", tmp_path / "pipe")
    file = tmp_path / "pipe" / "4-train" / "config.yaml"
    file.write_text(file.read_text().replace("path: data.jsonl", "path: mine.jsonl"))
    config = run_folder.read(file.parent)
    assert config["data"]["path"] == "mine.jsonl"
    assert "paths" not in config["origin"]


EACH_STEP = ("trainer.schedule=constant", *OFTEN, "eval.every=0", "lora.rank=2")
LEARN = ("model.device=cpu", "max_completion_tokens=64", "prompts.max_tokens=64", *EACH_STEP)
DATA = ("data.size=16", "data.held_out_size=4", "prompts_per_step=2")
SAMPLE = ("sample", *SMALL, *DATA, "n=2")
COMMANDS = {
    "train": ("train", *SMALL, *EACH_STEP, *DATA, "group_size=2", "steps=3"),
    "sft": ("sft", *LEARN, "demonstrations.path=embedded:arithmetic-demonstrations", "examples_per_step=2", "steps=3"),
    "rm": ("rm", *LEARN, "preferences.path=embedded:arithmetic-preferences", "rankings_per_step=2", "steps=3"),
    "sample": (*SAMPLE, "num_prompts=4"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Gives the folder of a run of this command, of three steps or of four prompts."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(command):
        assert run_in(str(folder / command), *COMMANDS[command]) == 0
        return folder / command

    return run


@pytest.mark.parametrize("command", ["train", slow("sft"), slow("rm")])
def test_fewer_steps_than_the_run_has_done_are_refused_with_where_it_stands_and_what_is_possible(
    done, command, ran, capsys
):
    folder = done(command)
    before = contents(folder)
    for steps in (1, 2):
        capsys.readouterr()
        said = ran(["resume", str(folder), f"steps={steps}"], ends=2).err
        assert said.startswith(f"rlft: steps: the run has done 3 steps already, and none can be undone, got {steps}; ")
        shown = os.path.relpath(folder)
        assert f"raise it (rlft resume {shown} steps=6)" in said
        fork = f"start a new run from an earlier checkpoint (rlft resume {shown}/checkpoints/step_000001 steps=2)"
        assert (fork in said) == (steps == 2), "step 1 has no checkpoint before it"
    assert run_in(str(folder), *COMMANDS[command][:-1], "steps=2", "resume=auto") == 2
    assert "the run has done 3 steps already" in capsys.readouterr().err
    assert contents(folder) == before, "neither config.yaml nor status.json says otherwise now"
    code = f"import sys; from rlft import cli; print(cli.run(['resume', {str(folder)!r}, 'steps=1']), "
    code += "'torch' in sys.modules)"  # they are refused before a library is imported
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert asked.stdout == "2 False\n", asked.stderr


def test_fewer_prompts_than_are_sampled_are_refused(done, ran):
    folder = done("sample")
    before = contents(folder)
    said = ran(["resume", str(folder), "num_prompts=2"], ends=2).err
    assert said.startswith("rlft: num_prompts: the run has sampled 4 prompts already, got 2; ")
    assert f"raise it (rlft resume {os.path.relpath(folder)} num_prompts=8)" in said
    assert contents(folder) == before


def test_more_prompts_go_on_as_if_they_had_been_asked_for_at_once_but_not_after_a_cut_step(tmp_path, capsys):
    for name, number in {"more": 2, "once": 6, "cut": 3}.items():
        assert run_in(str(tmp_path / name), *SAMPLE, f"num_prompts={number}") == 0
    assert cli.run(["resume", str(tmp_path / "more"), "num_prompts=6"]) == 0
    more, once = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("more", "once"))
    assert more == once
    assert json.loads((tmp_path / "more" / "status.json").read_text())["steps"] == 3
    before = contents(tmp_path / "cut")
    assert cli.run(["resume", str(tmp_path / "cut"), "num_prompts=6"]) == 2
    assert "num_prompts: the run ended with 3 prompts inside a step of 2" in capsys.readouterr().err
    assert contents(tmp_path / "cut") == before
