"""Dynamic sampling: which groups are replaced, by what, at what cost."""

import itertools
import json
import shutil
import threading
from dataclasses import replace
from unittest.mock import Mock

import numpy
import pytest
import torch
from run_folders import check_same, metrics

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.generation.scripted import ScriptedGenerator
from rlft.loop.freshness import StaleAdapterError
from rlft.loop.metrics import Clock
from rlft.loop.sampling import (
    NextSamples,
    StepSampler,
    check_versions,
    derived_from,
    packed,
    replace_uninformative_groups,
    replaced,
    unpacked,
)
from rlft.plan.rules import check_lag_has_devices
from rlft.types import (
    Branch,
    Completion,
    FinishReason,
    Group,
    Prompt,
    Rollout,
    Scores,
    StepScores,
    ToolCall,
    Turn,
    UserError,
)

SIZE = 4
RIGHT, WRONG, MIXED = ["right"], ["wrong"], ["right", "wrong"]


class Bench(StepSampler):
    """A scripted generator and a reward; and a list of what was sampled.

    Prompts that `answers` does not name are mixed. The first reward is 1 for the text "right", the second one the
    length in characters; where `steps`, a process reward gives each word a score of its own.
    """

    def __init__(self, config, prompts, answers, tokenizer, *, steps=False):
        super().__init__(ScriptedGenerator({"*": MIXED} | answers, tokenizer), prompts, config)
        self.steps = steps
        self.sampled = []

    def sample_prompts(self, prompts, step, purpose):
        self.sampled.append([prompt.id for prompt in prompts])
        return super().sample_prompts(prompts, step, purpose)

    def give(self, groups):
        texts = [[rollout.completion.text for rollout in group.rollouts] for group in groups]
        right = torch.tensor([[float(text == "right") for text in row] for row in texts])
        length = torch.tensor([[float(len(text)) for text in row] for row in texts])
        named = {"math": right, "length": length}
        if not self.steps:
            return Scores(total=right + length, by_reward=named)
        steps = [[StepScores(values=(value,), ends=(5,)) for value in row] for row in length.tolist()]
        # Each group can be told from every other one by its prompt's number.
        number = torch.tensor([[float(group.prompt.answer)] * SIZE for group in groups])
        return Scores(total=right + length + number, by_reward=named, outcome=right + number, steps=steps)

    def run(self, step=0):
        """The step's rollouts and the stages that the clock was told."""
        told = []
        self.sampled.clear()
        groups = self.sample(step)
        return replace_uninformative_groups(self, self.give, step, Clock(told.append), groups, self.give(groups)), told


@pytest.fixture
def prompts(make_prompt):
    return [make_prompt(f"{i}+0=?", str(i)) for i in range(12)]


@pytest.fixture
def bench(run_config, prompts, backbone):
    """Builds the bench; three prompts a step of four completions, and `rounds` of resampling."""

    def build(answers, *, rounds=1, num_prompts=12, correct_at=1.0, seed=0, steps=False):
        config = run_config("prompts_per_step=3", f"group_size={SIZE}", f"dynamic_sampling.max_rounds={rounds}")
        config = replace(config, eval=replace(config.eval, correct_at=correct_at), seed=seed)
        return Bench(config, prompts[:num_prompts], answers, backbone.tokenizer, steps=steps)

    return build


def texts(group):
    return [rollout.completion.text for rollout in group.rollouts]


def ids(rollouts):
    return [group.prompt.id for group in rollouts.groups]


def first_prompts(bench):
    """The three prompts that step 0 begins with, and all others."""
    chosen = [prompt.id for prompt in bench({}).prompts_at(0)]
    return chosen, [f"{i}+0=?" for i in range(12) if f"{i}+0=?" not in chosen]


@pytest.mark.parametrize("steps", [False, True])
def test_a_group_that_is_all_right_or_all_wrong_is_replaced_in_its_place_with_its_scores(steps, bench):
    (a, b, c), others = first_prompts(bench)
    subject = bench({a: RIGHT, c: WRONG}, steps=steps)
    rollouts, told = subject.run()
    (first, new) = subject.sampled
    assert first == [a, b, c]
    assert len(new) == 2
    assert set(new) <= set(others)
    assert ids(rollouts) == [new[0], b, new[1]]
    assert all(sorted(texts(group)) == ["right", "right", "wrong", "wrong"] for group in rollouts.groups)
    assert told == ["sample", "score"]
    # 3 groups, then 2, of 4 completions.
    assert rollouts.num_sampled == 12 + 8
    found, expected = rollouts.scores, subject.give(rollouts.groups)
    assert torch.equal(found.total, expected.total)
    assert found.by_reward.keys() == expected.by_reward.keys()
    assert all(torch.equal(found.by_reward[name], values) for name, values in expected.by_reward.items())
    assert found.steps == expected.steps
    assert found.outcome is None if not steps else torch.equal(found.outcome, expected.outcome)


def test_nothing_is_sampled_again_when_every_group_informs_or_it_is_switched_off(bench):
    (a, b, c), _ = first_prompts(bench)
    for subject in (bench({}, rounds=5), bench({a: RIGHT, b: WRONG}, rounds=0)):
        rollouts, told = subject.run()
        assert (ids(rollouts), subject.sampled, told) == ([a, b, c], [[a, b, c]], [])
        assert rollouts.num_sampled == 12


def test_fresh_groups_that_teach_nothing_either_are_left_out_and_the_place_waits_for_the_next_round(bench):
    (a, b, c), others = first_prompts(bench)
    # Of the fresh prompts every second one, by number, is all wrong.
    lost = others[::2]
    answers = {a: RIGHT, b: WRONG, c: WRONG} | dict.fromkeys(lost, WRONG)
    subject = bench(answers, rounds=12)
    rollouts, told = subject.run()
    assert told == ["sample", "score"] * (len(subject.sampled) - 1)
    # Each round asks for as many as are still to be replaced, and they fill the places from the first one on.
    lacking, unused, filled = 3, 9, []
    for new in subject.sampled[1:]:
        assert len(new) == min(lacking, unused)
        informing = [name for name in new if name not in lost]
        lacking, unused, filled = lacking - len(informing), unused - len(new), filled + informing
    assert len(subject.sampled) > 2  # some were left out
    assert ids(rollouts) == filled
    assert rollouts.num_sampled == 4 * sum(map(len, subject.sampled))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_are_bounded_and_what_is_left_stays_as_it_is(rounds, bench):
    (a, b, c), _ = first_prompts(bench)
    subject = bench({"*": WRONG, b: MIXED}, rounds=rounds)
    rollouts, told = subject.run()
    assert ids(rollouts) == [a, b, c]
    assert list(map(len, subject.sampled)) == [3] + [2] * rounds
    assert told == ["sample", "score"] * rounds
    assert rollouts.num_sampled == 4 * (3 + 2 * rounds)
    assert rollouts.scores.by_reward["math"].sum(1).tolist() == [0, 2, 0]


def test_no_prompt_is_sampled_twice_in_a_step_and_a_step_ends_when_none_is_left(bench):
    # 12 prompts that all teach nothing: 3, then 3 a round, so after three rounds there is none.
    subject = bench({"*": WRONG}, rounds=10)
    rollouts, _ = subject.run()
    assert list(map(len, subject.sampled)) == [3, 3, 3, 3]
    assert len({name for names in subject.sampled for name in names}) == 12
    assert rollouts.num_sampled == 4 * 12
    # With 8 prompts the last round has two of them for three places.
    subject = bench({"*": RIGHT}, rounds=10, num_prompts=8)
    subject.run()
    assert list(map(len, subject.sampled)) == [3, 3, 2]


def test_a_step_that_is_repeated_samples_the_same_and_every_step_and_seed_its_own(bench):
    """Prompts, and the seeds of their completions, which differ also from round to round."""

    def trace(step, seed=0):
        subject = bench({"*": WRONG}, rounds=2, seed=seed)
        asked, draw = [], subject.generator.sample
        subject.generator.sample = lambda prompts, n, seeds, *how: asked.append(seeds) or draw(prompts, n, seeds, *how)
        subject.run(step)
        used = [seed + i for seeds in asked for seed in seeds for i in range(SIZE)]
        assert len(used) == len(set(used)) == 4 * (3 + 3 + 3)
        return subject.sampled[1:], used

    first = trace(5)
    assert trace(5) == first
    for other in (trace(6), trace(5, seed=1)):
        assert other[0] != first[0]
        assert other[1] != first[1]


def test_right_and_wrong_are_by_the_first_reward_and_its_threshold(bench):
    (a, b, c), _ = first_prompts(bench)
    # All of `a` is right although lengths differ by a letter, and `b` is mixed although lengths agree.
    subject = bench({a: RIGHT, b: ["right", "wrong"], c: ["right", "wrongly"]}, rounds=1)
    assert subject.run()[0].groups[0].prompt.id != a
    assert subject.sampled[0] == [a, b, c]
    assert len(subject.sampled[1]) == 1
    # Where 0 is right, everything is.
    subject = bench({}, rounds=1, correct_at=0.0)
    subject.run()
    assert list(map(len, subject.sampled)) == [3, 3]


@pytest.mark.parametrize("rewarded", ["old", "new", "both"])
def test_groups_without_rewards_of_turns_replace_such_with_them_and_the_other_way_round(rewarded):
    def scores_of(values, turns):
        whole = torch.tensor([[float(v)] for v in values])
        if not turns:
            return Scores(total=whole, by_reward={"math": whole})
        earned = whole / 8
        return Scores(total=whole + earned, by_reward={"math": whole, "turns": earned}, outcome=whole)

    mixed = replaced(scores_of([1, 2, 3], rewarded != "new"), [2, 0], scores_of([4, 5], rewarded != "old"), [1, 0])
    assert mixed.outcome.tolist() == mixed.by_reward["math"].tolist() == [[4], [2], [5]]
    old, new = (rewarded != "new") / 8, (rewarded != "old") / 8
    assert mixed.by_reward["turns"].tolist() == [[4 * new], [2 * old], [5 * new]]
    assert torch.equal(mixed.total, mixed.outcome + mixed.by_reward["turns"])


def test_answers_are_replaced_with_their_groups_and_the_weights_of_both_sides_stay_known():
    def scores_of(name, **weights):
        by_reward = dict.fromkeys(weights, torch.ones(2, 1))
        answers = {"math": [[f"{name}0"], [f"{name}1"]]}
        return Scores(total=torch.ones(2, 1), by_reward=by_reward, answers=answers, weights=weights)

    old, new = scores_of("old", math=2.0), scores_of("new", math=2.0, format=0.5)
    mixed = replaced(old, [0], new, [1])
    assert mixed.answers == {"math": [["new1"], ["old1"]]}
    assert mixed.weights == {"math": 2.0, "format": 0.5}
    assert replaced(old, [], new, []).answers == old.answers


# -- ahead of time -----------------------------------------------------------------------------------------------------
WORDS = (
    "train", "steps=5", "prompts_per_step=3", "group_size=4", "generation=transformers", "generation.max_tokens=40",
    "lora.rank=2", "lora.alpha=4", "trainer.lr=3e-3", "model.device=cpu", "data.size=32", "eval.every=0",
    "scoring.workers=0", "console=null", "name=x", "checkpoint.every=2", "checkpoint.keep=9",
    "algorithm.mismatch=token_truncate", "algorithm.off_policy_limit=0.1", "overlap.lag=1",
)  # fmt: skip


class Engine:
    """Answers with its version; waits at the start of each call until it may go on."""

    def __init__(self):
        self.version, self.may_go_on = 0, threading.Event()
        self.may_go_on.set()
        self.threads = []

    def sample(self, prompts, n, seeds, sampling):
        self.threads.append(threading.current_thread().name)
        assert self.may_go_on.wait(120)
        return [group_of(prompt, self.version, n, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def sleep(self): ...


def group_of(prompt, version, n, seed):
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


def sampler_with(engine, *words):
    given = {word.partition("=")[0] for word in words}
    prompts = [Prompt(id=str(i), messages=(), answer="", token_ids=(i, i + 1)) for i in range(8)]
    return StepSampler(
        engine, prompts, build(compose([*(w for w in WORDS[1:] if w.partition("=")[0] not in given), *words]))
    )


def next_samples(engine, lag, *, concurrently):
    return NextSamples(sampler_with(engine), None, lag, 9, concurrently=concurrently)


def unpublished(version):
    raise AssertionError(version)


def versions(groups):
    return {rollout.policy_version for group in groups for rollout in group.rollouts}


@pytest.mark.parametrize(("lag", "concurrently"), [(1, True), (1, False), (0, True)])
def test_a_step_has_the_groups_of_the_version_before_it(lag, concurrently):
    engine = Engine()
    ahead = next_samples(engine, lag, concurrently=concurrently)
    seen = []
    for step in range(4):
        seen.append(versions(ahead.sample(step, unpublished)))
        engine.may_go_on.clear() if concurrently else None
        ahead.sample_ahead(step + 1)
        assert ahead.is_running == (lag == 1 and concurrently), "the loop goes on meanwhile"
        engine.may_go_on.set()
        ahead.wait()
        assert not ahead.is_running
        engine.version = step + 1
    assert seen == ([{0}, {0}, {1}, {2}] if lag else [{0}, {1}, {2}, {3}])
    beside = [name.startswith("sampling ahead") for name in engine.threads]
    assert beside == ([False, *[concurrently] * 4] if lag else [False] * 4)


def test_what_fails_beside_the_update_is_raised_when_it_is_waited_for():
    engine = Engine()
    engine.sample = Mock(side_effect=RuntimeError("no engine is left"))
    ahead = next_samples(engine, 1, concurrently=True)
    ahead.sample_ahead(1)
    with pytest.raises(RuntimeError, match="no engine is left"):
        ahead.wait()
    ahead.close()


def test_groups_of_another_version_stop_the_run():
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


def spoken(groups, prompts):
    """One completion without tokens of its own, and one with a mask, a turn's call and a branch."""
    call = ToolCall(name="add", arguments='{"a": 1}', answer="2\n", failed=False)
    turns = (Turn(end=1, text="1+1", answer="2", reward=0.1, calls=(call,)), Turn(end=2))
    first, second, third = groups[1].rollouts
    branched = replace(third.completion, mask=(True, True), turns=turns, branches=(Branch(start=1, after=-2),))
    empty = replace(first.completion, mask=())
    rollouts = replace(first, completion=empty), second, replace(third, completion=branched)
    return [groups[0], replace(groups[1], rollouts=rollouts), *groups[2:]]


def opened(groups, prompts):
    """An environment has put something behind a prompt."""
    messages = ({"role": "user", "content": "A board."},)
    behind = replace(prompts[1], token_ids=(*prompts[1].token_ids, 7), messages=messages)
    changed = Group(prompt=behind, rollouts=tuple(replace(r, prompt=behind) for r in groups[1].rollouts))
    return [groups[0], changed, *groups[2:]]


@pytest.mark.parametrize("changed", [lambda groups, prompts: groups, spoken, opened], ids=["plain", "spoken", "opened"])
def test_groups_come_back_from_a_checkpoint_as_they_were(changed):
    sampler = sampler_with(Engine(), "group_size=3")
    prompts = sampler.prompts_at(2)
    groups = changed(sampler.sample(2), prompts)
    tensors, values = packed(groups, prompts)
    if changed not in (spoken, opened):
        assert tensors.keys() == {"token_ids", "logprobs", "lengths"}, "as in earlier checkpoints"
    restored = unpacked(tensors, json.loads(json.dumps(values, sort_keys=True)), sampler, 2)  # as a checkpoint has it
    assert restored == groups
    for group, before in zip(restored, groups, strict=True):
        for message, own in zip(group.prompt.messages, before.prompt.messages, strict=True):
            assert list(message) == list(own), "keys keep their order"


def test_a_checkpoint_keeps_the_experts_that_the_engine_has_chosen():
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


def test_a_fork_with_other_samples_does_not_take_the_groups():
    own = derived_from(sampler_with(Engine()), 2)
    assert derived_from(sampler_with(Engine(), "trainer.lr=1"), 2) == own
    for word in ("seed=1", "group_size=8", "generation.temperature=0.5", "prompts_per_step=2"):
        assert derived_from(sampler_with(Engine(), word), 2) != own, word


# -- whole runs --------------------------------------------------------------------------------------------------------
def run(folder, *words):
    given = {word.partition("=")[0] for word in words}
    assert cli.run([*(w for w in WORDS if w.partition("=")[0] not in given), *words, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight") / "run")


def sampled_by(folder, step):
    lines = (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["policy_version"] for line in lines}


def test_every_step_trains_on_what_the_version_before_it_sampled_also_resumed(straight, tmp_path):
    assert [sampled_by(straight, step) for step in range(1, 6)] == [{0}, {0}, {1}, {2}, {3}]
    lines = metrics(straight)
    distance = [line["sampler/kl"] for line in lines]
    assert distance[0] < 1e-6, "the first step's policy is the one that sampled"
    assert max(distance[1:]) > 1e-4, "a later step's has been updated since"
    assert all(0 < line["sampler/effective_sample_size"] <= 1 for line in lines)
    files = {f.parent.name: f.name for f in (straight / "checkpoints").glob("*/samp*.safetensors")}
    ahead, last = "sampled.safetensors", "sampler.safetensors"
    assert files == {"step_000002": ahead, "step_000004": ahead, "step_000005": last}
    shutil.copytree(straight, tmp_path / "run")
    for later in ("step_000004", "step_000005"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / later)
    assert cli.run(["resume", str(tmp_path / "run")]) == 0
    check_same(tmp_path / "run", straight)


@pytest.mark.slow
def test_a_fork_goes_on_with_the_groups_unless_it_samples_others(straight, tmp_path):
    checkpoint = str(straight / "checkpoints" / "step_000002")
    for name, words, expected in (
        ("same", [], [{1}, {2}, {3}]),
        ("other", ["seed=7"], [{2}, {2}, {3}]),
        ("without", ["overlap.lag=0"], [{2}, {3}, {4}]),
    ):
        assert cli.run(["resume", checkpoint, *words, f"hydra.run.dir={tmp_path / name}"]) == 0
        assert [sampled_by(tmp_path / name, step) for step in (3, 4, 5)] == expected
    check_same(tmp_path / "same", straight)


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_by_the_newest_version_and_repeats(tmp_path):
    words = ("dynamic_sampling.max_rounds=1", "eval.correct_at=0.5", "steps=4")
    run(tmp_path / "run", *words)
    replaced = [sampled_by(tmp_path / "run", step) for step in range(1, 5)]
    assert replaced[0] == {0}
    assert all(step - 2 in versions <= {step - 2, step - 1} for step, versions in enumerate(replaced[1:], 2))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000004")
    assert cli.run(["resume", str(tmp_path / "again")]) == 0
    check_same(tmp_path / "again", tmp_path / "run")


def test_a_lag_on_a_gpu_that_engine_and_trainer_share_is_refused():
    two = "cluster.engines=2"
    for words, device in (((two,), "cuda"), ((), "cpu"), (("overlap.lag=0",), "cuda")):
        check_lag_has_devices(sampler_with(Engine(), *words).config, device)
    for words in ((), (two, "cluster.placement=pairs")):
        config = sampler_with(Engine(), *words).config
        with pytest.raises(UserError, match=r"overlap\.lag: .* shares the trainer's GPU.*got 1; give engines GPUs"):
            check_lag_has_devices(config, "cuda")
