"""A run of any kind that is killed, stopped or fails, and is resumed, leaves bit for bit what it would have left.

One table: a row is a run, what shows that it had something to lose, and what befalls its processes, one after the
other. `make test` has every stage of a step once; the rest of stage x signal x kind of run is slow.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from disturbed_runs import (
    DECODE,
    EVALUATED,
    GIVEN_UP,
    HEARD,
    HEARD_AT_THE_END,
    HEARD_BEFORE,
    PUBLISHED,
    RECORD,
    SAMPLING,
    SAVED,
    SCORING,
    UPDATE,
    Command,
    Hit,
    after_step,
    check_disturbed,
    failing,
    finished,
    full,
    killed,
    of_the_disk,
    pressed,
    stopped,
    stopped_at_once,
    to_the_end,
    torn,
)
from run_folders import (
    ALL_WEIGHTS,
    CONVERSATIONS,
    IMAGES,
    KILLED,
    RANKS,
    RM,
    SAMPLE,
    check_same,
    check_so_far,
    checkpoints,
    learned,
    metrics,
    rollouts,
    tiny,
    whole_lines,
)
from run_processes import Ended, start_fresh
from slow_cases import slow

DIGESTS = "rlft.runs.chain:digest_of_each"  # in a thread, of each step that has begun
SEALED = "rlft.runs.chain:Chain.seal"
REWARD_TRAINED = "rlft.trainer.reward_training:RewardRefresh.train_if_due"


# -- what shows that there was something to lose -----------------------------------------------------------------------
def states(folder):
    return [json.loads((checkpoint / "state.json").read_text()) for checkpoint in checkpoints(folder)]


def contents(folder, file):
    return [(checkpoint / file).read_bytes() for checkpoint in checkpoints(folder)]


def adapters(folder, role):
    return contents(folder, f"{role}/adapter_model.safetensors")


def differ(*files, least=3):
    """Whether these files, and the optimizer's, are others in every checkpoint, of which there are so many."""

    def moves(folder: Path) -> bool:
        names = (*files, "optimizer.safetensors")
        return all(len(set(contents(folder, name))) == len(checkpoints(folder)) >= least for name in names)

    return moves


def many_samples(folder):
    return len((folder / "samples.jsonl").read_text().splitlines()) > 10


def everything_is_there(folder):
    """TINY's: evaluated before the first step, after 2, 4 and the last."""
    steps = [1, 2, 3, 4, 5]
    return (
        learned(folder)
        and [line["step"] for line in metrics(folder)] == steps
        and len(whole_lines(folder / "eval.jsonl")) == 4
        and list(rollouts(folder)) == [f"step_00000{step}.jsonl" for step in steps]
        and [c.name for c in checkpoints(folder)] == [f"step_00000{step}" for step in steps]
    )


def ppo_moves(folder):
    files = ("critic/head.safetensors", "critic/adapter_model.safetensors", "reference/adapter_model.safetensors")
    coefficients = {state["algorithm"]["kl_coef"] for state in states(folder)}
    counts = [state["critic"]["num_steps"] for state in states(folder)]
    return learned(folder) and len(coefficients) > 2 and counts == [1, 2, 3, 4, 5] and differ(*files)(folder)


def is_resampled(folder):
    sampled = [line["sampled/completions"] for line in metrics(folder)]
    return learned(folder) and max(sampled) > 3 * 4 and len(set(sampled)) > 1


def snapshots_move(folder):
    policy = adapters(folder, "policy")
    # The reference is renewed after steps 2 and 4; old is the policy that samples next.
    references = [policy[1], policy[1], policy[3], policy[3]]
    return learned(folder) and adapters(folder, "reference")[1:] == references and adapters(folder, "old") == policy


def reward_learns(folder):
    weights = adapters(folder, "reward_learned")
    trained = [line["step"] for line in metrics(folder) if "reward_model/loss" in line]
    said = {line["reward/learned"] for line in metrics(folder) if line["step"] > 2}
    return learned(folder) and trained == [2, 4] and weights[1] == weights[2] != weights[3] and 0.0 not in said


def follows_a_schedule(folder):
    # The critic alone; warm; then (1 + cos(pi k / 3)) / 2 of the recipe's 1e-3, for k = 0, 1, 2.
    rates = [line["policy/lr"] for line in metrics(folder)]
    expected = pytest.approx([0.0, 1e-3, 1e-3, 0.75e-3, 0.25e-3], rel=1e-12)
    return learned(folder) and differ("critic/head.safetensors")(folder) and rates == expected


# -- the table ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Case:
    """words: of the undisturbed run. hits: one of each process, in the order in which the run comes to them.

    every, keep: of the disturbed run's checkpoints, where it has any. last: what the process that goes on to the end is
    told, and what befalls it. moves: whether the undisturbed run did what it is there for.
    """

    words: tuple[str, ...]
    hits: Sequence[Hit]
    every: int = 1
    keep: int = 2
    last: Hit = field(default_factory=to_the_end)
    moves: Callable[[Path], bool] = learned


def keeping(step, hit):
    """And `rlft sample` goes on after that step."""

    def ends(done: Ended, folder: Path) -> None:
        hit.ends(done, folder)
        assert json.loads((folder / "progress.json").read_text())["step"] == step, "whole steps are kept"

    return replace(hit, ends=ends)


def logged(hit, *names):
    """And these are the logs of the processes that worked for the run."""

    def ends(done: Ended, folder: Path) -> None:
        hit.ends(done, folder)
        assert sorted(log.name for log in (folder / "cluster").iterdir()) == [*names]

    return replace(hit, ends=ends)


def whatever(_):
    return True


# From its newest checkpoint, every 2 steps: what neither "in every stage of a step" nor the signals below have.
STAGES = [
    killed("rlft.runs.run_folder:write_config", 1),
    killed(EVALUATED, 1),  # in the evaluation before the first step
    killed(DIGESTS, 2),  # those of step 1; the line of step k is written when that of k + 1 is made, or a checkpoint
    killed(UPDATE, 2),  # update, gradients are there
    killed("rlft.model.roles:Roles.load_sampler", 3, "after"),  # publish: at the start, after steps 1 and 2
    killed(RECORD, 2),
    killed(DIGESTS, 3, "after"),  # those of step 2, for which its checkpoint waits
    killed(SEALED, 3, "after"),
    killed("rlft.runs.chain:append", 3, "after"),  # the line of step 2, before its checkpoint
    killed(EVALUATED, 2, "after"),  # in the evaluation after step 2
    killed(SAVED, 1, "after"),
    killed("rlft.runs.chain:sealed", 1),  # resumed, that of step 3, while that of step 4 is made
    killed(SAMPLING, 2),  # between steps 3 and 4
    killed(SAVED, 1, "after"),
    killed("rlft.loop.session:Session.evaluate_if_due", 1),  # after the last step
    killed(SAVED, 1),
]
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
TWO_RANKS, TWO_WORKERS, NOW = ("cluster.ranks=2",), ("scoring.workers=2",), "checkpoint.on_signal=now"
ALLOWED = "interrupted: finishing this step, if it takes at most {} s, then saving; once more stops at once"
SILENT = Hit(events=[], ends=finished([]))
TWO_STEPS = ("steps=2", "model.device=cpu", "lora.rank=2", "eval.every=0", "console=null")

FAST = {
    "in every stage of a step": Case(
        words=tiny(),
        hits=[
            killed("rlft.runs.run_folder:write_config", 1, "after"),
            killed(DECODE, 2, "after"),  # sample, after the evaluation's
            killed("rlft.reward.workers.scorer:Scorer.__call__", 3),  # score: the evaluation, step 1, step 2
            killed("rlft.algorithm.grpo:GRPO.credit", 1, "after"),
            killed(UPDATE, 1, "after"),
            killed(PUBLISHED, 2, "after"),
            killed(RECORD, 1, "after"),
            killed(EVALUATED, 1, "after"),  # after step 2
            killed(SAVED, 1),
            torn("optimizer.safetensors"),
            killed(SAVED, 1, "after"),
            killed("rlft.model.roles:Roles.restore", 1, "after"),  # while it resumes
            killed("rlft.runs.chain:sealed", 1),  # the line of step 3, in a thread
            stopped(3, HEARD, RECORD, 1),
            stopped_at_once(3, [HEARD], *pressed(SAMPLING, 1), *pressed(UPDATE, 1)),
        ],
        moves=everything_is_there,
    ),
    "a moving reference of all weights": Case(
        words=(*MOVING_REFERENCE, "steps=2"), hits=IN_THE_SECOND_CHECKPOINT, moves=differ(MODEL, REFERENCE, least=2)
    ),
    "sft of all weights": Case(
        words=(*SFT_OF_ALL_WEIGHTS, "steps=2"), hits=IN_THE_SECOND_CHECKPOINT, moves=differ(MODEL, least=2)
    ),
    "sampling": Case(words=SAMPLE, hits=[OF_SAMPLING[1], keeping(2, OF_SAMPLING[3])], moves=many_samples),
    "ranks and workers": Case(  # three updates a step: in the second one
        words=RANKS,
        hits=[
            stopped(1, GIVEN_UP, UPDATE, 5).told(*TWO_RANKS, workers=1),
            killed(UPDATE, 2).told("cluster.ranks=1", *TWO_WORKERS, workers=2),
        ],
        last=logged(to_the_end("cluster.ranks=1"), "rank-1.log"),
    ),
    # While an engine of its own samples step 3; in the update next to it; then in the process that does both in turn.
    "sampling next to the update": Case(
        words=tiny("overlap.lag=1", "algorithm.mismatch=token_truncate", "steps=4", "eval.every=0"),
        hits=[
            killed("rlft.loop.sampling:NextSamples.wait", 2).told("cluster.engines=1"),
            killed(UPDATE, 2),
            killed(UPDATE, 1).told("cluster.engines=0"),
        ],
        last=logged(to_the_end("cluster.engines=1"), "engine-0.log"),
    ),
}
CASES = {
    "in every stage and in the thread of digests": Case(words=tiny(), hits=STAGES, every=2),
    "inside every kind of write": Case(words=tiny(), hits=WRITES, every=2, keep=1),
    # Two epochs of two minibatches, and two optimizers: eight updates a step, resumed from steps 1 and 3.
    "ppo with critic, adaptive KL, ema and value normalisation": Case(
        words=tiny(
            "algorithm=ppo", "critic.kind=adapter", "critic.lr=1e-3", "critic.normalize_values=true",
            "snapshot.reference=ema", "snapshot.ema_decay=0.9", "algorithm.kl_coef=0.05",
            "algorithm.kl_controller=adaptive", "algorithm.kl_target=0.01", "prompts_per_step=2", "epochs=2",
            "minibatches=2",
        ),
        hits=[killed(UPDATE, 8 + 5, "after"), killed(UPDATE, 2 * 8 + 6, "after")],
        moves=ppo_moves,
    ),
    "dynamic sampling": Case(
        words=tiny("dynamic_sampling.max_rounds=2"),
        hits=[
            killed("rlft.loop.sampling:uninformative", 4, "after"), killed("rlft.loop.sampling:replaced", 2, "after"),
        ],
        moves=is_resampled,
    ),
    "a curriculum that counts the run's own groups": Case(
        words=tiny("curriculum.running=true", "curriculum.replay=0.5", "curriculum.below=1", "data.size=8"),
        hits=[killed(UPDATE, 2, "after"), killed(SAVED, 2, "after")],
        moves=lambda folder: learned(folder) and metrics(folder)[-1]["curriculum/known_fraction"] > 3 / 8,
    ),
    "old and reference copies": Case(
        words=tiny(
            "snapshot.old=copy", "snapshot.reference=copy", "snapshot.refresh_every=2", "algorithm.kl_coef=0.1",
            "epochs=2",
        ),
        hits=[killed("rlft.model.roles:Roles.refresh", call, "after") for call in (2, 3)],
        moves=snapshots_move,
    ),
    "a learned reward trained in the loop": Case(
        words=tiny(
            "reward=[exact_match,format,learned]", "reward_model.refresh_every=2", "reward_model.labels=exact_match",
            "reward_model.replay=0.5", "generation.max_tokens=32",
        ),
        # In the training after step 2; with pairs of step 3 waiting and earlier ones kept; in that after step 4.
        hits=[killed(place, call, "after") for place, call in ((REWARD_TRAINED, 2), (SAVED, 2), (REWARD_TRAINED, 1))],
        moves=reward_learns,
    ),
    "pretraining text, a shared critic that learns first, a schedule, and a reset of the moments": Case(
        words=tiny(
            "algorithm=ppo_ptx", "pretrain.path=embedded:arithmetic-text", "pretrain.sequences_per_update=4",
            "pretrain.held_out=4", "critic.kind=shared", "critic.lr=1e-3", "critic.warmup_steps=1",
            "snapshot.reference=base", "algorithm.kl_coef=0.05", "trainer.schedule=cosine", "trainer.warmup=2",
            "trainer.reset_every=3", "eval.kl_base=true",
        ),
        hits=[killed(SAVED, 2, "after"), killed(UPDATE, 2 * 2 + 1, "after")],
        moves=follows_a_schedule,
    ),
    "conversations of engines in other processes": Case(
        words=CONVERSATIONS,
        hits=[killed(UPDATE, 2, "after").told("cluster.engines=2"), killed(PUBLISHED, 2).told(*TWO_WORKERS)],
        last=logged(to_the_end("cluster.engines=0"), "engine-0.log", "engine-1.log"),
        moves=lambda folder: learned(folder) and any(line["turns/mean"] > 1 for line in metrics(folder)),
    ),
    # Three updates a step: in the second step.
    "two ranks, then four": Case(
        words=RANKS, hits=[killed(UPDATE, 5).told(*TWO_RANKS)], last=to_the_end("cluster.ranks=4")
    ),
    "two ranks, then four, of all weights": Case(
        words=(*(key for key in RANKS if not key.startswith("lora.")), "lora=null", "trainer.lr=1e-4"),
        hits=[killed(UPDATE, 5).told(*TWO_RANKS)],
        last=to_the_end("cluster.ranks=4"),
        moves=whatever,
    ),
    # Then one, which has all layers in main memory.
    "two ranks that divide the base": Case(
        words=RANKS,
        hits=[killed(UPDATE, 5).told(*TWO_RANKS, "cluster.engines=1", "cluster.shard_base=true")],
        last=to_the_end("cluster.ranks=1"),
    ),
    "images": Case(
        words=(*IMAGES, "steps=4"),
        hits=[
            killed("rlft.model.images:ImageEncoder._encode", 3, "after"),  # while the first images are read
            killed(UPDATE, 3, "after"),  # in step 2
            killed("rlft.model.images:ImageEncoder.rows_of", 2),  # resumed, which reads the images again
            killed(SAVED, 1),
        ],
    ),
    "a moving reference of all weights, several updates": Case(
        words=(*MOVING_REFERENCE, "steps=5"), hits=OF_ALL_WEIGHTS, every=2, moves=differ(MODEL, REFERENCE)
    ),
    "all weights and a fixed reference": Case(
        words=(*GRPO_OF_ALL_WEIGHTS, "steps=5", "snapshot.reference=base", "algorithm.kl_coef=0.1"),
        hits=OF_ALL_WEIGHTS,
        every=2,
        moves=differ(MODEL),
    ),
    "all weights and a critic": Case(
        words=(
            *("train", "+recipe=ppo_arithmetic", *ALL_WEIGHTS, "eval.every=2", "steps=5", "critic.kind=shared"),
            "critic.normalize_values=true",
        ),
        hits=OF_ALL_WEIGHTS,
        every=2,
        moves=differ(MODEL),
    ),
    "all weights and engines in other processes": Case(
        words=(*GRPO_OF_ALL_WEIGHTS, "generation.transformers.batch_size=4", "steps=3"),
        hits=[
            killed(UPDATE, 2, "after").told("cluster.engines=2"), killed(PUBLISHED, 2).told("cluster.engines=1")
        ],
        last=to_the_end("cluster.engines=0"),
        moves=differ(MODEL),
    ),
    "sft of an adapter with dropout": Case(
        words=(*SFT, "lora.rank=2", "lora.dropout=0.1", "steps=5"), hits=OF_SUPERVISED, every=2, moves=differ(POLICY)
    ),
    "sft of all weights, and a schedule": Case(
        words=(*SFT_OF_ALL_WEIGHTS, "steps=5"), hits=OF_SUPERVISED, every=2, moves=differ(MODEL)
    ),
    "a reward model, with replay and dropout": Case(
        words=(*RM, "steps=5"),
        hits=OF_SUPERVISED,
        every=2,
        moves=differ("reward/adapter_model.safetensors", "reward/head.safetensors"),
    ),
    "preference optimisation, over the pairs again, with dropout": Case(
        words=(*DPO, "steps=5"), hits=OF_SUPERVISED, every=2, moves=differ(POLICY)
    ),
    "sampling, everywhere": Case(words=SAMPLE, hits=[*OF_SAMPLING[:-1], keeping(3, OF_SAMPLING[-1])], moves=whatever),
    # In the order in which a run comes to them, each time from the step that the one before has saved: no other is.
    "Ctrl-C: the step is finished": Case(
        words=tiny(),
        hits=[
            stopped_at_once(0, [], *pressed("rlft.runs.run_folder:go_on", 1)),  # there is no session yet
            stopped(0, HEARD_BEFORE, "rlft.loop.parts:load_for_training", 1),  # in a slow start: no step is begun
            stopped(1, HEARD, EVALUATED, 1),  # before the first step: that one is still made
            stopped(4, HEARD, RECORD, 3),
        ],
        every=0,
        last=Hit(events=pressed(SCORING, 1), ends=finished([HEARD])),  # the last step is finished, and with it the run
    ),
    "SIGTERM: the step is given up": Case(
        words=tiny(),
        hits=[
            stopped(0, GIVEN_UP, SAMPLING, 1, "terminate").told(NOW),
            stopped(1, GIVEN_UP, SCORING, 2, "terminate"),
            stopped(2, GIVEN_UP, UPDATE, 2, "terminate", "after"),  # with moved weights
            stopped(3, GIVEN_UP, RECORD, 2, "terminate", "after"),
            stopped(3, GIVEN_UP, EVALUATED, 1, "terminate"),
        ],
        every=0,
        last=Hit(events=pressed(SAVED, 1, "terminate"), ends=finished([HEARD_AT_THE_END])),  # while the last is saved
    ),
    "SIGTERM: the step gets the seconds it is allowed and no more": Case(
        words=tiny(),
        hits=[
            stopped(2, ALLOWED.format("60"), SCORING, 2, "terminate", seconds=0.2).told("checkpoint.on_signal=60"),
            stopped(3, ALLOWED.format("0.3"), SCORING, 2, "terminate", seconds=60).told("checkpoint.on_signal=0.3"),
        ],
        every=0,
        last=SILENT,
    ),
    "SIGTERM: a supervised step is given up": Case(
        words=(*RM, "steps=6"),
        hits=[
            stopped(1, GIVEN_UP, UPDATE, 2, "terminate").told(NOW),
            stopped(3, GIVEN_UP, "rlft.loop.supervised:SupervisedRun.evaluate_if_due", 3, "terminate"),
        ],
        every=0,
        last=SILENT,
        moves=whatever,
    ),
    "its processes end with it, however it ends": Case(
        words=tiny("steps=3", "minibatches=3", "eval.every=0"),
        hits=[
            killed("rlft.loop.session:Session.begin", 1, "after"),
            stopped_at_once(0, [HEARD], *pressed(UPDATE, 1), *pressed(UPDATE, 2)).told(*TWO_WORKERS, workers=2),
            failing(UPDATE).told(*TWO_WORKERS, workers=2),
            failing("rlft.reward.workers.pool:WorkerPool.run", 2).told(*TWO_WORKERS, workers=2),
            stopped(2, HEARD, UPDATE, 1, "terminate").told(*TWO_WORKERS, workers=2),
        ],
        last=to_the_end().told(*TWO_WORKERS, workers=2),
    ),
    # With what is named when the disk is full, or fails.
    "a disk in train": Case(
        words=tiny(),
        hits=[
            full("status.json", ".status.json.writing"),
            full("config.yaml", ".config.yaml.writing", error="EDQUOT"),
            full("eval.jsonl", "eval.jsonl", error="EIO"),
            full("step_000001.jsonl", "step_000001.jsonl.tmp"),
            full("metrics.jsonl", "metrics.jsonl", 2, "EROFS"),
            full("step_000002", "adapter_model.safetensors", error="EDQUOT"),
            full("eval.jsonl", "eval.jsonl", 2, "ESTALE"),  # after step 2
            full("step_000004", "optimizer.safetensors", 2),
            full("metrics.jsonl", "metrics.jsonl", 2, "EACCES"),  # after step 4, the checkpoint of step 2 is there
            full("step_000004", "state.json", 1, "EIO"),
            of_the_disk("step_000004", "EFBIG", {"file_size": 100_000}),
        ],
        every=2,
    ),
    **{
        f"a disk in {name}": Case(
            words=(name, f"+recipe={name}_arithmetic", *TWO_STEPS),
            hits=[full("step_000002", "optimizer.safetensors", 2)],
            moves=whatever,
        )
        for name in ("sft", "rm")
    },
    "a disk in sample": Case(
        words=SAMPLE,
        hits=[full("samples.jsonl", "samples.jsonl", 2), keeping(1, full("progress.json", ".progress.json.writing"))],
        moves=whatever,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*FAST.values(), *map(slow, CASES.values())], ids=[*FAST, *CASES])
def test_disturbed_and_resumed_it_is_the_same_run(case, forks, undisturbed_of, tmp_path):
    undisturbed = undisturbed_of(*case.words)
    assert case.moves(undisturbed)
    saves = () if case.words[0] == "sample" else (f"checkpoint.every={case.every}", f"checkpoint.keep={case.keep}")
    check_disturbed(forks, tmp_path, undisturbed, (*case.words, *saves), case.hits, case.last)


# -- stage x signal x kind of run --------------------------------------------------------------------------------------
# It runs a program, which a signal to everybody ends; without that program its score is another one.
REWARD = """
import subprocess

def score(group):
    code = subprocess.run(["sleep", "0.1"]).returncode
    return [len(rollout.completion.text) / 100 if code == 0 else -1.0 for rollout in group.rollouts]
"""
SCORED_SLOWLY = (
    "+reward.slow._target_=slow_reward.score", "+reward.slow.weight=0.1", "scoring.workers=1", "scoring.timeout=1.0",
    "scoring.on_error=0",  # a worker that dies would be trained on
    "model.device=cpu", "generation=transformers", "generation.max_tokens=8", "data.held_out_size=4",
)  # fmt: skip
TRAINS = ("lora.rank=2", "lora.dropout=0.1", "console=null", "eval.every=1")
EVALUATES = (*TRAINS, *SCORED_SLOWLY, "data.size=32", "eval.num_prompts=2", "eval.num_samples=1")


def at(place, call=1, **more):
    return {"at": place, "call": call, **more}


UPDATED = at(UPDATE, when="after")
WORKER_SCORES = at("rlft.reward.workers.pool:packed_task", when="after", later=0.04)  # a moment after it has its task
LOGGED = at("rlft.logger.loggers:Jsonl.step")
CHECKPOINT = at("rlft.runs.checkpoint:_write_manifest")
COMMANDS = {
    "train": Command(
        words=("train", "+recipe=grpo_arithmetic", *EVALUATES, "prompts_per_step=2", "group_size=2"),
        stages=[
            at(SAMPLING), WORKER_SCORES, at("rlft.trainer.local:LocalTrainer.annotate"), UPDATED,
            at(PUBLISHED, 2),  # the first one is of the policy that it goes on with
            LOGGED, at(EVALUATED), CHECKPOINT,
        ],
        next_step=at(SAMPLING, 2),
    ),
    "sft": Command(
        words=("sft", "+recipe=sft_arithmetic", *EVALUATES, "examples_per_step=4"),
        stages=[UPDATED, LOGGED, at("rlft.loop.supervised:evaluate"), WORKER_SCORES, at(EVALUATED), CHECKPOINT],
        next_step=at("rlft.loop.supervised:SupervisedRun.update", 2),
    ),
    "rm": Command(
        words=(
            "rm", "+recipe=rm_arithmetic", "model.device=cpu", *TRAINS, "rankings_per_step=4", "eval.num_rankings=8",
        ),
        stages=[UPDATED, LOGGED, at("rlft.logger.loggers:Jsonl.evaluation"), CHECKPOINT],
        next_step=at("rlft.loop.supervised:SupervisedRun.update", 2),
    ),
    "sample": Command(
        words=("sample", *SCORED_SLOWLY, "data.size=64", "n=2", "prompts_per_step=2"),
        stages=[at("rlft.commands.sample:sample"), WORKER_SCORES, at("rlft.commands.sample:write_atomically")],
        next_step=at("rlft.commands.sample:sample", 2),
        steps="num_prompts",
    ),
}  # fmt: skip


def test_the_table_has_every_stage_signal_and_scope():
    # 8 signals, to the main process or all, in 8, 6, 4 and 3 stages; and the first process, which begins the run.
    sizes = {"train": 128, "sft": 96, "rm": 64, "sample": 48}
    assert {name: len(command.hits()[1]) - 1 for name, command in COMMANDS.items()} == sizes


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_signal_in_every_stage_changes_nothing(name, forks, tmp_path):
    """To the main process alone, or to every process of the job."""
    command = COMMANDS[name]
    (tmp_path / "slow_reward.py").write_text(REWARD)
    steps, hits = command.hits()
    words = (*command.words, f"{command.steps}={steps if command.trains else 2 * steps}")
    saves, keeps = (("checkpoint.every=1",), ("checkpoint.keep=999",)) if command.trains else ((), ())
    forks.run(*words, *saves, *keeps, "hydra.run.dir=undisturbed", cwd=tmp_path, ends=0)
    check_disturbed(forks, tmp_path, tmp_path / "undisturbed", (*words, *saves), hits)


@pytest.mark.slow
@pytest.mark.parametrize("code", [KILLED, 130], ids=["killed", "Ctrl-C, again and again"])
def test_from_outside_at_random_moments_it_is_the_same_run(code, tmp_path):
    """With as many threads as torch takes, and in fresh interpreters, each with hashes of its own."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    every = ("checkpoint.every=1", "checkpoint.keep=99", "hydra.run.dir=undisturbed")
    done = start_fresh(*tiny(), *every, cwd=tmp_path).wait()
    assert done.code == 0, done.err
    seconds = [json.loads(line)["time/step"] for line in whole_lines(undisturbed / "metrics.jsonl")]
    pause = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "stop", "when": "after"}  # until it is set up
    words = [*tiny(), "hydra.run.dir=run", "checkpoint.every=1"]
    for _ in range(2):
        started = start_fresh(*words, cwd=tmp_path, events=[pause])
        started.wait_until_stopped()
        started.go_on()
        if code == KILLED:
            time.sleep(random.uniform(0, sum(seconds[len(whole_lines(run / "metrics.jsonl")) :]) / 2))
            started.kill()
        else:
            started.press_until_heard(HEARD)
        assert started.wait().code == code, started.wait().err
        if code == 130:  # heard in the first step, or (a press may be lost) a later one: whichever, it is saved
            after_step(len(metrics(run)), HEARD)(started.wait(), run)
        check_so_far(run, undisturbed)
        words = ["resume", "run"]
    done = start_fresh("resume", "run", cwd=tmp_path).wait()
    assert done.code == 0, done.err
    check_same(run, undisturbed)
