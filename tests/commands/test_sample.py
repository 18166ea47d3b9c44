"""`rlft sample`: what is kept of a prompt's completions, and a file that is the same however often it was stopped."""

import json
import os
import shutil
from contextlib import redirect_stdout

import pytest
import yaml
from audited_runs import lines_of
from in_one_test import each
from slow_cases import slow

from rlft import cli
from rlft.commands import sample
from rlft.commands.sample import kept_indices
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.config.schema import SampleConfig
from rlft.runs import run_folder
from rlft.runs.find import NamedRun, like_run
from rlft.types import UserError


def config(*keys):
    return build(compose(keys, command="sample"), SampleConfig, "sample")


# -- what is kept ------------------------------------------------------------------------------------------------------
# Five completions: the first two and the last are the same tokens.
TOKENS = [(1,), (1,), (2,), (3,), (1,)]


@each(("keys", "rewards", "places"), [
    (["dedupe=false"], [0, 0, 1, 1, 0], [0, 1, 2, 3, 4]),
    (["dedupe=true"], [0, 0, 1, 1, 0], [0, 2, 3]),
    # The first of the best; equal ones are not compared further.
    (["keep=best"], [0, 0, 1, 1, 0], [2]),
    (["keep=best", "dedupe=false"], [1, 1, 0, 0, 1], [0]),
    (["keep=best"], [-3, -3, -2, -1, -3], [3]),
    (["keep=best"], [0, 0, 0, 0, 0], [0]),
    # At least min_reward: it is reached by being equal to it.
    (["keep=above", "min_reward=1"], [1, 1, 0.5, 1.5, 1], [0, 3]),
    (["keep=above", "min_reward=1", "dedupe=false"], [1, 1, 0.5, 1.5, 1], [0, 1, 3, 4]),
    (["keep=above", "min_reward=2"], [1, 1, 0.5, 1.5, 1], []),
    (["keep=above", "min_reward=-1"], [-1, -1, -1.5, 0, -1], [0, 3]),
    # The best first, told in the order in which they were sampled.
    (["max_per_prompt=2"], [0, 0, 2, 1, 0], [2, 3]),
    (["max_per_prompt=2"], [1, 1, 0, 2, 1], [0, 3]),
    (["max_per_prompt=2"], [1, 1, 1, 1, 1], [0, 2]),
    (["max_per_prompt=9"], [0, 0, 2, 1, 0], [0, 2, 3]),
    (["keep=above", "min_reward=1", "max_per_prompt=1"], [1, 1, 3, 2, 1], [2]),
    (["keep=best", "max_per_prompt=3"], [1, 1, 3, 2, 1], [2]),
])  # fmt: skip
def test_what_is_kept_of_a_prompts_completions(keys, rewards, places):
    assert kept_indices(TOKENS, rewards, config(*keys)) == places


# -- a run's sections --------------------------------------------------------------------------------------------------
def place(tmp_path, checkpoint=None, **changes):
    plain = compose(["data.difficulty=3", "generation.temperature=0.5", "reward=exact_match", "steps=7"])
    return NamedRun(run=tmp_path / "run", config={**plain, **changes}, checkpoint=checkpoint)


def test_run_takes_over_the_runs_sections_and_its_policy_samples(tmp_path):
    plain = compose([], command="sample")
    found = like_run(plain, place(tmp_path, seed=9))
    sections = ("model", "prompts", "generation", "data", "reward", "scoring", "freshness")
    assert {name: found[name] for name in sections} == {name: place(tmp_path).config[name] for name in sections}
    assert found["adapter"] == str(tmp_path / "run")
    own = {"command", "name", "seed", "n", "keep", "split", "resume"}
    assert {name: found[name] for name in own} == {name: plain[name] for name in own}
    assert build(found, SampleConfig, "sample").generation.temperature == 0.5
    assert like_run(plain, place(tmp_path, tmp_path / "step_000001"))["adapter"] == str(tmp_path / "step_000001")


def test_a_run_without_a_task_gives_no_prompts_and_one_without_an_adapter_its_model(tmp_path):
    plain, without = compose([], command="sample"), place(tmp_path, lora=None)
    del without.config["data"]
    found = like_run(plain, without)
    assert (found["data"], found["adapter"]) == ({}, None)
    assert found["model"] == {**plain["model"], "path": str(tmp_path / "run")}


def test_a_sampling_does_not_go_on_with_another_adapter(tmp_path):
    run_folder.write_config(tmp_path, compose([], command="sample"), {"adapter_fingerprint": "a" * 64})
    origin = run_folder.read(tmp_path)[run_folder.ORIGIN]
    run_folder.check_same_inputs(origin, {"adapter_fingerprint": "a" * 64})
    with pytest.raises(UserError, match=r"^adapter: the adapter in that folder changed since the run began"):
        run_folder.check_same_inputs(origin, {"adapter_fingerprint": "b" * 64})


# -- runs --------------------------------------------------------------------------------------------------------------
TINY = (
    "num_prompts=7", "prompts_per_step=3", "n=3", "generation=transformers", "generation.max_tokens=32",
    "data.size=16", "data.held_out_size=8", "scoring.workers=0", "model.device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The folder of a finished sampling that nothing disturbed; what it printed is beside it."""
    folder = tmp_path_factory.mktemp("sampled") / "run"
    with pytest.MonkeyPatch.context() as patch, folder.with_name("page").open("w") as page, redirect_stdout(page):
        patch.setenv("COLUMNS", "400")
        assert cli.run(["sample", *TINY, f"hydra.run.dir={folder}"]) == 0
    return folder


def test_a_line_says_what_was_sampled_and_what_it_was_worth(sampled):
    found = lines_of(sampled / "samples.jsonl")
    state = json.loads((sampled / "progress.json").read_text())
    assert (state["step"], state["sampled"], state["kept"], state["prompts_kept"]) == (3, 21, len(found), 7)
    assert state["bytes"] == (sampled / "samples.jsonl").stat().st_size
    assert 7 <= len(found) <= 21  # a prompt's equal completions are one
    assert len({(line["prompt_id"], tuple(line["token_ids"])) for line in found}) == len(found)
    assert len({line["prompt_id"] for line in found}) == 7
    for line in found:
        rewards = line["rewards"]
        assert line["reward"] == round(rewards["exact_match"] + 0.2 * rewards["format"], 6)
        assert line["model"] == "embedded:tiny-arithmetic"
    assert {line["reward"] for line in found} & {1.2, 1.0}, "a sum of float32 would say 1.2000000476837158"


def test_the_first_prompts_of_the_split_are_sampled(sampled, tmp_path):
    words = [word for word in TINY if not word.startswith("num_prompts=")]
    assert cli.run(["sample", *words, "num_prompts=2", "split=held_out", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    held_out = {line["prompt_id"] for line in lines_of(tmp_path / "run" / "samples.jsonl")}
    assert len(held_out) == 2
    assert not held_out & {line["prompt_id"] for line in lines_of(sampled / "samples.jsonl")}


@each("command", ["chat", "serve", "eval"])
def test_a_run_that_samples_has_no_policy_of_its_own_to_talk_to(command, sampled, ran):
    assert ran([command, f"run={sampled}"], ends=2).err.startswith("rlft: run: ")


def test_a_reward_of_exactly_the_smallest_one_is_kept(sampled, tmp_path):
    """1.2 is a sum of two float32 numbers, and no float32 number itself."""
    words = ["keep=above", "min_reward=1.2", f"hydra.run.dir={tmp_path / 'run'}"]
    assert cli.run(["sample", *TINY, *words]) == 0
    right = [line for line in lines_of(sampled / "samples.jsonl") if line["reward"] == 1.2]
    assert right
    assert lines_of(tmp_path / "run" / "samples.jsonl") == right


class StoppedError(BaseException):
    """Stands for a kill between writing a step's completions and saying so."""


@pytest.mark.parametrize("step", [slow(1), 2, slow(3)])
def test_what_a_kill_left_beyond_its_record_is_cut_and_sampled_again(step, sampled, tmp_path, monkeypatch):
    folder, write = tmp_path / "run", sample.write_atomically

    def write_or_die(file, text):
        if json.loads(text)["step"] == step:
            raise StoppedError
        write(file, text)

    with monkeypatch.context() as patch:
        patch.setattr(sample, "write_atomically", write_or_die)
        with pytest.raises(StoppedError):
            cli.run(["sample", *TINY, f"hydra.run.dir={folder}"])
    samples = folder / "samples.jsonl"
    before = json.loads((folder / "progress.json").read_text())["bytes"] if step > 1 else 0
    assert samples.stat().st_size > before, "that step's completions are there, and no record of them"
    with samples.open("ab") as file:
        file.write(b'{"prompt_id": "half a li')
    assert cli.run(["resume", str(folder)]) == 0
    for name in ("samples.jsonl", "progress.json"):
        assert (folder / name).read_bytes() == (sampled / name).read_bytes()


def test_prompts_that_are_too_long_are_left_out_with_a_note(tmp_path, ran):
    rows = [{"prompt": f"{i}" * (40 if i == 2 else 1), "answer": "1"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for word in TINY if not word.startswith(("data.", "num_prompts"))]
    words += ["data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", "data.held_out_fraction=0.34"]
    words += ["prompts.max_tokens=30", "prompts.over_limit=drop", f"hydra.run.dir={tmp_path / 'run'}"]
    assert "note: 1 train prompt longer than prompts.max_tokens=30 was dropped\n" in ran(["sample", *words]).err
    trained = {line["prompt_id"] for line in lines_of(tmp_path / "run" / "samples.jsonl")}
    assert "rows.jsonl:3" not in trained
    assert len(trained) == 6 - 2 - 1, "held out, and too long"


def test_finished_sampling_is_not_resumed(sampled, tmp_path, ran):
    shutil.copytree(sampled, tmp_path / "run")
    told = ran(["resume", str(tmp_path / "run")], ends=2).err
    assert told.startswith("rlft: resume: the run is finished: it has all its 3 steps")
    assert told.endswith("; start another one\n")
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == (sampled / "samples.jsonl").read_bytes()


@pytest.mark.parametrize("lora", [["lora.rank=2", "lora.alpha=4"], slow(["lora=null"])], ids=["adapter", "all weights"])
def test_a_runs_policy_samples_and_what_it_samples_teaches_the_next(lora, tmp_path):
    words = ["+recipe=sft_arithmetic", "steps=1", "examples_per_step=2", "generation=transformers", "model.device=cpu"]
    words += ["scoring.workers=0", "eval.every=0", "console=null", *lora]
    run, samples = tmp_path / "run", tmp_path / "samples"
    assert cli.run(["sft", *words, f"hydra.run.dir={run}"]) == 0
    keys = ["num_prompts=12", "n=4", "prompts_per_step=4", "keep=all", f"hydra.run.dir={samples}"]
    assert cli.run(["sample", f"run={run}", *keys]) == 0
    newest = run / "checkpoints" / "step_000001"
    settings = yaml.safe_load((samples / "config.yaml").read_text())
    if lora == ["lora=null"]:
        assert (settings["adapter"], settings["model"]["path"]) == (None, str(newest / "model"))
    else:
        assert settings["adapter"] == str(newest / "policy")
    assert settings["prompts"]["max_tokens"] == 64
    assert len({line["prompt_id"] for line in lines_of(samples / "samples.jsonl")}) == 12
    learned = [f"demonstrations.path={samples / 'samples.jsonl'}", "demonstrations.held_out_fraction=0.3"]
    assert cli.run(["sft", *words, *learned, f"hydra.run.dir={tmp_path / 'next'}"]) == 0


def test_the_page_at_the_end_says_what_is_where_and_what_to_do_with_it(sampled):
    shown, file = sampled.with_name("page").read_text(), os.path.relpath(sampled / "samples.jsonl")
    for told in ("21 completions of 7 prompts", file, f"sft demonstrations.path={file}", f"rm preferences.path={file}"):
        assert told in shown, told
