"""Updates in lanes: the gradient and the metrics of the whole batch, and dropout that follows the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rlft
from rlft.config.model import CriticKind
from rlft.config.schema import RunConfig
from rlft.loop.parts import update_settings
from rlft.model.backbone import Backbone
from rlft.model.roles import Roles
from rlft.trainer.lane_update import Gradients, metrics_of, update_in_lanes
from rlft.trainer.local import open_optimizers
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.ranks import Share
from rlft.trainer.update import update
from rlft.types import Batch

EACH = torch.zeros(9, dtype=torch.bool)


class Recorder(Optimizer):
    """Keeps every gradient and changes nothing."""

    def update(self, lr: float) -> float:
        self.seen = {n: p.grad.clone() for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None}
        self.discard()
        return 1.0


@pytest.fixture
def config(run_config: Callable[..., RunConfig]) -> RunConfig:
    return run_config("prompts_per_step=3", "group_size=3", "generation.max_tokens=9", "token_budget=64")


@pytest.fixture
def batch(make_batch: Callable[..., Batch]) -> Batch:
    one, two, three = [5, 6, 7, 8], [9, 10], [11, 12, 13]
    rows = [
        (0, one, [20, 21, 2]), (0, one, [22, -23, 24, 25]), (0, one, [26, 2]),
        (1, two, [30, 31]), (1, two, [32, 33, 34, 2]), (1, two, [35]),
        (2, three, [40, 41, 42, 43, 44, 45, 2]), (2, three, [46, 2]), (2, three, []),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    made = make_batch(rows, rewards=[1, 0, 0.5, 2, 1, 2, 0, 0, 1])
    sampled = -1 + 0.1 * torch.randn(made.loss_mask.shape, generator=generator, dtype=torch.float64)
    return replace(made, sampled_logprobs=sampled, old_logprobs=sampled + 0.05, rewards=made.rewards.double())


def in_float32(batch: Batch) -> Batch:
    sampled = batch.sampled_logprobs.float()
    return replace(batch, sampled_logprobs=sampled, old_logprobs=None, rewards=batch.rewards.float())


def recorders(roles: Roles, config: RunConfig) -> dict[str, Recorder]:
    return {role: Recorder(roles.named_parameters(role), config.trainer, role) for role in roles.learning_roles}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    assert scale > 0
    for name, gradient in found.items():
        torch.testing.assert_close(gradient / scale, expected[name] / scale, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("num_lanes", [1, 2, 3, 16])
@pytest.mark.parametrize("kind", [CriticKind.none, CriticKind.adapter, CriticKind.shared])
def test_lanes_give_the_gradients_and_metrics_of_the_whole_batch(
    kind: CriticKind,
    num_lanes: int,
    config: RunConfig,
    make_roles: Callable[..., Roles],
    make_double: Callable[[], Backbone],
    batch: Batch,
) -> None:
    algorithm = rlft.load_algorithm("grpo" if kind is CriticKind.none else "ppo")
    roles = make_roles(noise=0.05, backbone=make_double(), reference="base", kind=kind)
    batch = algorithm.credit(roles.annotate(batch, EACH, needs_old=False))
    settings, whole, apart = update_settings(config), recorders(roles, config), recorders(roles, config)
    expected = update(roles, whole, algorithm, batch, EACH, 0, settings)
    records = update_in_lanes(roles, apart, algorithm, batch, EACH, 0, settings, None, Share(lanes=num_lanes))
    for role, recorder in whole.items():
        assert_close(apart[role].seen, recorder.seen)
    found = metrics_of([records])
    # A prompt whose rows are in several lanes is trained tokens of each.
    fields = expected.keys() - {"tokens/trained"}
    assert {k: found[k] for k in fields} == pytest.approx({k: expected[k] for k in fields}, rel=1e-6, abs=1e-9)
    assert found.keys() - expected.keys() == {"lanes/balance"}
    assert found["tokens/trained"] >= expected["tokens/trained"]


def test_dropout_of_rows_is_the_same_wherever_they_are_computed(
    config: RunConfig, make_roles: Callable[..., Roles], batch: Batch
) -> None:
    """Rank 1 of two, by itself, has the passes that one process has in the same lanes."""
    algorithm = rlft.load_algorithm("grpo")
    roles = make_roles(noise=0.05, dropout=0.5)
    batch = algorithm.credit(roles.annotate(in_float32(batch), EACH, needs_old=True))
    settings = update_settings(config)

    def passes(share: Share, seed: int) -> dict[int, Any]:
        torch.manual_seed(seed)
        [record] = update_in_lanes(roles, recorders(roles, config), algorithm, batch, EACH, 3, settings, None, share)
        return dict(record.passes)

    whole, second = passes(Share(lanes=4), 1), passes(Share(lanes=4, rank=1, ranks=2), 2)
    assert second == {lane: whole[lane] for lane in (2, 3)}
    assert whole != {**whole, **passes_of_another_step(roles, config, algorithm, batch)}, "dropout differs by step"


def passes_of_another_step(roles: Roles, config: RunConfig, algorithm: Any, batch: Batch) -> dict[int, Any]:
    [record] = update_in_lanes(
        roles, recorders(roles, config), algorithm, batch, EACH, 4, update_settings(config), None, Share(lanes=4)
    )
    return dict(record.passes)


def test_nothing_is_left_of_an_update_that_is_broken_off(
    config: RunConfig, make_roles: Callable[..., Roles], batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = rlft.load_algorithm("grpo")
    roles = make_roles(noise=0.05)
    batch = algorithm.credit(roles.annotate(in_float32(batch), EACH, needs_old=True))

    def fail(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(Share, "sent", fail)
    optimizers = open_optimizers(roles, config.trainer, 0.1)
    with pytest.raises(ConnectionError):
        update_in_lanes(roles, optimizers, algorithm, batch, EACH, 0, update_settings(config), None, Share(lanes=2))
    assert all(p.grad is None for _, p in roles.named_parameters())
    assert not roles.model.training


def test_gradients_are_flat_and_back(make_roles: Callable[..., Roles], config: RunConfig) -> None:
    roles = make_roles(kind=CriticKind.shared)
    gradients = Gradients(optimizers=open_optimizers(roles, config.trainer, 0.1))
    parameters = [p for role in ("policy", "critic") for _, p in roles.named_parameters(role)]
    parameters[3].grad = torch.full_like(parameters[3], 2.0)
    flat = gradients.flat()
    assert len(flat) == sum(p.numel() for p in parameters)
    assert flat.sum().item() == 2.0 * parameters[3].numel()
    gradients.set(3 * flat)
    assert parameters[3].grad is not None
    assert torch.equal(parameters[3].grad, torch.full_like(parameters[3], 6.0))
    gradients.clear()
    assert not gradients.flat().any()
