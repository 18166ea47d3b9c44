"""Sampling with a lag of one step: which version samples what, and how that comes back from a checkpoint."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
from run_folders import check_same, metrics
from slow_cases import slow_but

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.loop.freshness import StaleAdapterError
from rlft.loop.next_samples import NextSamples, check_versions, derived_from, packed, unpacked
from rlft.loop.sampling import StepSampler
from rlft.plan.rules import check_lag_has_devices
from rlft.types import (
    Branch,
    Completion,
    FinishReason,
    Group,
    Prompt,
    Rollout,
    Sampling,
    ToolCall,
    Turn,
    UserError,
)

WORDS = (
    "train", "steps=5", "prompts_per_step=3", "group_size=4", "generation=transformers", "generation.max_tokens=40",
    "lora.rank=2", "lora.alpha=4", "trainer.lr=3e-3", "model.device=cpu", "data.size=32", "eval.every=0",
    "scoring.workers=0", "console=null", "name=x", "checkpoint.every=2", "checkpoint.keep=9",
    "algorithm.mismatch=token_truncate", "algorithm.off_policy_limit=0.1", "overlap.lag=1",
)  # fmt: skip


class Engine:
    """Answers with its version; waits at the start of each call until it may go on."""

    def __init__(self) -> None:
        self.version, self.may_go_on = 0, threading.Event()
        self.may_go_on.set()
        self.threads: list[str] = []

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        self.threads.append(threading.current_thread().name)
        assert self.may_go_on.wait(120)
        return [group_of(prompt, self.version, n, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def sleep(self) -> None: ...


def group_of(prompt: Prompt, version: int, n: int, seed: int) -> Group:
    completions = [
        Completion(
            text=f"{version} 😀" if i else "",
            token_ids=tuple(range(i)),
            logprobs=tuple(-0.1 / (seed % 7 + k + 1) for k in range(i)),
            finish_reason=FinishReason.stop if i else FinishReason.length,
        )
        for i in range(n)
    ]
    rollouts = [Rollout(prompt=prompt, completion=completion, policy_version=version) for completion in completions]
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def sampler_with(engine: Any, *words: str) -> StepSampler:
    given = {word.partition("=")[0] for word in words}
    prompts = [Prompt(id=str(i), messages=(), answer="", token_ids=(i, i + 1)) for i in range(8)]
    return StepSampler(
        engine, prompts, build(compose([*(w for w in WORDS[1:] if w.partition("=")[0] not in given), *words]))
    )


def next_samples(engine: Any, lag: int, *, concurrently: bool) -> NextSamples:
    return NextSamples(sampler_with(engine), cast(Any, None), lag, 9, concurrently=concurrently)


def unpublished(version: int) -> None:
    raise AssertionError(version)


def versions(groups: Sequence[Group]) -> set[int | None]:
    return {rollout.policy_version for group in groups for rollout in group.rollouts}


@pytest.mark.parametrize("concurrently", [True, False])
def test_a_step_has_the_groups_of_the_version_before_it(concurrently: bool) -> None:
    engine = Engine()
    ahead = next_samples(engine, 1, concurrently=concurrently)
    seen = []
    for step in range(4):
        seen.append(versions(ahead.sample(step, unpublished)))
        ahead.sample_ahead(step + 1)
        ahead.wait()
        engine.version = step + 1
    assert seen == [{0}, {0}, {1}, {2}]
    assert [name.startswith("sampling ahead") for name in engine.threads] == [False, *[concurrently] * 4]


def test_without_a_lag_nothing_is_sampled_ahead() -> None:
    engine = Engine()
    ahead = next_samples(engine, 0, concurrently=True)
    ahead.sample_ahead(1)
    ahead.wait()
    assert engine.threads == []
    engine.version = 3
    assert versions(ahead.sample(1, unpublished)) == {3}


def test_the_loop_goes_on_while_the_next_step_is_sampled() -> None:
    engine = Engine()
    ahead = next_samples(engine, 1, concurrently=True)
    engine.may_go_on.clear()
    ahead.sample_ahead(1)
    assert ahead.is_running
    engine.may_go_on.set()
    ahead.wait()
    assert not ahead.is_running
    assert len(engine.threads) == 1


def test_what_fails_beside_the_update_is_raised_when_it_is_waited_for() -> None:
    engine = Engine()
    ahead = next_samples(engine, 1, concurrently=True)
    engine.sample = lambda *_: (_ for _ in ()).throw(RuntimeError("no engine is left"))  # type: ignore[method-assign]
    ahead.sample_ahead(1)
    with pytest.raises(RuntimeError, match="no engine is left"):
        ahead.wait()
    ahead.close()


def test_groups_of_another_version_stop_the_run() -> None:
    engine = Engine()
    ahead = next_samples(engine, 1, concurrently=False)
    engine.version = 1
    ahead.sample_ahead(5)
    with pytest.raises(StaleAdapterError, match=r"prompt \d was sampled by policy version 1, and not by 4 or 5"):
        ahead.sample(5, unpublished)
    unnamed = [
        replace(g, rollouts=tuple(replace(r, policy_version=None) for r in g.rollouts)) for g in ahead.sampler.sample(0)
    ]
    check_versions(unnamed, {4})


def test_groups_come_back_from_a_checkpoint_as_they_were(tmp_path: Path) -> None:
    sampler = sampler_with(Engine(), "group_size=3")
    groups = sampler.sample(2)
    tensors, values = packed(groups, sampler.prompts_at(2))
    assert unpacked(tensors, json.loads(json.dumps(values)), sampler, 2) == groups


def test_a_checkpoint_keeps_the_experts_that_the_engine_has_chosen() -> None:
    sampler = sampler_with(Engine(), "group_size=3")
    groups = sampler.sample(2)
    numbers = itertools.count()
    for p, group in enumerate(groups):
        sizes = [len(r.prompt.token_ids) + len(r.completion.token_ids) for r in group.rollouts]
        noted = [numpy.full((size, 2, 1), next(numbers), numpy.uint8) for size in sizes]
        completions = [replace(r.completion, experts=each) for r, each in zip(group.rollouts, noted, strict=True)]
        rollouts = [replace(r, completion=c) for r, c in zip(group.rollouts, completions, strict=True)]
        groups[p] = replace(group, rollouts=tuple(rollouts))
    tensors, values = packed(groups, sampler.prompts_at(2))
    again = unpacked(tensors, json.loads(json.dumps(values)), sampler, 2)
    noting = sampler_with(Engine(), "group_size=3", "snapshot.routing=engine")
    assert derived_from(noting, 2) != derived_from(sampler, 2)  # a fork that turns the replay on samples again
    assert (noting.sampling.notes_experts, sampler.sampling.notes_experts) == (True, False)
    for group, found in zip(groups, again, strict=True):
        for rollout, other in zip(group.rollouts, found.rollouts, strict=True):
            assert numpy.array_equal(rollout.completion.experts, other.completion.experts)


def test_a_checkpoint_keeps_masks_turns_and_branches() -> None:
    sampler = sampler_with(Engine(), "group_size=3")
    groups = sampler.sample(2)
    call = ToolCall(name="add", arguments='{"a": 1}', answer="2\n", failed=False)
    turns = (Turn(end=1, text="1+1", answer="2", reward=0.1, calls=(call,)), Turn(end=2))
    first, second, third = groups[1].rollouts
    branches = (Branch(start=1, after=-2),)
    spoken = replace(third.completion, mask=(True, True), turns=turns, branches=branches)
    nothing = replace(first.completion, mask=())
    groups[1] = replace(
        groups[1], rollouts=(replace(first, completion=nothing), second, replace(third, completion=spoken))
    )
    tensors, values = packed(groups, sampler.prompts_at(2))
    assert unpacked(tensors, json.loads(json.dumps(values)), sampler, 2) == groups
    assert packed(sampler.sample(2), sampler.prompts_at(2))[0].keys() == {"token_ids", "logprobs", "lengths"}, (
        "as in earlier checkpoints"
    )


@pytest.mark.parametrize(
    "word", slow_but("seed=1", ["seed=1", "group_size=8", "generation.temperature=0.5", "prompts_per_step=2"])
)
def test_a_fork_with_other_samples_does_not_take_the_groups(word: str) -> None:
    assert derived_from(sampler_with(Engine()), 2) == derived_from(sampler_with(Engine(), "trainer.lr=1"), 2)
    assert derived_from(sampler_with(Engine()), 2) != derived_from(sampler_with(Engine(), word), 2)


# -- whole runs --------------------------------------------------------------------------------------------------------
def run(folder: Path, *words: str) -> Path:
    given = {word.partition("=")[0] for word in words}
    assert cli.run([*(w for w in WORDS if w.partition("=")[0] not in given), *words, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("straight") / "run")


def sampled_by(folder: Path, step: int) -> set[int]:
    lines = (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["policy_version"] for line in lines}


def test_every_step_trains_on_what_the_version_before_it_sampled(straight: Path) -> None:
    assert [sampled_by(straight, step) for step in range(1, 6)] == [{0}, {0}, {1}, {2}, {3}]
    lines = metrics(straight)
    distance = [line["sampler/kl"] for line in lines]
    assert distance[0] < 1e-6, "the first step's policy is the one that sampled"
    assert max(distance[1:]) > 1e-4, "a later step's has been updated since"
    assert all(0 < line["sampler/effective_sample_size"] <= 1 for line in lines)


def test_a_checkpoint_keeps_the_groups_and_the_last_one_their_sampler(straight: Path) -> None:
    files = {f.parent.name: f.name for f in (straight / "checkpoints").glob("*/samp*.safetensors")}
    assert files == {
        "step_000002": "sampled.safetensors",
        "step_000004": "sampled.safetensors",
        "step_000005": "sampler.safetensors",
    }


def test_a_run_goes_on_from_a_checkpoint_with_the_groups_sampled_ahead(straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    for later in ("step_000004", "step_000005"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / later)
    assert cli.run(["resume", str(tmp_path / "run")]) == 0
    check_same(tmp_path / "run", straight)


@pytest.mark.slow
def test_a_fork_goes_on_with_the_groups_unless_it_samples_others(straight: Path, tmp_path: Path) -> None:
    checkpoint = str(straight / "checkpoints" / "step_000002")
    assert cli.run(["resume", checkpoint, f"hydra.run.dir={tmp_path / 'same'}"]) == 0
    check_same(tmp_path / "same", straight)
    assert cli.run(["resume", checkpoint, "seed=7", f"hydra.run.dir={tmp_path / 'other'}"]) == 0
    assert [sampled_by(tmp_path / "other", step) for step in (3, 4, 5)] == [{2}, {2}, {3}]
    without = "overlap.lag=0"
    assert cli.run(["resume", checkpoint, without, f"hydra.run.dir={tmp_path / 'without'}"]) == 0
    assert [sampled_by(tmp_path / "without", step) for step in (3, 4, 5)] == [{2}, {3}, {4}]


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_by_the_newest_version_and_repeats(tmp_path: Path) -> None:
    words = ("dynamic_sampling.max_rounds=1", "eval.correct_at=0.5", "steps=4")
    run(tmp_path / "run", *words)
    replaced = [sampled_by(tmp_path / "run", step) for step in range(1, 5)]
    assert replaced[0] == {0}
    assert all(step - 2 in versions <= {step - 2, step - 1} for step, versions in enumerate(replaced[1:], 2))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000004")
    assert cli.run(["resume", str(tmp_path / "again")]) == 0
    check_same(tmp_path / "again", tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "device", "refused"),
    [
        ((), "cuda", True),
        (("cluster.engines=2", "cluster.placement=pairs"), "cuda", True),
        (("cluster.engines=2",), "cuda", False),
        ((), "cpu", False),
        (("overlap.lag=0",), "cuda", False),
    ],
)
def test_a_lag_on_a_gpu_that_engine_and_trainer_share_is_refused(
    words: tuple[str, ...], device: str, refused: bool
) -> None:
    config = sampler_with(Engine(), *words).config
    if not refused:
        check_lag_has_devices(config, device)
        return
    with pytest.raises(UserError, match=r"overlap\.lag: .* shares the trainer's GPU.*got 1; give engines GPUs"):
        check_lag_has_devices(config, device)


def test_a_checkpoint_keeps_prompts_behind_which_an_environment_has_put_something() -> None:
    sampler = sampler_with(Engine(), "group_size=3")
    groups, asked = sampler.sample(2), sampler.prompts_at(2)
    messages = ({"role": "user", "content": "A board."},)
    opened = replace(asked[1], token_ids=(*asked[1].token_ids, 7), messages=messages)
    groups[1] = Group(prompt=opened, rollouts=tuple(replace(r, prompt=opened) for r in groups[1].rollouts))
    tensors, values = packed(groups, asked)
    restored = unpacked(tensors, json.loads(json.dumps(values, sort_keys=True)), sampler, 2)  # as a checkpoint has it
    assert restored == groups
    assert list(restored[1].prompt.messages[0]) == ["role", "content"]
