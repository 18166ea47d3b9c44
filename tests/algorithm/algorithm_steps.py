"""Algorithms built from their YAMLs, and steps to try them on: batches, outputs, sizes, losses with their gradients."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf
from pydantic import TypeAdapter
from torch import Tensor

from rlft.types import Batch, LossScale, Outputs

CONFIGS = Path(__file__).parents[2] / "configs"


def make(name: str, **overrides: Any) -> Any:
    """The algorithm of a YAML with some keys overridden, as `rlft.load_algorithm` builds it."""
    target, keys = _yaml_of(name)
    return _adapter(target).validate_python(keys | overrides)


@cache
def _yaml_of(name: str) -> tuple[str, dict[str, Any]]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        keys: Any = OmegaConf.to_container(compose(overrides=[f"+algorithm={name}"]).algorithm)
    return keys.pop("_target_"), keys


@cache
def _adapter(target: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_class(target))


def hand_batch(
    lengths: Sequence[int],
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    prompt: int = 1,
    padding: int = 1,
    advantages: Sequence[float] | None = None,
) -> Batch:
    """A batch in which every token has log-prob -1 for old policy, sampler, reference and teacher."""
    mask = torch.zeros(len(lengths), prompt + max(lengths) + padding, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, prompt : prompt + length] = True
    attention = mask.clone()
    attention[:, :prompt] = True
    minus_one = torch.full(mask.shape, -1.0, dtype=torch.float64)
    return Batch(
        token_ids=torch.ones(mask.shape, dtype=torch.int64),
        attention_mask=attention,
        loss_mask=mask,
        sampled_logprobs=minus_one,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(group_ids),
        each_reward=torch.tensor(rewards, dtype=torch.float64)[:, None],
        each_weight=torch.ones(len(rewards), 1, dtype=torch.float64),
        old_logprobs=minus_one,
        reference_logprobs=minus_one,
        teacher_logprobs=minus_one,
        advantages=None if advantages is None else torch.tensor(advantages, dtype=torch.float64)[:, None] * mask,
    )


def random_step(seed: int = 0) -> tuple[Outputs, Batch]:
    """3 groups of 3 (one of equal rewards, one with an empty completion) and a row alone."""
    generator = torch.Generator().manual_seed(seed)
    batch = hand_batch(
        [5, 1, 3, 4, 2, 5, 0, 2, 3, 4],
        [1.0, 0.0, 0.3, 0.1, 0.1, 0.1, 2.0, -1.0, 0.5, 0.7],
        [4, 9, 4, 7, 7, 7, 9, 9, 4, -2],
    )

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch.loss_mask.shape, generator=generator, dtype=torch.float64)

    sampled = -1.5 + noise(0.3)
    old = sampled + noise(0.5)
    batch = replace(batch, sampled_logprobs=sampled, old_logprobs=old, reference_logprobs=old + noise(0.4))
    teacher = 0.4 * torch.randn(old.shape, generator=torch.Generator().manual_seed(50 + seed), dtype=torch.float64)
    batch = replace(batch, teacher_logprobs=old + teacher)
    outputs = Outputs(logprobs=(old + noise(0.4)).requires_grad_(), entropy=(1.5 + noise(0.5)).requires_grad_())
    return outputs, batch


def full_step(seed: int = 0) -> tuple[Outputs, Batch]:
    """As `random_step`, with a critic's values, scored steps, turns and who was cut off, and log-probs of a teacher's
    four most likely tokens.

    The steps of the equal group and of the row alone differ in nothing: the one step of each has the same score. Of two
    rewards by themselves the second differs in other groups than the first does, and in neither of those two.
    """
    outputs, batch = random_step(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    shape, mask = batch.loss_mask.shape, batch.loss_mask
    ends, turn_ends = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    turn_ends[[0, 0, 3, 5, 7, 9], [1, 3, 2, 5, 1, 3]] = True  # rows of three turns, two or one
    # Row: the completion's tokens (from 1) that a step ends with; row 6 has no tokens.
    for row, tokens in enumerate([[2, 5], [1], [1, 3], [4], [2], [5], [], [1, 2], [3], [4]]):
        ends[row, tokens] = True
    scores = torch.randn(shape, generator=generator, dtype=torch.float64)
    scores[[3, 4, 5, 9]] = 0.2
    old_values = 0.3 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    moved = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    second_B = torch.tensor([0.5, 2.0, -1.0, 0.4, 0.4, 0.4, 1.0, 0.3, 0.7, 5.0], dtype=torch.float64)
    batch = replace(
        batch,
        each_reward=torch.stack([batch.rewards, second_B], -1),
        each_weight=torch.tensor([1.0, 0.3], dtype=torch.float64).expand(len(second_B), 2),
        token_rewards=scores * (ends & mask),
        step_ends=ends & mask,
        turn_ends=turn_ends & mask,
        truncated=torch.tensor([True, False] * 5),
        old_values=old_values,
    )
    top_4 = torch.Generator().manual_seed(200 + seed)
    by_teacher, by_student = (
        torch.randn(*shape, 4, generator=top_4, dtype=torch.float64).log_softmax(-1) - 0.1 for _ in range(2)
    )
    batch = replace(batch, teacher_top_k_logprobs=by_teacher)
    values = (old_values + moved).requires_grad_()
    return replace(outputs, values=values, top_k_logprobs=by_student.requires_grad_()), batch


def scale_of(batch: Batch) -> LossScale:
    """The sizes of a whole optimizer batch whose longest allowed completion is 6 tokens."""
    return LossScale(num_tokens=int(batch.loss_mask.sum()), num_sequences=len(batch.rewards), max_completion_tokens=6)


def rows_of(whole: Any, index: Tensor) -> Any:
    """Some rows of a batch or of outputs, as a micro-batch holds them. Outputs become fresh leaves."""
    picked = {f.name: getattr(whole, f.name) for f in fields(whole)}
    picked = {name: None if value is None else value[index] for name, value in picked.items()}
    if isinstance(whole, Outputs):
        picked = {k: None if v is None else v.detach().clone().requires_grad_() for k, v in picked.items()}
    return replace(whole, **picked)


def loss_of(algorithm: Any, outputs: Outputs, batch: Batch, scale: LossScale) -> tuple[Any, tuple[Tensor, ...]]:
    """The loss, and its gradients in log-probs, entropy and values (0 where one isn't used)."""
    loss = algorithm.loss(outputs, batch, scale)
    inputs = [x for x in (outputs.logprobs, outputs.entropy, outputs.values) if x is not None]
    return loss, torch.autograd.grad(loss.total, inputs, allow_unused=True, materialize_grads=True)


def exact(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(value: Any, expected: Any, tol: float = 1e-12) -> None:
    """Asserts equality up to rounding in float64."""
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64), rtol=tol, atol=tol)
