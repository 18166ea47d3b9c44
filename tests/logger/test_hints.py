"""Each hint on a series that calls for it, and none on a healthy one."""

import json
import math

from in_one_test import each

from rlft.logger.alarms import Hints

HEALTHY = {
    "reward/mean": 0.5, "loss/total": 0.02, "policy/grad_norm": 0.4, "policy/entropy": 1.0, "length/mean": 40.0,
    "length/truncated_fraction": 0.05, "tokens/completion": 1000.0, "tokens/trained": 800.0,
    "waste/zero_advantage_fraction": 0.2, "waste/importance_dropped_fraction": 0.0,
}  # fmt: skip


def hear(make_step, steps, rewards=(0.0, 1.0), **changes):
    """(step, text) of all hints over steps of healthy metrics with changes: numbers, or functions of the step."""
    hints, heard = Hints(), []
    for step in range(1, steps + 1):
        metrics = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
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
        hints.check(make_step(1, rewards=(0.0, 1.0), **HEALTHY))
        for step in range(2, 20):
            heard = hints.check(make_step(step, rewards=rewards, **{**HEALTHY, "waste/zero_advantage_fraction": 1.0}))
            marks[solved] |= {hint.alarm for hint in heard}
            assert all("no_signal" not in hint.text for hint in heard)
    assert marks == {True: {None}, False: {"no_signal"}}, "1.0 is the most there was, 0.2 is not"


def test_what_is_remembered_survives_a_checkpoint(make_step):
    def steps(n):
        falling = {**HEALTHY, "policy/entropy": 1.0 / n, "length/truncated_fraction": 0.95 if n > 8 else 0.0}
        return make_step(n, rewards=(0.0, 0.5), **falling)

    whole, first, second = Hints(), Hints(), Hints()
    expected = [whole.check(steps(n)) for n in range(1, 60)]
    before = [first.check(steps(n)) for n in range(1, 10)]
    second.restore(json.loads(json.dumps(first.state())))
    assert before + [second.check(steps(n)) for n in range(10, 60)] == expected
    assert {hint.alarm for hints in expected for hint in hints} >= {"truncated", "entropy"}


EQUAL = {"waste__zero_advantage_fraction": 1.0, "tokens__trained": 0.0}
CASES = {
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


@each("case", CASES)
def test_each_trouble_is_told_once_with_its_reason(case, make_step):
    changes, rewards, steps, words = CASES[case]
    heard = hear(make_step, 40, rewards=rewards, **changes)
    assert [step for step, _ in heard] == steps
    assert all(words in text for _, text in heard)


def test_a_lasting_trouble_is_told_again_after_a_hundred_steps(make_step):
    assert [step for step, _ in hear(make_step, 250, length__truncated_fraction=1.0)] == [3, 103, 203]


def test_an_expected_zero_is_never_told_again(make_step):
    assert len(hear(make_step, 250, loss__total=0.0)) == 1


FALLING = {"policy__entropy": lambda s: 1.0 - 0.9 * s / 50, "length__truncated_fraction": lambda s: 0.33 / s}


@each(
    ("changes", "rewards", "why"),
    [
        ({}, (0.0, 1.0), "a healthy run"),
        # Entropy falls to a tenth, one in three completions is still truncated at the start.
        ({"reward__mean": lambda s: s / 50, **FALLING}, (0.0, 1.0), "it solves its task slowly"),
        ({"length__truncated_fraction": lambda s: 1.0 if s % 3 else 0.0}, (0.0, 1.0), "two unlucky steps"),
        ({}, (1.0, 1.0), "a critic learns from equal rewards: the share of zero advantages tells"),
        ({"waste__zero_advantage_fraction": 1.0}, (1.0,), "groups of one are never equal"),
    ],
)
def test_what_is_no_trouble_is_not_told(changes, rewards, why, make_step):
    assert hear(make_step, 50, rewards=rewards, **changes) == [], why


@each("name", ["loss/total", "loss/kl", "policy/grad_norm"])
@each("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stops_the_run(name, value, make_step):
    (hint,) = Hints().check(make_step(7, **(HEALTHY | {name: value})))
    assert hint.fatal
    assert hint.text.startswith(f"step 7: {name} is {value}, so the run stops here")


def test_a_metric_that_may_be_undefined_does_not_stop_the_run(make_step):
    assert Hints().check(make_step(1, **(HEALTHY | {"reward/std": math.nan}))) == []


def test_a_run_with_few_metrics_is_read_all_the_same(make_step):
    assert Hints().check(make_step(1, reward__mean=0.5)) == []
