"""A run of any kind that is killed at any moment and resumed leaves bit for bit what it would have left.

One table: a row is a run, what shows that it had something to lose, and where its processes are killed, one after the
other. After each kill what is there is a beginning of the undisturbed run, and no process is left.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_folders import (
    ALL_WEIGHTS,
    IMAGES,
    KILLED,
    RANKS,
    RM,
    SAMPLE,
    check_resumed,
    check_same,
    check_so_far,
    checkpoints,
    learned,
    metrics,
    rollouts,
    tiny,
    whole_lines,
)  # fmt: skip
from run_processes import Nursery, happens, marked, start_fresh
from slow_cases import slow

Event = dict[str, Any]

SAMPLING = "rlft.loop.session:Session.sample"
DECODE = "rlft.generation.transformers:decode"
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
PUBLISHED = "rlft.loop.session:Session.publish"
RECORD = "rlft.loop.session:Session.record"
EVALUATED = "rlft.loop.metrics:summarise"
SAVED = "rlft.runs.checkpoint:save"
DIGESTS = "rlft.runs.chain:digest_of_each"  # in a thread, of each step that has begun
SEALED = "rlft.runs.chain:Chain.seal"
REWARD_TRAINED = "rlft.trainer.reward_training:RewardRefresh.train_if_due"


def killed(place: str, call: int, when: str = "before", **more: Any) -> Event:
    return {"at": place, "call": call, "when": when, "do": "kill", **more}


def torn(file: str, call: int = 1) -> Event:
    """The write of a file is done by half."""
    return {"half": file, "call": call}


# -- what shows that there was something to lose -----------------------------------------------------------------------
def states(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((checkpoint / "state.json").read_text()) for checkpoint in checkpoints(folder)]


def contents(folder: Path, file: str) -> list[bytes]:
    return [(checkpoint / file).read_bytes() for checkpoint in checkpoints(folder)]


def adapters(folder: Path, role: str) -> list[bytes]:
    return contents(folder, f"{role}/adapter_model.safetensors")


def differ(*files: str) -> Callable[[Path], bool]:
    """Whether these files, and the optimizer's, are others in every checkpoint."""

    def moves(folder: Path) -> bool:
        names = (*files, "optimizer.safetensors")
        return all(len(set(contents(folder, name))) == len(checkpoints(folder)) > 2 for name in names)

    return moves


def many_samples(folder: Path) -> bool:
    return len((folder / "samples.jsonl").read_text().splitlines()) > 10


def everything_is_there(folder: Path) -> bool:
    """TINY's: evaluated before the first step, after 2, 4 and the last."""
    steps = [1, 2, 3, 4, 5]
    return (
        learned(folder)
        and [line["step"] for line in metrics(folder)] == steps
        and len(whole_lines(folder / "eval.jsonl")) == 4
        and list(rollouts(folder)) == [f"step_00000{step}.jsonl" for step in steps]
        and [c.name for c in checkpoints(folder)] == [f"step_00000{step}" for step in steps]
    )


def ppo_moves(folder: Path) -> bool:
    files = ("critic/head.safetensors", "critic/adapter_model.safetensors", "reference/adapter_model.safetensors")
    coefficients = {state["algorithm"]["kl_coef"] for state in states(folder)}
    counts = [state["critic"]["num_steps"] for state in states(folder)]
    return learned(folder) and len(coefficients) > 2 and counts == [1, 2, 3, 4, 5] and differ(*files)(folder)


def is_resampled(folder: Path) -> bool:
    sampled = [line["sampled/completions"] for line in metrics(folder)]
    return learned(folder) and max(sampled) > 3 * 4 and len(set(sampled)) > 1


def snapshots_move(folder: Path) -> bool:
    policy = adapters(folder, "policy")
    # The reference is renewed after steps 2 and 4; old is the policy that samples next.
    references = [policy[1], policy[1], policy[3], policy[3]]
    return learned(folder) and adapters(folder, "reference")[1:] == references and adapters(folder, "old") == policy


def reward_learns(folder: Path) -> bool:
    weights = adapters(folder, "reward_learned")
    trained = [line["step"] for line in metrics(folder) if "reward_model/loss" in line]
    said = {line["reward/learned"] for line in metrics(folder) if line["step"] > 2}
    return learned(folder) and trained == [2, 4] and weights[1] == weights[2] != weights[3] and 0.0 not in said


def follows_a_schedule(folder: Path) -> bool:
    # The critic alone; warm; then (1 + cos(pi k / 3)) / 2 of the recipe's 1e-3, for k = 0, 1, 2.
    rates = [line["policy/lr"] for line in metrics(folder)]
    expected = pytest.approx([0.0, 1e-3, 1e-3, 0.75e-3, 0.25e-3], rel=1e-12)
    return learned(folder) and differ("critic/head.safetensors")(folder) and rates == expected


# -- the table ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Case:
    """words: of the undisturbed run. kills: one of each process, in the order in which the run comes to them.

    every, keep: of the killed run's checkpoints, where it has any.
    told: what each of its processes is told in addition, the last one, which goes on to the end, included.
    moves: whether the undisturbed run did what it is there for. left: the step that the last process begins after.
    """

    words: tuple[str, ...]
    kills: Sequence[Event]
    every: int = 1
    keep: int = 2
    told: Sequence[tuple[str, ...]] = ()
    moves: Callable[[Path], bool] = learned
    left: int | None = None


# Going on from its newest checkpoint, every 2 steps.
STAGES = [
    killed("rlft.runs.run_folder:write_config", 1),
    killed("rlft.runs.run_folder:write_config", 1, "after"),
    killed(EVALUATED, 1),  # in the evaluation before the first step
    killed(DECODE, 2, "after"),  # sample, after the evaluation's
    killed("rlft.reward.workers.scorer:Scorer.__call__", 3),  # score: the evaluation, step 1, step 2
    killed("rlft.algorithm.grpo:GRPO.credit", 2, "after"),
    killed(UPDATE, 2),  # update, gradients are there
    killed(UPDATE, 2, "after"),  # update, weights have moved
    killed("rlft.model.roles:Roles.load_sampler", 3, "after"),  # publish: at the start, after steps 1 and 2
    killed(RECORD, 2),
    killed(RECORD, 2, "after"),
    killed(EVALUATED, 2, "after"),  # in the evaluation after step 2
    killed(SAVED, 1),  # after it, before the checkpoint
    killed(SAVED, 1, "after"),
    killed("rlft.model.roles:Roles.restore", 1, "after"),  # while it resumes
    killed(SAMPLING, 2),  # between steps 3 and 4
    killed(SAVED, 1, "after"),
    killed("rlft.loop.session:Session.evaluate_if_due", 1),  # after the last step
    killed(SAVED, 1),
]
# The line of step k is written when that of k + 1 is made, or a checkpoint. Calls of a new run are for steps 0, 1, ..
IN_THE_THREAD = [
    killed(DIGESTS, 2),  # those of step 1
    killed(DIGESTS, 3, "after"),  # those of step 2, for which its checkpoint waits
    killed(SEALED, 3, "after"),
    killed("rlft.runs.chain:append", 3, "after"),  # the line of step 2, before its checkpoint
    killed(SAVED, 1, "after"),
    killed("rlft.runs.chain:sealed", 1),  # resumed, that of step 3, while that of step 4 is made
]
FEW = [STAGES[1], STAGES[7], IN_THE_THREAD[1], STAGES[13], STAGES[14], IN_THE_THREAD[5]]
WRITES = [
    torn(".config.yaml.writing"),
    torn("eval.jsonl"),
    torn("step_000001.jsonl.tmp"),
    killed("pathlib:Path.replace", 2, "before"),  # config.yaml's, then the first rollouts'
    killed("pathlib:Path.replace", 2, "after"),
    torn("metrics.jsonl"),
    torn("metrics.jsonl", 2),
    torn("eval.jsonl", 2),
    torn("adapter_model.safetensors"),
    torn("adapter_config.json"),
    torn("optimizer.safetensors"),
    torn("state.json"),
    torn("MANIFEST"),
    killed("pathlib:Path.rename", 1, "after"),  # of the probe that tries whether the folder can be written to
    killed("pathlib:Path.rename", 2),  # the checkpoint is whole but has not its name
    killed("pathlib:Path.rename", 2, "after"),
    torn("metrics.jsonl", 2),
    torn("shutil:rmtree"),  # the checkpoint of step 2 is being removed: only the newest is kept
    torn("step_000005.jsonl.tmp"),
    torn("state.json"),
]
IN_THE_SECOND_CHECKPOINT = [torn("optimizer.safetensors", 2)]
OF_ALL_WEIGHTS = [
    killed(UPDATE, 2, "after"),
    killed(PUBLISHED, 3, "after"),
    killed(SAVED, 1),
    torn("optimizer.safetensors"),
    torn("metrics.jsonl", 3),
]
# With the gradients of step 2; with step 2 done and not saved; in files; and at any moment of an update, resumed.
OF_SUPERVISED = [
    killed(UPDATE, 2, "after"),
    killed(SAVED, 1),
    torn("optimizer.safetensors"),
    torn("metrics.jsonl", 3),
    torn("eval.jsonl"),
    killed("rlft.loop.supervised:SupervisedRun.update", 1, later=random.uniform(0, 0.03)),
]
# Each in the first or second step that it does: none, 1, 1, 2, 3 of five steps are then behind it.
OF_SAMPLING = [
    killed(DECODE, 1, "after"),
    torn("samples.jsonl", 2),
    torn(".progress.json.writing"),
    killed("rlft.commands.sample:Samples.add", 1, "after"),
    killed("rlft.commands.sample:write_atomically", 2),
]

SFT = (
    "sft", "+recipe=sft_arithmetic", "examples_per_step=4", "generation=transformers",
    "generation.max_tokens=24", "eval.every=2", "eval.num_prompts=4", "eval.num_samples=2", "data.size=64",
    "data.held_out_size=8", "scoring.workers=0", "model.device=cpu", "console=null",
)  # fmt: skip
SFT_OF_ALL_WEIGHTS = (*SFT, "lora=null", "trainer.lr=1e-4", "trainer.schedule=cosine", "trainer.warmup=2")
# Five pairs are left: an update has new ones and known ones.
DPO = (
    "dpo", "+recipe=dpo_arithmetic", "preferences.held_out_fraction=0.993", "rankings_per_step=4", "lora.rank=2",
    "lora.dropout=0.1", "eval.every=2", "eval.num_rankings=8", "model.device=cpu", "console=null",
)  # fmt: skip
GRPO_OF_ALL_WEIGHTS = ("train", "+recipe=grpo_arithmetic", *ALL_WEIGHTS, "eval.every=2")
MOVING_REFERENCE = (
    *GRPO_OF_ALL_WEIGHTS, "snapshot.reference=ema", "snapshot.ema_decay=0.5", "algorithm.kl_coef=0.1",
    "snapshot.old=copy", "minibatches=2", "trainer.schedule=cosine",
)  # fmt: skip
MODEL, REFERENCE, POLICY = "model/model.safetensors", "reference/model.safetensors", "policy/adapter_model.safetensors"
TWO_RANKS = ("cluster.ranks=2",)

FAST = {
    "in a step": Case(words=tiny(), kills=FEW, every=2, moves=everything_is_there),
    "a moving reference of all weights": Case(
        words=(*MOVING_REFERENCE, "steps=3"), kills=IN_THE_SECOND_CHECKPOINT, moves=differ(MODEL, REFERENCE)
    ),
    "sft of all weights": Case(
        words=(*SFT_OF_ALL_WEIGHTS, "steps=3"), kills=IN_THE_SECOND_CHECKPOINT, moves=differ(MODEL)
    ),
    "sampling": Case(words=SAMPLE, kills=OF_SAMPLING[1:4:2], moves=many_samples, left=2),
}
CASES = {
    "in every stage": Case(words=tiny(), kills=STAGES, every=2),
    "while digests are computed": Case(words=tiny(), kills=IN_THE_THREAD, every=2),
    "inside every kind of write": Case(words=tiny(), kills=WRITES, every=2, keep=1),
    # Two epochs of two minibatches, and two optimizers: eight updates a step, resumed from steps 1 and 3.
    "ppo with critic, adaptive KL, ema and value normalisation": Case(
        words=tiny(
            "algorithm=ppo", "critic.kind=adapter", "critic.lr=1e-3", "critic.normalize_values=true",
            "snapshot.reference=ema", "snapshot.ema_decay=0.9", "algorithm.kl_coef=0.05",
            "algorithm.kl_controller=adaptive", "algorithm.kl_target=0.01", "prompts_per_step=2", "epochs=2",
            "minibatches=2",
        ),
        kills=[killed(UPDATE, 8 + 5, "after"), killed(UPDATE, 2 * 8 + 6, "after")],
        moves=ppo_moves,
    ),
    "dynamic sampling": Case(
        words=tiny("dynamic_sampling.max_rounds=2"),
        kills=[
            killed("rlft.loop.sampling:uninformative", 4, "after"), killed("rlft.loop.sampling:replaced", 2, "after"),
        ],
        moves=is_resampled,
    ),
    "a curriculum that counts the run's own groups": Case(
        words=tiny("curriculum.running=true", "curriculum.replay=0.5", "curriculum.below=1", "data.size=8"),
        kills=[killed(UPDATE, 2, "after"), killed(SAVED, 2, "after")],
        moves=lambda folder: learned(folder) and metrics(folder)[-1]["curriculum/known_fraction"] > 3 / 8,
    ),
    "old and reference copies": Case(
        words=tiny(
            "snapshot.old=copy", "snapshot.reference=copy", "snapshot.refresh_every=2", "algorithm.kl_coef=0.1",
            "epochs=2",
        ),
        kills=[killed("rlft.model.roles:Roles.refresh", call, "after") for call in (2, 3)],
        moves=snapshots_move,
    ),
    "a learned reward trained in the loop": Case(
        words=tiny(
            "reward=[exact_match,format,learned]", "reward_model.refresh_every=2", "reward_model.labels=exact_match",
            "reward_model.replay=0.5", "generation.max_tokens=32",
        ),
        # In the training after step 2; with pairs of step 3 waiting and earlier ones kept; in that after step 4.
        kills=[killed(place, call, "after") for place, call in ((REWARD_TRAINED, 2), (SAVED, 2), (REWARD_TRAINED, 1))],
        moves=reward_learns,
    ),
    "pretraining text, a shared critic that learns first, a schedule, and a reset of the moments": Case(
        words=tiny(
            "algorithm=ppo_ptx", "pretrain.path=embedded:arithmetic-text", "pretrain.sequences_per_update=4",
            "pretrain.held_out=4", "critic.kind=shared", "critic.lr=1e-3", "critic.warmup_steps=1",
            "snapshot.reference=base", "algorithm.kl_coef=0.05", "trainer.schedule=cosine", "trainer.warmup=2",
            "trainer.reset_every=3", "eval.kl_base=true",
        ),
        kills=[killed(SAVED, 2, "after"), killed(UPDATE, 2 * 2 + 1, "after")],
        moves=follows_a_schedule,
    ),
    # While an engine of its own samples step 3; in the update next to it; then in the process that does both in turn.
    "sampling next to the update": Case(
        words=tiny("overlap.lag=1", "algorithm.mismatch=token_truncate", "steps=4", "eval.every=0"),
        kills=[killed("rlft.loop.sampling:NextSamples.wait", 2), killed(UPDATE, 2), killed(UPDATE, 1)],
        told=[("cluster.engines=1",), (), ("cluster.engines=0",), ("cluster.engines=1",)],
    ),
    # Three updates a step: in the second step.
    "two ranks, then four": Case(words=RANKS, kills=[killed(UPDATE, 5)], told=[TWO_RANKS, ("cluster.ranks=4",)]),
    "two ranks, then four, of all weights": Case(
        words=(*(key for key in RANKS if not key.startswith("lora.")), "lora=null", "trainer.lr=1e-4"),
        kills=[killed(UPDATE, 5)],
        told=[TWO_RANKS, ("cluster.ranks=4",)],
        moves=lambda _: True,
    ),
    # Then one, which has all layers in main memory.
    "two ranks that divide the base": Case(
        words=RANKS,
        kills=[killed(UPDATE, 5)],
        told=[(*TWO_RANKS, "cluster.engines=1", "cluster.shard_base=true"), ("cluster.ranks=1",)],
    ),
    "images": Case(
        words=(*IMAGES, "steps=4"),
        kills=[
            killed("rlft.model.images:ImageEncoder._encode", 3, "after"),  # while the first images are read
            killed(UPDATE, 3, "after"),  # in step 2
            killed("rlft.model.images:ImageEncoder.rows_of", 2),  # resumed, which reads the images again
            killed(SAVED, 1),
        ],
    ),
    "a moving reference of all weights, several updates": Case(
        words=(*MOVING_REFERENCE, "steps=5"), kills=OF_ALL_WEIGHTS, every=2, moves=differ(MODEL, REFERENCE)
    ),
    "all weights and a fixed reference": Case(
        words=(*GRPO_OF_ALL_WEIGHTS, "steps=5", "snapshot.reference=base", "algorithm.kl_coef=0.1"),
        kills=OF_ALL_WEIGHTS,
        every=2,
        moves=differ(MODEL),
    ),
    "all weights and a critic": Case(
        words=(
            *("train", "+recipe=ppo_arithmetic", *ALL_WEIGHTS, "eval.every=2", "steps=5", "critic.kind=shared"),
            "critic.normalize_values=true",
        ),
        kills=OF_ALL_WEIGHTS,
        every=2,
        moves=differ(MODEL),
    ),
    "all weights and engines in other processes": Case(
        words=(*GRPO_OF_ALL_WEIGHTS, "generation.transformers.batch_size=4", "steps=3"),
        kills=[killed(UPDATE, 2, "after"), killed(PUBLISHED, 2)],
        told=[("cluster.engines=2",), ("cluster.engines=1",), ("cluster.engines=0",)],
        moves=differ(MODEL),
    ),
    "sft of an adapter with dropout": Case(
        words=(*SFT, "lora.rank=2", "lora.dropout=0.1", "steps=5"), kills=OF_SUPERVISED, every=2, moves=differ(POLICY)
    ),
    "sft of all weights, and a schedule": Case(
        words=(*SFT_OF_ALL_WEIGHTS, "steps=5"), kills=OF_SUPERVISED, every=2, moves=differ(MODEL)
    ),
    "a reward model, with replay and dropout": Case(
        words=(*RM, "steps=5"),
        kills=OF_SUPERVISED,
        every=2,
        moves=differ("reward/adapter_model.safetensors", "reward/head.safetensors"),
    ),
    "preference optimisation, over the pairs again, with dropout": Case(
        words=(*DPO, "steps=5"), kills=OF_SUPERVISED, every=2, moves=differ(POLICY)
    ),
    "sampling, everywhere": Case(words=SAMPLE, kills=OF_SAMPLING, moves=lambda _: True, left=3),
}  # fmt: skip


@pytest.mark.parametrize("case", [*FAST.values(), *map(slow, CASES.values())], ids=[*FAST, *CASES])
def test_killed_and_resumed_it_is_the_same_run(
    case: Case, rough: Nursery, undisturbed_of: Callable[..., Path], tmp_path: Path
) -> None:
    undisturbed, folder = undisturbed_of(*case.words), tmp_path / "run"
    assert case.moves(undisturbed)
    saves = () if case.words[0] == "sample" else (f"checkpoint.every={case.every}", f"checkpoint.keep={case.keep}")
    told = case.told or [()] * (len(case.kills) + 1)
    for event, more in zip(case.kills, told, strict=False):
        begun = (folder / "config.yaml").exists()
        words = ("resume", "run") if begun else (*case.words, *saves, "hydra.run.dir=run")
        started = rough.start(*words, *more, cwd=tmp_path, events=[event])
        done = started.wait()
        assert done.code == KILLED, f"{event}: {done.err}"
        assert happens(lambda mark=started.mark: not marked(mark), within_s=60)
        check_so_far(folder, undisturbed)
    assert case.left is None or json.loads((folder / "progress.json").read_text())["step"] == case.left
    rough.run("resume", "run", *told[-1], cwd=tmp_path, ends=0)
    check_same(folder, undisturbed)


@pytest.fixture
def threaded() -> Iterator[Nursery]:
    with closing(Nursery(hash_seed=4, threads=0)) as nursery:
        yield nursery


@pytest.mark.slow
def test_killed_from_outside_at_random_moments_and_resumed_it_is_the_same_run(
    threaded: Nursery, tmp_path: Path
) -> None:
    """With as many threads as torch takes, and hashes that are not those of the run in a fresh interpreter."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    every = ("checkpoint.every=1", "checkpoint.keep=99", "hydra.run.dir=undisturbed")
    done = start_fresh(*tiny(), *every, cwd=tmp_path).wait()
    assert done.code == 0, done.err
    seconds = [json.loads(line)["time/step"] for line in whole_lines(undisturbed / "metrics.jsonl")]
    pause = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "stop"}  # until it is set up
    words = [*tiny(), "hydra.run.dir=run", "checkpoint.every=1"]
    for _ in range(2):
        started = threaded.start(*words, cwd=tmp_path, events=[pause])
        started.wait_until_stopped()
        started.go_on()
        time.sleep(random.uniform(0, sum(seconds[len(whole_lines(run / "metrics.jsonl")) :]) / 2))
        started.kill()
        assert started.wait().code == KILLED, started.wait().err
        check_so_far(run, undisturbed)
        words = ["resume", "run"]
    check_resumed(threaded, tmp_path, undisturbed)
