"""Faults of an engine that begin where no fixed tokens are compared stop the run before an update."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_one_test import each

from rlft import cli
from rlft.generation.transformers import TransformersGenerator
from rlft.loop.freshness import (
    LIMITS_IN_16_BITS,
    LIMITS_IN_32_BITS,
    Freshness,
    Limits,
    StaleAdapterError,
    check_sampled,
    samples_tell,
)
from rlft.loop.session import Session
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.networks import Networks
from rlft.trainer.optimizer import Optimizer
from rlft.types import Adapter, Group

FAULTY = 5
"""The version with which a fault begins, after the checks of 0, 1 and 2 by fixed tokens."""
WORDS = (
    "train", "steps=7", "prompts_per_step=2", "group_size=4", "generation=transformers",
    "generation.transformers.weights=apart", "generation.max_tokens=24", "lora.rank=2", "data.size=16",
    "data.held_out_size=4", "eval.every=0", "checkpoint.every=0", "model.device=cpu", "scoring.workers=0",
    "console=null", "algorithm.entropy_coef=0.01", "alarms=null", "minibatches=2",
)  # fmt: skip
Load = Callable[[TransformersGenerator, Adapter], None]


def layers(engine: TransformersGenerator) -> list[Any]:
    return [layer for layer in engine.slot.model.modules() if isinstance(layer, LoraLinear)]


def stale(load: Load, engine: TransformersGenerator, new: Adapter) -> None:
    engine.version = new.version


def flipped(load: Load, engine: TransformersGenerator, new: Adapter) -> None:
    load(engine, new)
    layers(engine)[0].lora_A["sampler"].weight.data.view(torch.int32)[0, 0] ^= 1


def exchanged(load: Load, engine: TransformersGenerator, new: Adapter) -> None:
    names = {name: name.replace(".0.", "~").replace(".1.", ".0.").replace("~", ".1.") for name in new.weights}
    load(engine, replace(new, weights={names[name]: tensor for name, tensor in new.weights.items()}))


def rescaled(load: Load, engine: TransformersGenerator, new: Adapter) -> None:
    load(engine, new)
    layers(engine)[1].scaling["sampler"] *= 1.5


def healthy(load: Load, engine: TransformersGenerator, new: Adapter) -> None:
    load(engine, new)


def wrong_beyond(groups: Sequence[Group], length: int) -> list[Group]:
    """Log-probs as of a decoder that is wrong from a position on."""

    def of(rollout: Any) -> Any:
        logprobs = [p - 0.01 * (t >= length) for t, p in enumerate(rollout.completion.logprobs)]
        return replace(rollout, completion=replace(rollout.completion, logprobs=tuple(logprobs)))

    return [replace(group, rollouts=tuple(map(of, group.rollouts))) for group in groups]


@pytest.mark.parametrize("fault", [stale, flipped, exchanged, rescaled, healthy, wrong_beyond])
def test_a_fault_that_begins_late_stops_the_run_before_an_update(
    fault: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load, sample, score, update = (
        TransformersGenerator.load, TransformersGenerator.sample, Networks.score, Optimizer.update
    )  # fmt: skip
    scores, updates = [], []

    def loaded(engine: TransformersGenerator, new: Adapter) -> None:
        (fault if new.version >= FAULTY and fault is not wrong_beyond else healthy)(load, engine, new)

    def sampled(engine: TransformersGenerator, *args: Any) -> list[Group]:
        groups = sample(engine, *args)
        return wrong_beyond(groups, 16) if fault is wrong_beyond and engine.version >= FAULTY else groups

    def scored(roles: Networks, *args: Any, **keys: Any) -> Any:
        scores.append(args)
        return score(roles, *args, **keys)

    monkeypatch.setattr(TransformersGenerator, "load", loaded)
    monkeypatch.setattr(TransformersGenerator, "sample", sampled)
    monkeypatch.setattr(Networks, "score", scored)
    monkeypatch.setattr(Optimizer, "update", lambda optimizer, lr: updates.append(lr) or update(optimizer, lr))
    code = cli.run([*WORDS, f"hydra.run.dir={tmp_path / 'run'}"])
    if fault is healthy:  # fixed tokens after 0, 1, 2; the policy's own before the checkpoint
        assert (code, len(scores), len(updates)) == (0, 4, 2 * 7)
    else:
        said = "did not sample step 6 from" if fault is wrong_beyond else "does not hold"
        assert (code, len(scores), len(updates)) == (1, 3, 2 * FAULTY)
        assert f"{said} policy version {FAULTY}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", ["", "checkpoint.on_signal=now", "checkpoint.every=5", "freshness.every=9 checkpoint.every=5"]
)
def test_no_checkpoint_is_kept_of_a_policy_whose_log_probs_are_not_finite(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a signal asks for it, before the first forward that would notice."""
    score, publish = Networks.score, Session.publish
    last, words = -1, [each for each in WORDS if each.split("=")[0] not in word]

    def scored(roles: Networks, *args: Any, **keys: Any) -> Any:
        return [[math.nan] for _ in range(2)] if last == FAULTY else score(roles, *args, **keys)

    def published(session: Session, version: int) -> None:
        nonlocal last
        publish(session, version)
        last = version
        if version == FAULTY and not word:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Session, "publish", published)
    monkeypatch.setattr(Networks, "score", scored)
    assert cli.run([*words, *word.split(), f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert f"step {FAULTY}: the policy has diverged" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob(f"checkpoints/*{FAULTY}"))


# -- the limits --------------------------------------------------------------------------------------------------------
class Learner:
    """Whose log-probs of 1,000 sampled tokens lie so far from the engine's, and one more rounding moves by `noise`."""

    token_budget = 0

    def __init__(self, gaps: torch.Tensor, noise: float = 0.0) -> None:
        sampled = torch.full((10, 100), -2.0)
        computed = sampled + gaps.view(10, 100)
        self.rows: Any = SimpleNamespace(loss_mask=sampled < 0, sampled_logprobs=sampled)
        self.forward = SimpleNamespace(logprobs=lambda rows, token_budget: computed)
        self.gaps, self.noise = gaps, noise

    def score(self, sequences: object, *, rounded: bool = False) -> list[list[float]]:
        return [[-1.0 - self.noise * rounded] * 300]


def gaps(usual: float, other: float = 0.0, number: int = 0) -> torch.Tensor:
    return torch.where(torch.arange(1000) < number, other, usual)


@each(
    ("limits", "learner", "is_stopped"),
    [
        (LIMITS_IN_32_BITS, Learner(gaps(1e-5)), False),
        (LIMITS_IN_32_BITS, Learner(gaps(1e-5, 0.002, 1)), True),
        (LIMITS_IN_16_BITS, Learner(gaps(0.05, 1.4, 30)), False),
        (LIMITS_IN_16_BITS, Learner(gaps(0.05, 1.6, 10)), False),
        (LIMITS_IN_16_BITS, Learner(gaps(0.05, 1.6, 11)), True),  # by the 99th percentile
        (LIMITS_IN_16_BITS, Learner(gaps(0.11)), True),  # by the mean
        (LIMITS_IN_16_BITS, Learner(gaps(0.11), noise=0.05), False),  # which the model's own roundings explain
        (LIMITS_IN_32_BITS, Learner(gaps(0.11), noise=0.05), True),
        (LIMITS_IN_16_BITS, Learner(gaps(0.01, math.nan, 1)), False),  # the trainer's own fault, which the update names
    ],
)
def test_sampled_tokens_are_judged_as_fixed_ones(limits: Limits, learner: Any, is_stopped: bool) -> None:
    freshness = Freshness([[1, 2]], limits, 1)
    check = partial(check_sampled, freshness, learner)
    check(learner.rows, learner.gaps, 4)  # an engine without weights, whose log-probs were never compared
    freshness.compared = True
    for given in (learner.gaps, None):
        if is_stopped:
            with pytest.raises(StaleAdapterError, match=r"log-probs of 1000 sampled tokens differ by up to"):
                check(learner.rows, given, 4)
        else:
            check(learner.rows, given, 4)
    learner.rows.sampled_logprobs[0, 0] = math.inf
    if not learner.gaps.isnan().any():
        with pytest.raises(StaleAdapterError, match="by up to inf nats"):
            check(learner.rows, None, 4)


@each(
    ("word", "expected"),
    [
        ("", True), ("generation.temperature=0.9", False), ("generation.top_p=0.9", False), ("lora.dropout=0.1", False),
        ("overlap.lag=1", False), ("freshness.threshold=0.01", False), ("environment=calculator", False),
        ("cluster.ranks=2", False),
    ],
)  # fmt: skip
def test_samples_tell_where_the_first_forward_computes_what_has_sampled_them(
    run_config, word: str, expected: bool
) -> None:
    assert samples_tell(run_config(*word.split())) is expected
