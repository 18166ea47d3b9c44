"""The bounds within which float32 must be: they hold for what TRL's formulas give in float32, and are no wider."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import plain_grpo
import pytest
import torch
from in_one_test import each
from plain_grpo import BUGS, Plain, written
from slow_cases import slow_but
from trl_runs import BUGS as TRL_BUGS

from rlft.commands.audit.other_trainers import changes, compare
from rlft.commands.audit.other_trainers.credit import credited
from rlft.commands.audit.other_trainers.form import read
from rlft.commands.audit.other_trainers.losses import losses
from rlft.commands.audit.other_trainers.numbers import LONGEST_SUM, Compared, roundings
from rlft.commands.audit.other_trainers.settings import Settings, Trainer
from rlft.commands.audit.other_trainers.steps import Step, steps_of


def steps(lines: list[dict[str, Any]], folder: Path, **given: Any) -> list[Step]:
    return list(steps_of(read(written(folder / "run.jsonl", lines), Trainer.trl, given)))


def scored(rewards: torch.Tensor, size: int, folder: Path, **given: Any) -> Step:
    """A step of groups of that size with these rewards `[B, K]`."""
    lines = [
        {"step": 0, "group": i // size, "rewards": {f"r{k}": value for k, value in enumerate(row)}}
        for i, row in enumerate(rewards.tolist())
    ]
    [step] = steps(lines, folder, **given)
    return step


def trls_advantages(rewards: torch.Tensor, weights: torch.Tensor, size: int, scale: str) -> torch.Tensor:
    """As grpo_trainer.py computes them, in float32."""
    totals = (rewards * weights).nansum(1)
    groups = totals.view(-1, size)
    centred = totals - groups.mean(1).repeat_interleave(size)
    if scale == "none":
        return centred
    spread = totals.std() if scale == "batch" else groups.std(1).repeat_interleave(size)
    return centred / (spread + 1e-4)


@pytest.mark.parametrize("scale", slow_but("group", ["group", "batch", "none"]))
def test_trls_formula_in_float32_is_within_the_bounds_of_advantages(
    scale: Literal["group", "batch", "none"], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    closest = 0.0
    for trial in range(60):
        size = (4, 8, 64)[trial % 3]
        rewards = torch.rand(4 * size, 2, generator=generator) * 10 ** (trial % 5 - 2)
        if trial % 4 == 0:
            rewards = 0.1 + rewards.round(decimals=1) * 0  # all equal, of which no sum is exact
        weights = torch.tensor([0.7, 0.3])
        settings = Settings(scale_rewards=scale, reward_weights=weights.tolist())
        step = scored(rewards, size, tmp_path, reward_weights=weights.tolist())
        found, bound = credited(step, settings)
        apart = (trls_advantages(rewards, weights, size, scale).double() - found).abs()
        assert (apart <= bound).all(), trial
        closest = max(closest, float((apart / bound).nan_to_num(0.0).max()))
    assert closest > 0.01, "bounds a hundred times as wide as any error hide differences"


def test_groups_of_equal_rewards_that_float32_holds_have_exactly_0(tmp_path: Path) -> None:
    found, bound = credited(scored(torch.full((8, 2), 0.75), 4, tmp_path), Settings())
    assert found.tolist() == bound.tolist() == [0.0] * 8
    # 0.1 is no float32 number: three of them add up to something else than 0.3, and 1e-4 divides the difference.
    found, bound = credited(scored(torch.full((6, 1), 0.1), 3, tmp_path), Settings())
    assert found.tolist() == [0.0] * 6
    assert (bound > 1e-4).all()


def in_float32(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with all numbers rounded, as a trainer records them."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return torch.tensor(value, dtype=torch.float32).item()
        if isinstance(value, list):
            return [rounded(each) for each in value]
        return value

    return [{k: v if k in ("settings", "rewards", "rows") else rounded(v) for k, v in line.items()} for line in lines]


def trls_loss(step: Step, compared: Compared, number: int, level: str) -> float:
    """As grpo_trainer.py computes it of loss_type grpo, in float32."""
    batches, total = step.updates[number].batches, torch.zeros(())
    assert batches is not None
    assert step.old is not None
    assert step.reference is not None
    assert step.advantages is not None
    assert step.mask is not None
    for each_batch in batches:
        rows, mask = each_batch.rows, step.mask[each_batch.rows].float()
        logps, old = each_batch.logprobs.float(), step.old[rows].float()
        reference, advantages = step.reference[rows].float(), step.advantages[rows].float().unsqueeze(1)
        ratio = torch.exp(logps - old)
        if level == "sequence":
            ratio = torch.exp((((logps - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1))
        kl = torch.exp(reference - logps) - (reference - logps) - 1
        losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.1 * kl
        total += ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / len(batches)
    return total.item()


@each("level", ["token", "sequence"])
def test_trls_formula_in_float32_is_within_the_bounds_of_losses(
    level: Literal["token", "sequence"], tmp_path: Path
) -> None:
    settings = replace(Settings(**plain_grpo.SETTINGS), importance_sampling_level=level)
    settings = replace(settings, loss_type=changes.LossType.grpo)
    for step in steps(in_float32(Plain(level=level).lines()), tmp_path):
        for number, compared in enumerate(losses(step, settings)):
            theirs = trls_loss(step, compared, number, level)
            assert abs(theirs - float(compared.expected)) <= float(compared.bound)
            assert float(compared.bound) < 1e-5, "of losses below 1"


def test_long_sums_have_no_more_roundings_than_torch_makes() -> None:
    assert [roundings(n) for n in (1, 8, 64, 10**6)] == [1, 8, 64, LONGEST_SUM]
    values = torch.rand(10**6, generator=torch.Generator().manual_seed(1))
    error = abs(values.sum().double() - values.double().sum()) / values.double().sum()
    assert float(error) < LONGEST_SUM * 2**-24


def names(settings: Settings) -> Iterator[str]:
    for check in compare.CHECKS:
        yield from (change.name for change in check.changes(settings))


UNTRIED = {
    # Of the same kind as others that are tried.
    "eps=0", "eps=1e-08", "eps=1e-05", "epsilon=0.3 epsilon_high=null", "epsilon=0.0003 epsilon_high=0.0004",
    "loss_type=cispo", "loss_type=sapo", "num_generations=4", "num_generations=8", "num_generations=16", "delta=3",
    "advantages of the row before in the step", "advantages of the row after in the step",
    "max_completion_length of the longest completion",
}  # fmt: skip


def test_each_explanation_is_that_of_a_planted_bug() -> None:
    given = Settings(**{**plain_grpo.SETTINGS, "loss_type": changes.LossType.grpo})
    planted = {*BUGS, *(explanation for *_, explanation in TRL_BUGS.values())}
    assert {*names(given)} - planted == UNTRIED
