"""When `rlft resume` refuses, before a weight is loaded and with nothing changed; and new runs from a checkpoint."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from run_folders import check_same, checkpoints, files_of, metrics, rollouts, tiny, whole_lines

from rlft import cli
from rlft.runs import run_folder
from rlft.system.files import digest_of_file
from rlft.types import UserError


@pytest.fixture
def stopped(undisturbed, here):
    """A run that was killed after step 4 with every checkpoint kept: `run` in the working directory, its own."""
    shutil.copytree(undisturbed, "run")
    shutil.rmtree("run/checkpoints/step_000005")
    return here / "run"


# -- one line, exit code 2, and nothing changed ------------------------------------------------------------------------
def as_it_is(undisturbed): ...


def finished(undisturbed):
    shutil.copytree(undisturbed / "checkpoints" / "step_000005", "run/checkpoints/step_000005")


def scheduled(undisturbed):
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("schedule: constant", "schedule: cosine"))


def damaged_everywhere(undisturbed):
    for checkpoint in checkpoints(Path("run")):
        flip_a_bit(checkpoint / "optimizer.safetensors")


def incomplete(undisturbed):
    Path(FROM, "optimizer.safetensors").unlink()


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


FROM = "run/checkpoints/step_000003"
FORK = f"resume {FROM} hydra.run.dir=fork"
CHANGES = "seed=3 trainer.lr=0.5 group_size=8 reward.format.weight=0.7 lora.target_modules=[q_proj]"
REFUSALS = [
    (as_it_is, " ".join(tiny("hydra.run.dir=run")), "hydra.run.dir: there is a run in that folder",
     ("continue it with `rlft resume run`",)),
    (finished, "resume run", "resume: the run is finished", ("rlft resume run steps=10",)),
    (as_it_is, f"resume run {CHANGES}", "resume: the config differs from the run's (group_size: 4 -> 8; ",
     ("; lora.target_modules: all-linear -> ['q_proj']; ", "; reward.format.weight: ",
      " -> 0.7; seed: 0 -> 3; trainer.lr: 0.001 -> 0.5)", "leave these keys as they were")),
    # Of a schedule that ends, more steps would have given other learning rates.
    (scheduled, "resume run steps=9", "resume: the config differs from the run's (steps: 5 -> 9), got run; ",
     ("or start a new run from its newest checkpoint: rlft resume run/checkpoints/step_000004 steps=9",)),
    (scheduled, "resume run steps=9 trainer.lr=0.5",
     "resume: the config differs from the run's (steps: 5 -> 9; trainer.lr: ", ("or start a new run\n",)),
    (damaged_everywhere, "resume run", "resume: every checkpoint of this run is damaged, got run/",
     ("checkpoint step_000004 is damaged (optimizer.safetensors does not match",)),
    (damaged_everywhere, "resume run steps=9", "resume: every checkpoint of this run is damaged, got run/", ()),
    # A new run from a checkpoint.
    (as_it_is, f"{FORK} lora.rank=4 lora.alpha=8", "", ("(lora.alpha: 16 -> 8; lora.rank: 2 -> 4)",)),
    (as_it_is, f"{FORK} lora.target_modules=[q_proj]", "", ("(lora.target_modules: all-linear -> ['q_proj'])",)),
    (as_it_is, f"{FORK} snapshot.reference=copy", "", ("(snapshot.reference: none -> copy)",)),
    (as_it_is, f"{FORK} snapshot.old=copy", "", ("(snapshot.old: auto -> copy)",)),
    (as_it_is, f"{FORK} algorithm=ppo critic.kind=adapter", "", ("(critic.kind: none -> adapter)",)),
    (as_it_is, f"{FORK} model.dtype=bfloat16", "", ("(model.dtype: auto -> bfloat16)",)),
    (as_it_is, f"{FORK} steps=3", "steps: the new run begins after step 3, got 3; raise it, for instance steps=6", ()),
    (as_it_is, f"{FORK} stepz=9", "stepz: there is no such key, got 9; did you mean steps?", ()),
    (as_it_is, f"{FORK} resume=auto", "resume: has no meaning here: a new run starts from the checkpoint", ()),
    (as_it_is, f"resume {FROM} hydra.run.dir=run steps=9", "hydra.run.dir: there is a run in that folder", ()),
    (as_it_is, f"{FORK} model.path=embedded:tiny-student", "model.path: the base changed since the run began", ()),
    (incomplete, f"resume {FROM}", "resume: the checkpoint is damaged (optimizer.safetensors is missing)", ()),
    (incomplete, f"train resume={FROM}", "", (f"start a new run from it: rlft resume {FROM}",)),
    (finished, "resume run hydra.run.dir=elsewhere", "",
     ("start a new run from a checkpoint: rlft resume run/checkpoints/step_000005 ",)),
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "words", "start", "parts"), REFUSALS, ids=lambda x: x[-60:] if x is str(x) else "")
def test_it_is_refused_and_left_as_it_is(prepare, words, start, parts, stopped, undisturbed, ran):
    prepare(undisturbed)
    before = files_of(stopped.parent)
    said = ran(words.split(), ends=2).err
    *damages, line = said.splitlines()
    assert line.startswith(f"rlft: {start}")
    assert all(damage.startswith("checkpoint step_") for damage in damages)
    assert [part for part in parts if part not in said] == []
    assert files_of(stopped.parent) == before, "not a line was cut, and it still stands as it stood"


# What may differ on resume: how long, how often, where to, and how it fits the machine. Nothing that a number rests on.
FREE = {
    "resume", "steps", "name", "token_budget",
    "data.path", "data.allow_unscorable", "pretrain.path", "model.path", "model.device",
    "scoring.workers", "scoring.timeout", "freshness.threshold", "freshness.every", "freshness.read_back",
    "checkpoint.every", "checkpoint.keep", "checkpoint.on_signal",
    "eval.every", "eval.num_prompts", "eval.num_samples", "eval.temperature", "eval.num_examples", "eval.kl_base",
    "stop.when", "curriculum.path",
    "generation.transformers.batch_size", "generation.transformers.graphs",
    "generation.vllm.gpu_memory_utilization", "generation.vllm.max_num_seqs",
    "generation.vllm.sleep", "generation.vllm.enforce_eager", "generation.vllm.share_base",
    "token_values.every", "token_values.groups",
    "cluster.kind", "cluster.address", "cluster.engines", "cluster.gpus_per_engine", "cluster.ranks",
    "cluster.placement", "cluster.timeout", "cluster.max_engine_restarts", "cluster.scoring", "cluster.jobs",
    "cluster.shard_base", "snapshot.teacher_gpu_memory_utilization",
    "console", "rollouts.every", "rollouts.keep",
}  # fmt: skip


def test_of_all_keys_those_that_change_no_number_are_free(undisturbed):
    saved = run_folder.read(undisturbed)
    saved.pop("origin")
    keys = sorted(run_folder.flatten(saved))
    assert len(keys) > 90
    free, told = set[str](), dict[str, str]()
    for key in keys:
        *sections, name = key.split(".")
        changed = json.loads(json.dumps(saved))
        place = changed
        for section in sections:
            place = place[section]
        place[name] = "another"
        try:
            run_folder.check_same_config(undisturbed, changed)
        except UserError as error:
            told[key] = error.problem
        else:
            free.add(key)
    assert all(f"({key}: " in said and said.count(" -> ") == 1 for key, said in told.items()), "it, and no other"
    assert free <= FREE
    assert {"steps", "eval.every", "checkpoint.every", "scoring.workers", "token_budget"} <= free


# -- what is changed and put back, damaged, or in use ------------------------------------------------------------------
def test_changed_inputs_are_refused_and_put_back_they_are_taken(undisturbed, tiny_path, here, capsys):
    """Training and held-out data, pretraining text, the base, and the adapter that is the reference."""
    shutil.copytree(tiny_path, "base")
    shutil.copytree(checkpoints(undisturbed)[0] / "policy", "sft")
    Path("sft/rlft.json").unlink()  # which names the base
    for split, numbers in (("train", range(10, 22)), ("held_out", range(30, 34))):
        lines = [{"prompt": f"What is {n} + 7?", "answer": str(n + 7)} for n in numbers]
        Path(f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("texts.jsonl").write_text("".join(json.dumps({"text": f"{n}+7={n + 7}"}) + "\n" for n in range(40, 60)))
    words = [key for key in tiny("steps=1") if not key.startswith("data.")]
    words += ["data=jsonl", f"data.path={here}/train.jsonl", f"data.held_out_path={here}/held_out.jsonl"]
    words += [f"pretrain.path={here}/texts.jsonl", "pretrain.sequences_per_update=2", "pretrain.held_out=2"]
    words += [f"model.path={here}/base", "snapshot.reference=sft", "algorithm.kl_coef=0.01"]
    assert cli.run([*words, "hydra.run.dir=run"]) == 0
    before = files_of(Path("run"))
    weights = checkpoints(undisturbed)[-1] / "policy" / "adapter_model.safetensors"
    changed = "changed since the run began"
    for name, old, new, said in (
        ("train.jsonl", b"What is 12 + 7?", b"What is 12 + 8?", f"data.path: the training data {changed} (fingerprint"),
        ("held_out.jsonl", b'"40"', b'"41"', f"data.path: the held-out data {changed} (fingerprint"),
        ("texts.jsonl", b"50+7=57", b"50+7=58", f"pretrain.path: the pretraining text {changed} (fingerprint"),
        ("base/config.json", b"10000.0", b"10001.0", f"model.path: the base {changed}: its config.json"),
        ("sft/adapter_model.safetensors", None, weights.read_bytes(),
         f"snapshot.reference: the adapter in that folder {changed} (fingerprint"),
    ):  # fmt: skip
        content = Path(name).read_bytes()
        assert old is None or content.count(old) == 1
        Path(name).write_bytes(new if old is None else content.replace(old, new))
        capsys.readouterr()
        assert cli.run(["resume", "run", "steps=2"]) == 2, name
        assert capsys.readouterr().err.startswith(f"rlft: {said}")
        Path(name).write_bytes(content)
    assert files_of(Path("run")) == before
    assert cli.run(["resume", "run", "steps=2"]) == 0


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(stopped, undisturbed, capsys):
    flip_a_bit(stopped / "checkpoints" / "step_000004" / "policy" / "adapter_model.safetensors")
    os.truncate(stopped / "checkpoints" / "step_000003" / "optimizer.safetensors", 1000)
    (stopped / "checkpoints" / "step_000002" / "state.json").unlink()
    assert cli.run(["resume", "run"]) == 0
    said = "checkpoint step_00000{} is damaged ({}); going back to the one before"
    assert capsys.readouterr().err.splitlines()[:3] == [
        said.format(4, "policy/adapter_model.safetensors does not match its checksum"),
        said.format(3, "optimizer.safetensors does not match its checksum"),
        said.format(2, "state.json is missing"),
    ]
    for damaged in checkpoints(stopped)[:-1]:
        shutil.rmtree(damaged)
    check_same(stopped, undisturbed)


def test_a_run_that_is_going_on_is_not_resumed_beside_itself(forks, stopped, undisturbed, ran):
    wait = {"at": "rlft.loop.session:Session.sample", "call": 1, "do": "stop"}
    going = forks.start("resume", "run", cwd=stopped.parent, events=[wait])
    try:
        going.wait_until_stopped()
        said = ran(["resume", "run"], ends=2).err
        assert (said.startswith("rlft: resume: another process is running this run"), "stop it" in said) == (True, True)
    finally:
        going.go_on()
    assert going.wait().code == 0
    check_same(stopped, undisturbed)


@pytest.mark.slow
def test_a_finished_run_trained_on_is_the_longer_run(undisturbed, here):
    # Evaluated and saved at 4 in both: the last step of a run is, whatever the dates.
    assert cli.run([*tiny("steps=4"), "checkpoint.every=2", "hydra.run.dir=run"]) == 0
    assert cli.run(["resume", "run", "steps=5", "scoring.workers=1"]) == 0
    check_same(here / "run", undisturbed)


SHORT = ("model.device=cpu", "lora.rank=2", "console=null", "eval.every=0", "trainer.warmup=1")
SCHEDULED = {
    "sft linear": ("sft", "+recipe=sft_arithmetic", "examples_per_step=4", "steps=2"),
    "sft cosine": ("sft", "+recipe=sft_arithmetic", "examples_per_step=4", "steps=2"),
    "rm cosine": ("rm", "+recipe=rm_arithmetic", "rankings_per_step=4", "steps=2"),
    "train cosine": (
        "train", "+recipe=grpo_arithmetic", "steps=2", "prompts_per_step=2", "group_size=2", "generation.max_tokens=8",
        "data.size=16", "data.held_out_size=4", "scoring.workers=0",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED)
def test_a_schedule_that_ends_goes_on_as_the_refusal_says(case, here, ran, capsys):
    """With more steps the learning rates of the steps that are done would have been others: a new run begins."""
    words = (*SCHEDULED[case], *SHORT, f"trainer.schedule={case.partition(' ')[2]}")
    assert cli.run([*words, "hydra.run.dir=run"]) == 0
    before = files_of(here / "run")
    for changed, last in ((["steps=3"], 3), ([], 4)):
        capsys.readouterr()
        said = ran(["resume", "run", *changed], ends=2).err
        assert "start a new run from its newest checkpoint" in said
        remedy = said.partition("rlft resume run/checkpoints/")[2].partition(")")[0].strip()
        assert cli.run(["resume", *f"run/checkpoints/{remedy}".split(), f"hydra.run.dir={last}"]) == 0
        assert [line["step"] for line in metrics(here / str(last))] == list(range(1, last + 1))
    assert files_of(here / "run") == before


# -- a new run from a checkpoint: the same steps as the run's own, whole curves, its origin, and what may change -------
@pytest.fixture
def place(undisturbed, here):
    """A working directory with the undisturbed run, of five steps and all checkpoints, in `run`."""
    shutil.copytree(undisturbed, here / "run")
    return here


def origin_of(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())["origin"]


def test_a_fork_does_what_the_run_itself_did_and_leaves_the_run_alone(undisturbed, place, capsys):
    before = files_of(place / "run")
    assert cli.run(["resume", FROM]) == 0
    [fork] = (place / "runs" / "grpo_arithmetic").iterdir()
    assert f"a new run from run after step 3, in {fork.relative_to(place)}" in capsys.readouterr().err
    check_same(fork, undisturbed)
    for step in (4, 5):
        name = f"step_{step:06d}"
        assert files_of(fork / "checkpoints" / name) == files_of(place / "run" / "checkpoints" / name)
    assert files_of(place / "run") == before
    manifest = place / FROM / "MANIFEST"
    assert origin_of(fork)["forked_from"] == {
        "run": "../../../run", "step": 3, "checkpoint": digest_of_file(manifest), "changed": {},
    }  # fmt: skip
    assert yaml.safe_load((fork / "config.yaml").read_text())["resume"] is None


@pytest.mark.slow
def test_a_fork_that_is_killed_at_any_moment_of_its_start_can_be_begun_or_resumed(forks, undisturbed, place):
    words = ("resume", FROM, "hydra.run.dir=fork")
    for event in (
        {"at": "rlft.runs.checkpoint:find_damage", "call": 2, "do": "kill"},  # the checkpoint has been copied
        {"at": "rlft.runs.run_folder:write_config", "call": 1, "do": "kill"},
    ):
        assert forks.run(*words, cwd=place, events=[event]).code == -9
        assert not (place / "fork" / "config.yaml").exists(), "not a run yet"
    for event in (
        {"at": "rlft.runs.run_status:recording_status", "call": 1, "do": "kill"},
        {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"},  # in step 5
    ):
        forks.run(*words, cwd=place, events=[event], ends=-9)
        words = ("resume", "fork")
    again = forks.run("resume", FROM, "hydra.run.dir=fork", cwd=place)
    assert (again.code, "continue it with `rlft resume fork`" in again.err) == (2, True)
    forks.run("resume", "fork", cwd=place, ends=0)
    check_same(place / "fork", undisturbed)


@pytest.mark.slow
def test_a_fork_with_another_rate_goes_another_way_from_the_same_beginning(undisturbed, place):
    changed = ("trainer.lr=0.0005", "algorithm.kl_coef=0.1", "snapshot.reference=base", "group_size=2", "steps=6")
    assert cli.run(["resume", FROM, *changed, "hydra.run.dir=fork"]) == 0
    fork = place / "fork"
    assert metrics(fork)[:3] == metrics(undisturbed)[:3]
    assert [line["step"] for line in metrics(fork)] == [1, 2, 3, 4, 5, 6]
    assert [line["policy/lr"] for line in metrics(fork)] == [0.001] * 3 + [0.0005] * 3
    assert ["kl/reference" in line for line in metrics(fork)] == [False] * 3 + [True] * 3
    assert [json.loads(line)["step"] for line in whole_lines(fork / "eval.jsonl")] == [0, 2, 4, 6]
    first = {name: content for name, content in rollouts(undisturbed).items() if name <= "step_000003.jsonl"}
    assert {name: rollouts(fork)[name] for name in first} == first
    assert origin_of(fork)["forked_from"]["changed"] == {
        "algorithm.kl_coef": "0.0 -> 0.1", "group_size": "4 -> 2", "snapshot.reference": "none -> base",
        "steps": "5 -> 6", "trainer.lr": "0.001 -> 0.0005",
    }  # fmt: skip
