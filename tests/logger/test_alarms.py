"""Alarms about trouble that develops slowly, and hints about single steps."""

import json
import math

import pytest
from audited_runs import lines_of
from in_one_test import each

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.logger.alarms import Alarms, Hints

HEALTHY = {
    "reward/mean": 0.5, "reward/std": 0.4, "reward/exact_match": 0.4, "policy/grad_norm": 0.4, "length/mean": 40.0,
    "kl/reference": 0.02, "sampler/kl": 0.004, "sampler/effective_sample_size": 0.8,
    "sampler/logprob_gap_mean": 0.001, "ratio/clip_low_fraction": 0.05,
    "ratio/clip_high_fraction": 0.05, "loss/value": 0.2, "waste/zero_advantage_fraction": 0.3,
}  # fmt: skip


def alarms(*words):
    return Alarms(build(compose(list(words))).alarms)


def series(steps, **changes):
    """Healthy metrics that wander a little, with changes: numbers, or functions of the step."""
    found = []
    for step in range(1, steps + 1):
        wander = 1 + 0.2 * math.sin(step)
        metrics = {name: value * wander for name, value in HEALTHY.items()}
        for name, value in changes.items():
            metrics[name.replace("__", "/")] = value(step) if callable(value) else value
        found.append(metrics)
    return found


def heard(found, steps, first=1):
    return [(n, name) for n, metrics in enumerate(steps, first) for name in found.step(n, metrics)]


def test_a_healthy_run_raises_none():
    assert heard(alarms(), series(200)) == []


def after(step, value, before):
    return lambda n: value if n > step else before


# (changes, where it is told first, and again 50 steps later, its name, words). Patience is 5: it is raised in the fifth
# step in a row.
CASES = [
    ({"kl__reference": after(10, 0.6, 0.1)}, [15, 65], "kl", "Raise algorithm.kl_coef"),
    ({"sampler__kl": after(10, 0.2, 0.01)}, [15, 65], "sampler_kl", "is 0.2 nats per token"),
    ({"sampler__effective_sample_size": after(10, 0.2, 0.9)}, [15, 65], "effective_samples", "worth 20% of as many"),
    ({"sampler__logprob_gap_mean": after(10, -0.06, 0.0)}, [15, 65], "logprob_gap", "disagree by -0.06"),
    ({"ratio__clip_low_fraction": after(10, 0.3, 0.0), "ratio__clip_high_fraction": after(10, 0.25, 0.0)}, [15, 65],
     "clipped", "55% of the trained tokens were clipped"),
    ({"waste__zero_advantage_fraction": after(10, 0.9, 0.3), "reward__std": 0.45}, [15, 65], "equal_groups",
     "dynamic_sampling.max_rounds=2"),
    ({"length__mean": lambda n: 20.0 * 1.05**n}, [30, 80], "length_growth", "completions grew from 23 to"),
    ({"loss__value": after(30, 3.0, 0.2)}, [35], "value_loss", "Lower critic.lr"),
    ({"policy__grad_norm": lambda n: 9.0 if n == 40 else 0.3}, [40], "grad_norm", "policy/grad_norm is 9"),
    ({"reward__length": 0.0}, [20, 70], "constant_reward_length",
     "reward.length has given 0 to every completion of 20 steps"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "steps", "name", "words"), CASES, ids=[case[2] for case in CASES])
def test_a_series_that_goes_wrong_is_told(changes, steps, name, words):
    found, texts = alarms(), []
    for step, metrics in enumerate(series(84, **changes), 1):
        told = found.step(step, metrics)
        assert [*told] == [name] * (step in steps)
        texts += told.values()
    assert words in texts[0]
    assert texts[0].rstrip().count(".") >= 1, "a remedy follows"
    key = name.removesuffix("_length") if name.startswith("constant") else name
    assert heard(alarms(f"alarms.{key}=null"), series(84, **changes)) == [], "and null turns it off"


@pytest.mark.parametrize(("changes", "why"), [
    ({"kl__reference": lambda n: 0.6 if n % 5 else 0.1}, "never five in a row"),
    ({"waste__zero_advantage_fraction": 0.95, "reward__std": 0.1}, "solved: nearly every reward is the same"),
    ({"waste__zero_advantage_fraction": 1.0, "reward__std": 0.45}, "hints say that nothing is learned"),
    ({"reward__format": lambda n: 1.0 if n > 1 else 0.9}, "it moved once, and is solved"),
    ({"policy__grad_norm": lambda n: 0.3 if n < 10 else 0.25 if n == 60 else 0.01}, "no more than at the start"),
    ({"length__mean": lambda n: 90.0 if n == 30 else 40.0}, "one long step"),
    ({"loss__value": lambda n: 2.0 / n}, "a critic that learns"),
])  # fmt: skip
def test_what_only_looks_like_it_is_not(changes, why):
    assert heard(alarms(), series(100, **changes)) == [], why


def test_a_reward_that_varies_within_steps_is_not_constant_though_its_mean_is():
    found = alarms("alarms.constant_reward=2")
    for step in (1, 2, 3):
        assert not found.step(step, {**HEALTHY, "reward/exact_match": 0.5}, ["exact_match"])
    still = alarms("alarms.constant_reward=2")
    told = [list(still.step(step, {**HEALTHY, "reward/exact_match": 0.5}, ["format"])) for step in (1, 2)]
    assert told == [[], ["constant_reward_exact_match"]]


def evaluated(found, rewards, accuracies):
    told = [found.evaluation(0, accuracies[0], 0.02)]
    for n, (reward, accuracy) in enumerate(zip(rewards, accuracies[1:], strict=True), 1):
        found.step(10 * n, {**HEALTHY, "reward/mean": reward})
        told.append(found.evaluation(10 * n, accuracy, 0.02))
    return told


def test_accuracy_that_falls_while_the_reward_rises_is_told():
    told = evaluated(alarms(), [0.5, 0.6, 0.7, 0.8], [0.4, 0.6, 0.58, 0.5, 0.49])
    assert [list(found) for found in told] == [[], [], [], ["accuracy_falls"], []], "0.1 is more than 3 x 0.028"
    text = "held-out accuracy fell from 0.600 to 0.500 while reward/mean rose from 0.500 to 0.700"
    assert text in told[3]["accuracy_falls"]
    for rewards, accuracies in [
        ([0.5, 0.4, 0.3], [0.4, 0.6, 0.5, 0.4]),  # both fall: that is seen without us
        ([0.5, 0.6, 0.7], [0.4, 0.5, 0.48, 0.46]),  # within the noise
        ([0.5, 0.6, 0.7], [0.4, 0.5, 0.6, 0.7]),
    ]:
        assert not any(evaluated(alarms(), rewards, accuracies))


def test_an_evaluation_before_the_first_step_is_held_against_later_ones_and_kept_as_json():
    found, resumed = alarms(), alarms()
    assert not found.evaluation(0, 0.6, 0.02)
    resumed.restore(json.loads(json.dumps(found.state(), allow_nan=False)))
    for one in (found, resumed):
        one.step(10, {**HEALTHY, "reward/mean": 0.7})
        told = one.evaluation(10, 0.4, 0.02)
        assert "fell from 0.600 to 0.400 while reward/mean is 0.700: the reward" in told["accuracy_falls"]


def test_what_is_remembered_survives_a_checkpoint():
    changes = {"reward__length": 0.0, "policy__grad_norm": lambda n: 9.0 if n == 40 else 0.3}
    steps = series(84, kl__reference=after(10, 0.6, 0.1), **changes)
    whole = heard(alarms(), steps)
    for cut in (3, 12, 19, 39, 60):
        first, second = alarms(), alarms()
        before = heard(first, steps[:cut])
        first.evaluation(cut, 0.5, 0.02)
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert second.state() == first.state()
        assert before + heard(second, steps[cut:], cut + 1) == whole


@pytest.mark.slow
def test_an_alarm_stands_in_the_metrics_of_its_step_and_a_resumed_run_says_the_same(tmp_path, ran):
    words = [
        "train", "prompts_per_step=2", "group_size=2", "generation=transformers", "generation.max_tokens=8",
        "lora.rank=2", "lora.alpha=4", "data.size=16", "data.held_out_size=8", "eval.every=0", "model.device=cpu",
        "scoring.workers=0", "reward=[exact_match,format]", "alarms.constant_reward=3",
    ]  # fmt: skip
    told = ran([*words, "steps=4", f"hydra.run.dir={tmp_path / 'whole'}"]).out
    assert "note: step 3: reward.exact_match has given 0 to every completion of 3 steps" in " ".join(told.split())
    assert cli.run([*words, "steps=2", f"hydra.run.dir={tmp_path / 'resumed'}"]) == 0
    assert cli.run(["resume", str(tmp_path / "resumed"), "steps=4"]) == 0
    marks, texts = (
        [lines_of(tmp_path / name / file) for name in ("whole", "resumed")]
        for file in ("metrics.jsonl", "alarms.jsonl")
    )
    whole, resumed = ([{k for k in line if k.startswith("alarm/")} for line in found] for found in marks)
    assert (whole, texts[0]) == (resumed, texts[1])
    assert {f"alarm/{alarm['name']}" for alarm in texts[0] if alarm["step"] == 3} == whole[2]
    assert all(alarm["text"] for alarm in texts[0])
    assert "alarm/constant_reward_exact_match" in whole[2]
    assert "alarm/no_signal" in whole[2], "hints that say what is wrong are marked, too"
    assert not whole[0]


HEALTHY_STEP = {
    "reward/mean": 0.5, "loss/total": 0.02, "policy/grad_norm": 0.4, "policy/entropy": 1.0, "length/mean": 40.0,
    "length/truncated_fraction": 0.05, "tokens/completion": 1000.0, "tokens/trained": 800.0,
    "waste/zero_advantage_fraction": 0.2, "waste/importance_dropped_fraction": 0.0,
}  # fmt: skip


def hear(make_step, steps, rewards=(0.0, 1.0), **changes):
    """(step, text) of all hints over steps of healthy metrics with changes: numbers, or functions of the step."""
    hints, heard = Hints(), []
    for step in range(1, steps + 1):
        metrics = HEALTHY_STEP | {name.replace("__", "/"): value for name, value in changes.items()}
        values = {name: value(step) if callable(value) else value for name, value in metrics.items()}
        for hint in hints.check(make_step(step, rewards=rewards, **values)):
            assert not hint.fatal
            assert hint.text.startswith(f"step {step}: ")
            heard.append((step, hint.text))
    return heard


def test_what_is_always_so_of_a_solved_task_is_told_but_no_alarm(make_step):
    marks = {}
    for solved, rewards in ((True, (1.0, 1.0)), (False, (0.2, 0.2))):
        hints, marks[solved] = Hints(), set()
        hints.check(make_step(1, rewards=(0.0, 1.0), **HEALTHY_STEP))
        for step in range(2, 20):
            heard = hints.check(
                make_step(step, rewards=rewards, **{**HEALTHY_STEP, "waste/zero_advantage_fraction": 1.0})
            )
            marks[solved] |= {hint.alarm for hint in heard}
            assert all("no_signal" not in hint.text for hint in heard)
    assert marks == {True: {None}, False: {"no_signal"}}, "1.0 is the most there was, 0.2 is not"


def test_what_hints_remember_survives_a_checkpoint(make_step):
    def steps(n):
        falling = {**HEALTHY_STEP, "policy/entropy": 1.0 / n, "length/truncated_fraction": 0.95 if n > 8 else 0.0}
        return make_step(n, rewards=(0.0, 0.5), **falling)

    whole, first, second = Hints(), Hints(), Hints()
    expected = [whole.check(steps(n)) for n in range(1, 60)]
    before = [first.check(steps(n)) for n in range(1, 10)]
    second.restore(json.loads(json.dumps(first.state())))
    assert before + [second.check(steps(n)) for n in range(10, 60)] == expected
    assert {hint.alarm for hints in expected for hint in hints} >= {"truncated", "entropy"}


EQUAL = {"waste__zero_advantage_fraction": 1.0, "tokens__trained": 0.0}
HINT_CASES = {
    "expected zero": ({"loss__total": 1e-9}, (0.0, 1.0), [1], "that is expected"),
    "dead zero": ({"loss__total": 0.0, "policy__grad_norm": 0.0}, (0.0, 1.0), [1], "the policy does not change"),
    "equal once": ({"loss__total": 0.0, "policy__grad_norm": 0.0, **EQUAL}, (1.0, 1.0), [1, 3], "got the same reward"),
    "equal groups": (EQUAL, (1.0, 1.0), [3], "the rewards taught nothing"),
    "truncated": ({"length__truncated_fraction": 1.0}, (0.0, 1.0), [3], "generation.max_tokens"),
    "empty": ({"length__mean": 1.0}, (0.0, 1.0), [3], "nearly empty"),
    "untrained": ({"tokens__trained": 10.0}, (0.0, 1.0), [3], "only 10 of 1000"),
    # five first values of 1, then five of 0.04 < 0.05: step 10 is the first with a full window
    "entropy": ({"policy__entropy": lambda s: 1.0 if s <= 5 else 0.04}, (0.0, 1.0), [10], "fell from 1 to 0.04"),
}


@each("case", HINT_CASES)
def test_each_trouble_is_told_once_with_its_reason(case, make_step):
    changes, rewards, steps, words = HINT_CASES[case]
    heard = hear(make_step, 40, rewards=rewards, **changes)
    assert [step for step, _ in heard] == steps
    assert all(words in text for _, text in heard)


def test_a_lasting_trouble_is_told_again_after_a_hundred_steps_and_an_expected_zero_never(make_step):
    assert [step for step, _ in hear(make_step, 250, length__truncated_fraction=1.0)] == [3, 103, 203]
    assert len(hear(make_step, 250, loss__total=0.0)) == 1


FALLING = {"policy__entropy": lambda s: 1.0 - 0.9 * s / 50, "length__truncated_fraction": lambda s: 0.33 / s}


@each(("changes", "rewards", "why"), [
    ({}, (0.0, 1.0), "a healthy run"),
    # Entropy falls to a tenth, one in three completions is still truncated at the start.
    ({"reward__mean": lambda s: s / 50, **FALLING}, (0.0, 1.0), "it solves its task slowly"),
    ({"length__truncated_fraction": lambda s: 1.0 if s % 3 else 0.0}, (0.0, 1.0), "two unlucky steps"),
    ({}, (1.0, 1.0), "a critic learns from equal rewards: the share of zero advantages tells"),
    ({"waste__zero_advantage_fraction": 1.0}, (1.0,), "groups of one are never equal"),
])  # fmt: skip
def test_what_is_no_trouble_is_not_told(changes, rewards, why, make_step):
    assert hear(make_step, 50, rewards=rewards, **changes) == [], why


@each("name", ["loss/total", "loss/kl", "policy/grad_norm"])
@each("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stops_the_run(name, value, make_step):
    (hint,) = Hints().check(make_step(7, **(HEALTHY_STEP | {name: value})))
    assert hint.fatal
    assert hint.text.startswith(f"step 7: {name} is {value}, so the run stops here")


def test_a_metric_that_may_be_undefined_or_is_not_there_does_not_stop_the_run(make_step):
    assert Hints().check(make_step(1, **(HEALTHY_STEP | {"reward/std": math.nan}))) == []
    assert Hints().check(make_step(1, reward__mean=0.5)) == []
