"""A forger who writes the chain anew is found by what is recomputed and replayed; honest runs of any kind are not.

Runs of every algorithm, command and kind of role are replayed bit for bit.
"""

import itertools
import json
import shlex
import shutil

import pytest
import yaml
from audited_runs import (
    WORDS,
    audited,
    edited,
    key_set,
    lines_of,
    nested,
    noisy,
    rechained,
    replaced,
    resealed,
    rollouts,
    saved,
    write,
    wrong,
)
from comparison_cases import CASES, RUN, TRAIN, case
from in_one_test import each
from safetensors.torch import load_file, save_file
from slow_cases import slow_but

from rlft import cli
from rlft.commands.audit.recomputed import largest_gap
from rlft.generation.transformers import TransformersGenerator
from rlft.runs import checkpoint
from rlft.runs.chain import CHAIN
from rlft.runs.run_folder import CONFIG
from rlft.system.terminal import Status

R2 = "rollouts/step_000002.jsonl"


def all_right(line):
    """Another text, with the rewards that it would have got."""
    line["completion"] = f"<think>so</think><answer>{line['answer']}</answer>"
    line["rewards"] = dict.fromkeys(line["rewards"], 1.0)


def of_another_prompt(folder):
    """A group gets the prompt of another step, with its id, messages and answer."""
    lines, other = lines_of(folder / R2), lines_of(rollouts(folder, 3))[0]
    for line in lines[:4]:
        line |= {name: other[name] for name in ("prompt_id", "prompt", "answer")}
    write(folder / R2, lines)


def renumbered(folder):
    second, third = (lines_of(rollouts(folder, step)) for step in (2, 3))
    write(rollouts(folder, 2), [{**line, "step": 2, "policy_version": 1} for line in third])
    write(rollouts(folder, 3), [{**line, "step": 3, "policy_version": 2} for line in second])


def reversed_data(folder):
    file = folder.parent / "data.jsonl"
    write(file, lines_of(file)[::-1])


def flipped(folder):
    file = folder.parent / "base" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


FORGED = {
    "a reward": (edited(R2, 5, nested("rewards", "exact_match", 0.25)), f"{R2}: step 2, prompt "),
    "a total": (edited(R2, 5, key_set(reward=0.25)), "total reward is 0.25, its parts give "),
    "an advantage": (edited(R2, 5, key_set(advantage=0.25)), "completion 1: advantage is 0.25, recomputed "),
    "a text and its rewards": (edited(R2, 5, all_right), "a completion's text is not that of its tokens"),
    "a token": (edited(R2, 5, lambda line: line["token_ids"].__setitem__(0, 7)), "step 2: tokens or masks are not"),
    "a policy version": (edited(R2, 5, key_set(policy_version=0)), "policy version 0 sampled it instead of 1"),
    "an answer": (edited(R2, 5, key_set(answer="0")), "completion 1: prompt or answer are not those of the data"),
    "a step's number": (edited(R2, 5, key_set(step=3)), "completion 1: is of another step or prompt"),
    "a group's prompt": (of_another_prompt, "step 2: its prompts are not those that data and seed give"),
    "the completions of two steps": (renumbered, "step 2: its prompts are not those that data and seed give"),
    "the seed": (lambda folder: config_edited(folder, seed=5), "its prompts are not those that data and seed give"),
}
"""{what was changed, and the chain with it: (how, what the finding holds)}."""
INPUTS = {
    "data in another order": (reversed_data, "training data: data.path has the fingerprint"),
    "an answer in the data": (edited("../data.jsonl", 3, key_set(answer="0")), "data.path has the fingerprint"),
    "a bit of the base": (flipped, "base: model.path has other weights ("),
}


def config_edited(folder, **keys):
    plain = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**plain, **keys}, sort_keys=False))


@each("what", FORGED)
def test_a_forger_who_writes_the_chain_anew_is_found_by_what_is_recomputed(what, copies):
    tamper, expected = FORGED[what]
    folder = copies()
    tamper(folder)
    rechained(folder)
    assert wrong(audited(folder)) == [], "the chain fits"
    found = wrong(audited(folder, recompute=9))
    assert any(expected in row for row in found), (what, found)


@each("what", INPUTS)
def test_other_data_or_another_base_is_found(what, copies):
    tamper, expected = INPUTS[what]
    folder = copies()
    tamper(folder)
    rows = audited(folder, recompute=9)
    assert any(expected in row for row in wrong(rows)), (what, rows)
    assert [row.name for row in rows if row.status is Status.skipped] == ["recomputed"]


def test_what_is_not_there_is_left_open_and_not_accused(copies):
    folder = copies()
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("/data.jsonl", "/nowhere.jsonl"))
    rechained(folder)
    rows = audited(folder, recompute=9, replay=1)
    assert [row.name for row in rows if row.status is not Status.ok] == ["inputs"]
    assert "nowhere.jsonl" in rows[-1].value


def test_a_reward_that_is_random_is_named_and_not_accused(copies, monkeypatch):
    folder, calls = copies(), itertools.count()
    monkeypatch.setattr("rlft.reward.exact_match.ExactMatch.__call__", lambda self, group: [float(next(calls))] * 4)
    rows = audited(folder, recompute=9)
    assert wrong(rows) == []
    [left] = [row for row in rows if row.name == "rewards"]
    assert left.status is Status.skipped
    assert left.value == "exact_match scores the same completions differently each time"


def test_without_completions_on_disk_rewards_are_left_open(copies):
    folder = copies()
    config_edited(folder, rollouts={"every": 0, "keep": None})
    rechained(folder)
    for file in (folder / "rollouts").iterdir():
        file.unlink()
    rows = audited(folder, recompute=9)
    left = {row.name: row.value for row in rows if row.status is not Status.ok}
    assert left.keys() == {"rollouts", "recomputed"}
    assert left["rollouts"] == "steps 1, 2, 3, 4: completions are not on disk"


ADAPTER = "policy/adapter_model.safetensors"


REPLAYED = {
    "an adapter": (resealed(lambda folder: noisy(folder / ADAPTER)), "replay: step 3: adapters/policy differ"),
    "moments": (resealed(lambda folder: noisy(folder / "optimizer.safetensors")), "replay: step 3: optimizer differ"),
    "a learning rate": (
        replaced("config.yaml", "lr: 0.02", "lr: 0.01"),
        "replay: step 1: adapters/policy, metrics differ",
    ),
    "a metric": (edited("metrics.jsonl", 2, key_set(**{"reward/mean": 0.9})), "replay: step 3: metrics differ"),
}
"""{what was changed, and all digests with it: (how, how the finding begins)}."""


@pytest.mark.parametrize("what", slow_but("an adapter", REPLAYED))
def test_a_forger_who_writes_all_digests_anew_is_found_by_a_replay(what, copies):
    tamper, expected = REPLAYED[what]
    folder = copies()
    tamper(folder)
    rechained(folder)
    assert wrong(audited(folder, recompute=9)) == [], "without weights nothing shows"
    found = wrong(audited(folder, replay=9))
    assert any(row.startswith(expected) for row in found), (what, found)


def test_an_engine_that_was_stale_is_found(honest, tmp_path, monkeypatch):
    """The engine keeps version 0 in step 2, and nothing in the run looks."""
    load = TransformersGenerator.load

    def stale(self, adapter):
        if adapter.version == 1:
            self.version = 1
        else:
            load(self, adapter)

    inputs = (f"data.path={honest.parent / 'data.jsonl'}", f"model.path={honest.parent / 'base'}")
    words = [word for word in WORDS if not word.startswith(("steps=", "eval.every="))]
    with monkeypatch.context() as patch:
        patch.setattr(TransformersGenerator, "load", stale)
        assert cli.run(["train", *words, *inputs, "freshness.read_back=false", "freshness.threshold=1e9", "steps=2",
                        "eval.every=0", f"hydra.run.dir={tmp_path / 'run'}"]) == 0  # fmt: skip
    rows = audited(tmp_path / "run", recompute=9, replay=9)
    [found] = wrong(rows)
    assert found.startswith("replay: step 2: ")
    assert "rollouts" in found
    assert [row.value[:20] for row in rows if row.name == "replay" and row.status is Status.ok] == [
        "step 1, bit for bit:"
    ]


def slightly(file, relative):
    """The roundings of another processor."""
    save_file({name: t * (1 + relative) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.slow
def test_an_honest_run_of_another_processor_is_not_accused(copies):
    folder = copies()
    resealed(lambda place: slightly(place / ADAPTER, 1e-6))(folder)
    rechained(folder, {2: {"advantages": "0" * 64}}, machine={"processor": "another one"})
    rows = audited(folder, recompute=9, replay=9)
    assert wrong(rows) == []
    replayed = {row.value[:6]: row for row in rows if row.name == "replay"}
    assert len(replayed) == 4
    assert "metrics within 0.001, tokens the same; not bit for bit: other processor" in replayed["step 3"].value
    [advantages] = [row for row in rows if row.name == "advantages"]
    assert advantages.status is Status.skipped
    assert "within 1e-06" in advantages.value
    resealed(lambda place: noisy(place / ADAPTER))(folder)
    rechained(folder)
    rows = audited(folder, replay=9)
    assert wrong(rows) == [], "on another machine other tokens say nothing"
    assert [row.value[:26] for row in rows if row.status is Status.skipped] == ["step 4 samples other tokens"[:26]]


def test_without_checkpoints_only_the_first_step_is_replayed(copies):
    folder = copies()
    for step in (1, 2, 3):
        shutil.rmtree(saved(folder, step))
    rows = audited(folder, replay=9)
    assert wrong(rows) == []
    assert [row.value[:7] for row in rows if row.name == "replay"] == ["step 1,"]


def test_the_gap_of_metrics_leaves_out_times_and_is_relative_above_one():
    # |40 - 44| / 40 = 0.1; |0.2 - 0.25| = 0.05; times and what is not finite do not count
    recorded = {"a": 40.0, "b": 0.2, "time/x": 1.0, "c": None}
    assert largest_gap(recorded, {"a": 44.0, "b": 0.25, "time/x": 9.0, "c": 1.0}) == pytest.approx(0.1)
    assert largest_gap({}, {"a": 1.0}) is None


TALK = f"{TRAIN} generation.max_tokens=96 prompts.max_tokens=64 data.size=64 data.held_out_size=8"


CONVERSATIONS = (
    case("calculator", f"train +recipe=grpo_calculator {TALK} {RUN}"),
    case("ppo with a calculator", f"train +recipe=ppo_calculator {TALK} {RUN}"),
    case("a game", f"train +recipe=grpo_whom_to_ask {TALK} {RUN}"),
)


KINDS = {one.name: one for one in (*CASES, *CONVERSATIONS)}


@pytest.mark.parametrize("name", slow_but("dpo", KINDS))
def test_an_honest_run_of_any_kind_is_confirmed(name, forks, tmp_path):
    kind = KINDS[name]
    for file, content in kind.files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    for number, command in enumerate(kind.commands):
        forks.run(*shlex.split(command), cwd=tmp_path, ends=kind.codes.get(number, 0))
    chains = sorted(tmp_path.rglob(CHAIN))
    assert chains
    for chain in chains:
        audit = forks.run("audit", str(chain.parent), "recompute=9", "replay=9", "--json", cwd=tmp_path)
        assert audit.code in (0, 1), audit.err
        rows, where = json.loads(audit.out)["rows"], f"{name}, {chain.parent.name}"
        assert [row for row in rows if row["status"] == Status.wrong] == [], where
        replays = [row for row in rows if row["name"] == "replay"]
        others = [row["value"] for row in replays if "bit for bit:" not in row["value"]]
        assert [value for value in others if "was made with another config.yaml" not in value] == [], where
        assert replays or not (chain.parent / CONFIG).exists(), where  # exports have no config


@pytest.mark.slow
def test_another_head_of_a_reward_model_is_found(forks, tmp_path):
    """Also where MANIFEST was written anew; the bias is not trained, and depends on what is held out."""
    kind = KINDS["rm"]
    forks.run(*shlex.split(kind.commands[0]), cwd=tmp_path, ends=0)
    saved = tmp_path / "first" / "checkpoints" / "step_000003"
    [head] = [file for file in saved.rglob("*.safetensors") if "head" in file.name]
    noisy(head)
    checkpoint._write_manifest(saved)
    audit = forks.run("audit", "first", "replay=0", "--json", cwd=tmp_path, ends=1)
    differing = [row["value"] for row in json.loads(audit.out)["rows"] if row["status"] == Status.wrong]
    assert differing == ["step 3: heads/reward/weight differs from the chain"]
