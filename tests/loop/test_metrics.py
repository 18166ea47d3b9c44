import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each

from rlft import cli
from rlft.algorithm.ops.advantage import gae, reward_to_go
from rlft.batch import collate
from rlft.generation.scripted import ScriptedGenerator
from rlft.loop.metrics import (
    Clock,
    chosen_rows,
    evaluate,
    explained_variance,
    inspecting,
    kl_to_base,
    mean_and_error,
    pieces,
    rollout_metrics,
    summarise,
    unknown_token_metrics,
)
from rlft.model.roles import POLICY
from rlft.system import memory
from rlft.system.device import peak_memory_bytes
from rlft.system.seeds import sampling_seeds
from rlft.types import (
    Branch,
    Completion,
    FinishReason,
    Group,
    Prompt,
    Rollout,
    Rollouts,
    Sampling,
    Scores,
    ToolCall,
    Turn,
)


@pytest.fixture
def step():
    """Two prompts of 2 and 3 tokens with two completions each, of 1, 3, 2 and 2 tokens."""
    groups = []
    for prompt_ids, completions in (((5, 6), [(1, "stop"), (3, "length")]), ((4, 4, 4), [(2, "stop"), (2, "stop")])):
        prompt = Prompt(id="p", messages=(), answer="", token_ids=prompt_ids)
        said = [
            Completion(text="", token_ids=(7,) * size, logprobs=(-0.25,) * size, finish_reason=FinishReason(reason))
            for size, reason in completions
        ]
        rollouts = tuple(Rollout(prompt=prompt, completion=each, policy_version=0) for each in said)
        groups.append(Group(prompt=prompt, rollouts=rollouts))
    by_reward = {"math": torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "format": torch.tensor([[0, 0], [1, 1]])}
    scores = Scores(total=by_reward["math"] + 2 * by_reward["format"], by_reward=by_reward)
    return Rollouts(groups=groups, scores=scores, num_sampled=10)


def batch_of(rollouts):
    return collate(rollouts.groups, rollouts.scores, None)  # no reward scores steps, so nothing is decoded


def without_signal(rows_B, earned_BT=None):
    """An algorithm to which these rows teach nothing, and whose critic is judged by what was earned."""
    return SimpleNamespace(rows_without_signal=lambda batch: rows_B, earned=lambda batch: earned_BT)


def test_sampled_ids_without_a_token_are_counted_where_there_can_be_some(step):
    assert unknown_token_metrics(step.groups, frozenset()) == {}
    assert unknown_token_metrics(step.groups, frozenset({7, 8})) == {"sampled/unknown_tokens": 8.0}
    assert unknown_token_metrics(step.groups, frozenset({9})) == {"sampled/unknown_tokens": 0.0}


def test_a_steps_rewards_lengths_and_tokens_are_the_numbers_one_gets_by_hand(step):
    # Totals 1, 0, 3, 3: mean 7/4, mean square 19/4, variance 19/4 - 49/16 = 27/16. 8 completion tokens, log-prob -1/4.
    # 10 completions were sampled and 4 are trained on.
    zero_rows = torch.tensor([False, False, True, True])
    assert rollout_metrics(step, batch_of(step), without_signal(zero_rows)) == pytest.approx(
        {
            "reward/mean": 7 / 4, "reward/std": math.sqrt(27) / 4, "reward/math": 3 / 4, "reward/format": 1 / 2,
            "length/mean": 2.0, "length/truncated_fraction": 1 / 4, "tokens/prompt": 5, "tokens/completion": 8,
            "sampled/completions": 10, "waste/resampled_fraction": 6 / 10, "waste/zero_advantage_fraction": 1 / 2,
            "policy/entropy": 0.25,
        }
    )  # fmt: skip


def test_what_a_policy_only_read_has_metrics_of_its_own_and_is_no_length(step):
    calls = (
        ToolCall(name="add", arguments="{}", answer="3"),
        ToolCall(name="?", arguments="", answer="?", failed=True, cause="malformed"),
    )
    spoken = Completion(
        text="", token_ids=(7,) * 6, logprobs=(-0.5, -0.5, 0.0, 0.0, 0.0, -1.0), finish_reason=FinishReason.turns,
        mask=(True, True, False, False, False, True), turns=(Turn(end=2, calls=calls), Turn(end=6)),
        branches=(Branch(start=2, after=0),),
    )  # fmt: skip
    groups = step.groups
    first = replace(groups[0], rollouts=(replace(groups[0].rollouts[0], completion=spoken), groups[0].rollouts[1]))
    step = replace(step, groups=[first, groups[1]])
    found = rollout_metrics(step, batch_of(step), without_signal(torch.zeros(4, dtype=torch.bool)))
    shown = ("length/mean", "tokens/completion", "policy/entropy", "tokens/environment", "turns/", "calls/", "finish/")
    # Sampled: 3 + 3 + 2 + 2 tokens, of which 7 at -1/4 and 3 at -2 in all; turns 2 + 1 + 1 + 1.
    assert {name: value for name, value in found.items() if name.startswith(shown)} == {
        "length/mean": 10 / 4, "tokens/completion": 10, "policy/entropy": pytest.approx((7 / 4 + 2) / 10),
        "tokens/environment": 3, "turns/branches": 1 / 4, "turns/mean": 5 / 4, "turns/calls": 2 / 4,
        "turns/failed_calls_fraction": 1 / 2, "calls/malformed_fraction": 1 / 2, "calls/raised_fraction": 0,
        "calls/time_fraction": 0, "calls/died_fraction": 0, "finish/calls": 0, "finish/time": 0, "finish/turns": 1 / 4,
        "finish/stop": found["finish/stop"], "finish/length": 3 / 4 - found["finish/stop"],
    }  # fmt: skip


# -- the critic --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        # Returns 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14. Errors 1, 0, 2: mean 1, deviations 0 + 1 + 1 = 2.
        ([0.0, 50.0, 2.0, 4.0, math.inf, 7.0], [1.0, math.nan, 2.0, 6.0, 100.0, -100.0], 1 - 2 / 14),
        ([-4, 0, -3, 1, 0, 0], [1, 0, 2, 6, 0, 0], 1.0),  # off by a constant
        ([9, 9, 9, 9, 9, 9], [1, 0, 2, 6, 0, 0], 0.0),  # a constant
        ([-1, 0, -2, -6, 0, 0], [1, 0, 2, 6, 0, 0], -3.0),  # errors of twice the deviation, with the other sign: 1 - 4
        ([0, 0, 1, 1, 0, 0], [0.5] * 6, 0.0),  # returns that do not vary leave nothing to explain
    ],
)
def test_the_explained_variance_is_the_number_one_gets_by_hand(values, returns, expected):
    mask = torch.tensor([[True, False, True], [True, False, False]])
    values, returns = (torch.tensor(numbers).float().view(2, 3) for numbers in (values, returns))
    rounding = {1.0: 0.0, -3.0: 1e-12}.get(expected, 1e-15)
    assert explained_variance(values, returns, mask) == pytest.approx(expected, abs=rounding)


def test_a_step_with_a_critic_tells_its_explained_variance_and_others_do_not(step):
    batch, nobody = batch_of(step), torch.zeros(4, dtype=torch.bool)
    earned = torch.arange(4.0)[:, None].expand(batch.loss_mask.shape)
    with_values = replace(batch, returns=torch.zeros_like(earned), old_values=0.5 * earned)
    # Errors are half of what was earned: a quarter of its variance.
    metrics = rollout_metrics(step, with_values, without_signal(nobody, earned))
    assert metrics["value/explained_variance"] == pytest.approx(3 / 4, abs=1e-12)
    assert "value/explained_variance" not in rollout_metrics(step, with_values, without_signal(nobody))


@pytest.mark.parametrize("num_tokens", [48, 300, 2000])
@pytest.mark.parametrize("value_lam", [None, 1.0])
def test_a_random_critic_explains_nothing_at_any_length(num_tokens, value_lam):
    """Values that are one random number a row, rewards 0 or 1: the critic's own targets with lambda 0.95 hide it."""
    random = torch.Generator().manual_seed(num_tokens)
    shape = 64, num_tokens
    values = torch.randn(64, 1, generator=random).expand(shape)
    rewards = torch.zeros(shape)
    rewards[:, -1] = torch.randint(0, 2, (64,), generator=random).float()
    mask = torch.ones(shape, dtype=torch.bool)
    keys = {"gamma": 1.0, "truncated": None, "bootstrap": False}
    _, targets = gae(rewards, values, mask, lam=0.95, value_lam=value_lam, **keys)
    assert explained_variance(values, reward_to_go(rewards, mask, 1.0), mask) <= 0.05
    hidden = explained_variance(values, targets, mask)
    assert hidden > 0.2 if value_lam is None else hidden <= 0.05


# -- updates -----------------------------------------------------------------------------------------------------------
def test_the_clock_tells_stages_and_adds_up_their_seconds(monkeypatch):
    now, told = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(told.append)
    for stage, seconds in (("sample", 2.0), ("score", 1.0), ("sample", 0.5)):
        with clock(stage):
            now[0] += seconds
    now[0] += 0.25
    assert told == ["sample", "score", "sample"]
    found = clock.end_step()
    assert found.pop("memory/peak_bytes") > 0
    assert found == {"time/sample": 2.5, "time/score": 1.0, "time/step": 3.75}
    with clock("log"):
        now[0] += 0.5
    now[0] += 1.0
    assert clock.end_step().items() > {"time/log": 0.5, "time/step": 1.5}.items(), "from the end of the last one"


def test_peak_memory_is_in_bytes(monkeypatch):
    peak = peak_memory_bytes()
    assert 50e6 < peak < 100e9  # this process has torch loaded

    def refused(*args):
        raise FileNotFoundError

    monkeypatch.setattr(memory.Path, "read_text", refused)  # a system without /proc
    assert peak_memory_bytes() == pytest.approx(peak, rel=0.1)
    monkeypatch.setattr(memory.sys, "platform", "darwin")  # which counts in bytes where Linux counts in KiB
    assert peak_memory_bytes() == pytest.approx(peak / 1024, rel=0.1)


# -- evaluations -------------------------------------------------------------------------------------------------------
SAMPLING = Sampling(max_tokens=10, temperature=1.0)


@pytest.fixture
def groups(backbone, make_prompt):
    """Two prompts, four completions each: every other one is cut at 4 tokens."""
    generator = ScriptedGenerator({"*": ["ok", "nonsense"]}, backbone.tokenizer)
    sampling = Sampling(max_tokens=4, temperature=1.0)
    return generator.sample([make_prompt("1+1=?"), make_prompt("2+2=?")], 4, [0, 0], sampling)


def scores(**by_reward):
    values = {name: torch.tensor(rows) for name, rows in by_reward.items()}
    return Scores(total=sum(values.values()), by_reward=values)


def test_accuracy_pass_at_k_and_lengths_are_the_numbers_one_gets_by_hand(groups):
    # Right: 1 of 4 and 4 of 4. mean@4 = (1/4 + 1) / 2 = 5/8; the two differ by 3/4, so their standard deviation is
    # 3/4 / sqrt 2 and the standard error 3/8. pass@2 of the first: 1 - C(3,2)/C(4,2) = 1 - 3/6 = 1/2; mean 3/4,
    # error 1/4.
    # Of 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, variance 14/3, error sqrt(14/3/4).
    assert mean_and_error([1, 2, 3, 6]) == (3, pytest.approx(math.sqrt(14 / 12), abs=1e-12))
    assert (mean_and_error([0.7]), mean_and_error([0.5] * 5)) == ((0.7, 0.0), (0.5, 0.0))
    values = scores(math=[[0.0, 1.0, 0.0, 0.0], [1.0] * 4])
    measured = summarise(groups, values, step=3, correct_at=1.0, num_examples=1)
    assert (measured.step, measured.accuracy, measured.accuracy_se) == (3, 5 / 8, 3 / 8)
    assert [len(r.completion.token_ids) for g in groups for r in g.rollouts] == [3, 4] * 4
    assert measured.metrics == pytest.approx(
        {
            "eval/math": 5 / 8, "eval/math_se": 3 / 8, "eval/pass@1": 5 / 8, "eval/pass@1_se": 3 / 8,
            "eval/pass@2": 3 / 4, "eval/pass@2_se": 1 / 4, "eval/pass@4": 1.0, "eval/pass@4_se": 0.0,
            "eval/reward/math": 5 / 8,
            "eval/length/mean": 3.5, "eval/length/truncated_fraction": 1 / 2,  # "ok" and its end; "nonsense" cut at 4
        },
        abs=1e-12,
    )  # fmt: skip
    for num_examples in (0, 1, 2, 9):
        measured = summarise(groups, values, step=0, correct_at=1, num_examples=num_examples)
        assert measured.examples == (groups[0].rollouts[0], groups[1].rollouts[0])[:num_examples]
        assert measured.example_scores == (0.0, 1.0)[:num_examples]


def test_the_majority_is_of_the_answers_that_the_first_reward_read(groups):
    # The first prompt votes 2 : 1 for a wrong answer; in the second one vote is right, one wrong, and two are none.
    values = scores(math=[[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], style=[[1.0] * 4] * 2)
    answers = {"math": [["2", "3", "3", None], ["4", "5", None, None]], "style": [["a"] * 4] * 2}
    measured = summarise(groups, replace(values, answers=answers), step=0, correct_at=1, num_examples=0).metrics
    assert (measured["eval/maj@4"], measured["eval/maj@4_se"]) == (1 / 4, 1 / 4)  # (0 + 1/2) / 2
    unread = replace(values, answers={"style": answers["style"]})
    assert "eval/maj@4" not in summarise(groups, unread, step=0, correct_at=1, num_examples=0).metrics


def test_the_first_reward_decides_what_is_right_and_by_its_threshold(groups):
    values = scores(math=[[0.4, 0.5, 0.6, 0.0], [0.0] * 4], style=[[1.0] * 4, [1.0] * 4])
    measured = summarise(groups, values, step=0, correct_at=0.5, num_examples=2)
    assert measured.accuracy == 2 / 8
    assert measured.metrics["eval/reward/style"] == 1.0
    assert measured.metrics["eval/reward/math"] == pytest.approx(1.5 / 8)


def test_the_same_prompts_and_seeds_are_drawn_at_every_step(backbone, make_prompt):
    generator, asked = ScriptedGenerator({"*": ["a", "b"]}, backbone.tokenizer), []
    sample = generator.sample

    def watched(prompts, n, seeds, sampling):
        asked.append((tuple(p.id for p in prompts), n, tuple(seeds), sampling))
        return sample(prompts, n, seeds, sampling)

    generator.sample = watched
    prompts = [make_prompt("1+1=?"), make_prompt("2+2=?")]

    def right_when_a(groups):
        return scores(is_a=[[float(r.completion.text == "a") for r in g.rollouts] for g in groups])

    settings = SimpleNamespace(num_samples=2, correct_at=1.0, num_examples=1, drawn=lambda sampling: sampling)
    config = SimpleNamespace(seed=5, eval=settings, generation=SimpleNamespace(sampling=SAMPLING))
    results = [evaluate(generator, right_when_a, prompts, config, step) for step in (0, 10)]
    assert asked[0] == asked[1] == (("1+1=?", "2+2=?"), 2, tuple(sampling_seeds(5, 0, 2, 2, "evaluate")), SAMPLING)
    for evaluation, groups, found in results:
        assert evaluation.accuracy == 0.5  # of two neighbouring seeds one says "a"
        assert found.by_reward["is_a"].shape == (2, 2)
        assert len(groups) == 2
    assert [evaluation.step for evaluation, _, _ in results] == [0, 10]


def test_the_kl_to_the_base_is_that_of_the_completions_tokens(make_roles, make_batch):
    """exp(-d) - 1 + d with d = log pi - log base, one row at a time, over the five completion tokens."""
    batch = make_batch([(0, [5, 6, 7], [20, 21]), (1, [9, 8], [22, 23, 24])])
    assert kl_to_base(make_roles(), batch) == 0  # a fresh adapter changes nothing
    roles = make_roles(noise=0.05)
    policy = [x for row in range(2) for x in dense(roles, row, batch)[0]]
    with torch.no_grad(), roles.using(None):
        base = [x for row in range(2) for x in dense(roles, row, batch)[0]]
    gaps = [math.exp(q - p) - 1 + p - q for p, q in zip(policy, base, strict=True)]
    assert len(gaps) == 5
    assert sum(gaps) / 5 > 1e-3
    assert kl_to_base(roles, batch) == pytest.approx(sum(gaps) / 5, rel=1e-4)


# -- single tokens -----------------------------------------------------------------------------------------------------
TINY = (
    "prompts_per_step=3", "group_size=3", "generation=transformers", "generation.max_tokens=20",
    "lora.rank=2", "lora.alpha=4", "lora.dropout=0.1", "data.size=16", "data.held_out_size=8", "eval.every=0",
    "model.device=cpu", "scoring.workers=0", "console=null", "trainer.lr=1e-3",
)  # fmt: skip
ROWS = [(0, (5, 6), (7, 8, 9)), (0, (5, 6), (10, 11)), (1, (3, 4, 5), (6, 7)), (1, (3, 4, 5), (8, 9, 10, 11))]


def run(folder, *words, steps=4):
    assert cli.run(["train", *TINY, *words, f"steps={steps}", f"hydra.run.dir={folder}"]) == 0
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".safetensors":
            found[str(file.relative_to(folder))] = file.read_bytes()
        elif file.name == "metrics.jsonl" or file.parent.name == "rollouts":
            found[file.name] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("algorithm=ppo", "critic.kind=adapter", "epochs=2", "snapshot.old=copy")])
def test_looking_at_tokens_changes_nothing_of_the_run(words, tmp_path):
    def without(rows):
        measured = ("time/", "memory/")
        return [{k: v for k, v in row.items() if k != "tokens" and not k.startswith(measured)} for row in rows]

    looked, blind = (run(tmp_path / every, *words, f"token_values.every={every}") for every in ("2", "0"))
    assert looked.keys() == blind.keys()
    for name, found in looked.items():
        if isinstance(found, bytes):
            assert found == blind[name], name
        else:
            assert without(found) == without(blind[name]), name
    metrics = looked["metrics.jsonl"]
    assert ["time/inspect" in line for line in metrics] == [False, True, False, True]
    assert not any("time/inspect" in line for line in blind["metrics.jsonl"])
    for step, kept in ((1, 0), (2, 6), (3, 0), (4, 6)):
        assert sum("tokens" in line for line in looked[f"step_{step:06d}.jsonl"]) == kept, "two groups of three"


def test_a_runs_values_are_of_its_tokens(tmp_path):
    found = run(tmp_path / "run", "token_values.every=2", steps=2)["step_000002.jsonl"]
    kept = [line for line in found if "tokens" in line]
    assert kept
    for line in kept:
        tokens = line["tokens"]
        assert {name: len(values) for name, values in tokens.items()} == dict.fromkeys(tokens, len(line["token_ids"]))
        assert tokens["old"] == pytest.approx(line["logprobs"], abs=1e-4), "engine and trainer agree"
        assert "".join(tokens["text"]).startswith(line["completion"])
        assert tokens["advantage"] == pytest.approx([line["advantage"]] * len(tokens["old"]), abs=1e-5)
    assert any(line["tokens"]["after"] != line["tokens"]["old"] for line in kept), "an update moves them"


def dense(roles, row, batch):
    """Log-probs and entropies of a row's completion by the plain forward of one row."""
    ids = batch.token_ids[row][batch.attention_mask[row]]
    with torch.no_grad():
        logprobs = roles.model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    own = batch.loss_mask[row][: len(ids)].nonzero()[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[own - 1, ids[own]].tolist(), entropy[own - 1].tolist()


@pytest.mark.parametrize("reference", ["none", "base", "copy"])
def test_before_and_after_are_what_each_policy_says(reference, make_roles, make_batch, backbone):
    roles = make_roles(noise=0.05, reference=reference)
    batch = make_batch(ROWS)
    starts = [len(prompt) for _, prompt, _ in ROWS]
    clock, zero_rows = Clock(print), torch.zeros(4, dtype=torch.bool)
    with inspecting(roles, batch, starts, zero_rows, 2, backbone.decode_all, clock) as found:
        before = [dense(roles, row, batch)[0] for row in range(4)]
        with torch.no_grad(), roles.using(roles.reference_role):
            references = [dense(roles, row, batch)[0] for row in range(4)]
        for _, parameter in roles.named_parameters(POLICY):
            parameter.data += 0.02
    assert list(found) == [0, 1, 2, 3]
    for row, values in found.items():
        after, entropy = dense(roles, row, batch)
        assert values.old == pytest.approx(before[row], abs=2e-5)
        assert values.after == pytest.approx(after, abs=2e-5)
        assert values.entropy == pytest.approx(entropy, abs=2e-5)
        assert values.reference == pytest.approx(references[row], abs=2e-5)
        assert values.after != values.old
        assert values.reference != values.old


def test_tokens_of_an_answer_are_shown_without_values(make_roles, make_batch, backbone):
    roles, decode = make_roles(), backbone.decode_all
    batch = make_batch([(0, (5, 6), (-11, 7, 8, -9, 10)), (0, (5, 6), (7,))])
    with inspecting(roles, batch, [2, 2], torch.zeros(2, dtype=torch.bool), 1, decode, Clock(print)) as found:
        pass
    values = found[0]
    assert "".join(values.text) == decode([11, 7, 8, 9, 10])
    expected = dense(roles, 0, batch)[0]
    for own in (values.old, values.after, values.reference, values.entropy, values.advantage):
        assert [value is None for value in own] == [True, False, False, True, False]
    assert [value for value in values.old if value is not None] == pytest.approx(expected, abs=2e-5)


def test_whole_groups_are_chosen_those_that_teach_first():
    groups = torch.tensor([4, 4, 7, 7, 9, 9])
    zero_rows = torch.tensor([True, True, False, True, False, False])
    assert chosen_rows(groups, zero_rows, 1).tolist() == [2, 3]
    assert chosen_rows(groups, zero_rows, 2).tolist() == [2, 3, 4, 5]
    assert chosen_rows(groups, zero_rows, 9).tolist() == [0, 1, 2, 3, 4, 5]


@each("text", ["12+3=15", "n\u00e9 \u2192 \U0001f600!", "<think>7</think>\n\n x", "\u00e9\u00e9"])
def test_the_pieces_are_the_text(text, backbone):
    ids = backbone.tokenizer(text)["input_ids"]
    found = pieces(ids, backbone.decode_all)
    assert "".join(found) == backbone.decode_all(ids) == text
    assert len(found) == len(ids)
    assert "".join(pieces(ids[:-1], backbone.decode_all)) == backbone.decode_all(ids[:-1]), "also inside a character"
