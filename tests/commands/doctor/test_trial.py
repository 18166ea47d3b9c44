"""What `rlft doctor` says of a small run: whether the engine follows, how far log-probs are apart, speed and memory."""

import math
from pathlib import Path

import pytest
import torch
from in_one_test import each

from rlft.commands.doctor import command as doctor, trial
from rlft.commands.doctor.command import Settings
from rlft.commands.doctor.trial import MachineTrial
from rlft.config.compose import compose
from rlft.config.keys import with_values
from rlft.generation.engine import Generator
from rlft.loop.freshness import Freshness, Gap, Limits
from rlft.system.terminal import Status
from rlft.types import Adapter


def test_a_trial_keeps_sizes_that_were_typed_and_drops_what_fits_another_model_only(tmp_path):
    plain = with_values(compose(doctor.OWN), {"lora.path": "adapter", "generation.stop": ["</s>"], "group_size": 3})
    plain = with_values(plain, {"model.device": "cpu"})
    typed = frozenset({"group_size"})
    made = MachineTrial(Settings(plain=plain, typed=typed, rewards={}, runs=tmp_path), tmp_path, ())
    assert (made.work.group, made.work.prompts, made.work.prompt_tokens, made.work.completion_tokens) == (3, 2, 64, 64)
    assert (made.plain["lora"]["path"], made.plain["generation"]["stop"]) == (None, [])
    assert Path(made.plain["model"]["path"]).parent == tmp_path
    own = frozenset({"model.path", "lora.path"})
    given = MachineTrial(Settings(plain=plain, typed=own, rewards={}, runs=tmp_path), tmp_path, ())
    assert given.plain["model"] == plain["model"]
    assert (given.plain["lora"]["path"], given.plain["generation"]["stop"]) == ("adapter", ["</s>"])


# -- the engine ------------------------------------------------------------------------------------------------------
NAMES = ("layer.lora_A.weight", "layer.lora_B.weight")


SEQUENCES = [[1, 2, 3], [4, 5]]


class Logits:
    """Log-probs that an adapter's B moves: those of token t by the sum of B times t / 10."""

    def __init__(self):
        self.held = {name: torch.zeros(2, 2) for name in NAMES}

    def weights(self, role):
        return dict(self.held)

    def restore_role(self, role, weights):
        self.held = dict(weights)

    def publish(self, version):
        return Adapter(version=version, weights=dict(self.held), config={})

    def score(self, sequences):
        moved = self.held[NAMES[1]].sum().item()
        return [[-1.0 + moved * token / 10 for token in ids[1:]] for ids in sequences]


class Follower(Logits, Generator):
    """An engine that loads each adapter, but those whose numbers (of the load) are in `ignores`."""

    def __init__(self, *ignores, off=0.0):
        super().__init__()
        self.ignores, self.off, self.loads = ignores, off, 0

    def load(self, adapter):
        self.loads += 1
        if self.loads not in self.ignores:
            self.held = dict(adapter.weights)

    def sample(self, *_):
        raise NotImplementedError

    def score(self, sequences):
        return [[value + self.off for value in row] for row in super().score(sequences)]


def swap(engine, trainer=None, threshold=1e-3):
    trainer, freshness = trainer or Logits(), Freshness(SEQUENCES, threshold, 7)
    before = trainer.weights("policy")

    def publish(version):
        engine.load(trainer.publish(version))
        freshness.check(version, engine, trainer)

    row = trial.swap_row(publish, freshness, trainer)
    assert trainer.held[NAMES[1]] is before[NAMES[1]], "the policy is as it was"
    return row


def test_an_engine_that_follows_is_ok_and_one_that_ignores_an_adapter_is_wrong():
    assert swap(Follower()).status is Status.ok
    assert swap(Follower(1)).status is Status.wrong, "never there"
    assert swap(Follower(2)).status is Status.wrong, "never back"
    assert swap(Follower(off=1e-2)).status is Status.wrong
    assert swap(Follower(off=math.nan)).status is Status.wrong


def test_a_stale_engine_is_found_with_the_wide_threshold_of_16_bits_too():
    row = swap(Follower(), threshold=0.5)
    assert row.status is Status.ok
    assert row.numbers["move_nats"] >= 1.0
    stale = swap(Follower(1, 2), threshold=0.5)
    assert stale.status is Status.wrong
    assert stale.numbers["gap_nats"] == pytest.approx(stale.numbers["move_nats"])


def test_an_adapter_without_effect_in_the_trainer_is_told():
    class Fixed(Logits):
        def score(self, sequences):
            return [[-1.0 for _ in ids[1:]] for ids in sequences]

    with pytest.raises(RuntimeError, match="the adapter has no effect in the trainer"):
        swap(Follower(), Fixed())


@each(("fixed", "sampled", "threshold", "alarm", "status"), [
    (1e-6, 1e-6, 1e-3, 0.05, Status.ok),
    (2e-3, 1e-6, 1e-3, 0.05, Status.wrong),
    (1e-6, 2e-3, 1e-3, 0.05, Status.wrong),
    (0.4, 0.04, 0.5, 0.05, Status.ok),
    (0.4, 0.06, 0.5, 0.05, Status.wrong),  # which raises the run's alarm
    (0.4, 0.06, 0.5, None, Status.ok),
    (math.inf, 1e-6, 0.5, 0.05, Status.wrong),
    (1e-6, math.nan, 0.5, 0.05, Status.wrong),
    (2e-3, None, 1e-3, 0.05, Status.wrong),  # stopped before its first step
])  # fmt: skip
def test_a_gap_above_what_runs_allow_is_wrong(fixed, sampled, threshold, alarm, status):
    steps = None if sampled is None else Gap(mean=sampled, largest=10 * sampled)
    row = trial.gap_row(Gap(mean=fixed / 2, largest=fixed), steps, Limits(largest=threshold), alarm)
    assert row.status is status
    assert ("sampled" in row.value) == (sampled is not None)


def test_a_gap_is_the_mean_and_the_largest_difference():
    assert Gap.between([0.0, 1.0], [0.0, 3.0]) == Gap(mean=1.0, largest=2.0)


def test_the_steps_of_a_trial_are_recorded_and_judged(tiny_trial):
    made = tiny_trial()
    with made._open:
        checks = (trial.engine_rows, trial.step_rows, trial.memory_rows, trial.gap_rows)
        rows = {row.name: row for check in checks for row in check(made)}
    assert list(rows) == ["engine", "sampling", "update", "publish", "memory plan", "log-prob gap"]
    assert rows["update"].numbers["share"] > 0
    assert "sampled_mean_nats" in rows["log-prob gap"].numbers


OK, SLOW, WRONG = Status.ok, Status.slow, Status.wrong
ROWS = [  # (which row, what was measured, its status, some of its numbers)
    (trial.sampling_row, (1000, 10.0, 1.0, "vllm"), OK, {}),  # tokens, seconds, seconds at best, engine
    (trial.sampling_row, (1000, 25.0, 1.0, "vllm"), SLOW, {"tokens_per_s": 40.0}),
    (trial.update_row, (1000, 2.0, 1e12, 1e12, 0.2), OK, {"share": 0.5, "tokens_per_s": 500.0}),
    (trial.update_row, (1000, 10.0, 1e12, 1e12, 0.2), SLOW, {}),
    (trial.update_row, (1000, 10.0, None, 1e12, 0.2), OK, {"share": "none"}),  # of a model whose operations are unknown
    (trial.publish_row, (2.0, 100.0), OK, {}),  # its seconds, those of a step
    (trial.publish_row, (0.5, 1.0), OK, {}),
    (trial.publish_row, (2.0, 10.0), SLOW, {}),
    (trial.memory_row, (1140, 1000), OK, {}),  # bytes as planned, as measured
    (trial.memory_row, (860, 1000), OK, {}),
    *((trial.memory_row, (planned, 1000), WRONG, {}) for planned in (1160, 840, 2000, 500)),
]


@each(("row_of", "measured", "status", "numbers"), ROWS)
def test_slow_steps_and_a_plan_that_is_off_are_told(row_of, measured, status, numbers):
    row = row_of(*measured)
    assert row.status is status
    assert {name: row.numbers.get(name, "none") for name in numbers} == numbers
