"""Keys say when they act (`Key.acts`): perturbed, exactly those that `without_effect` names change no gradient."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlft.algorithm.ops.surrogate import Mismatch
from rlft.config import catalog
from rlft.config.keys import fields_of, options
from rlft.types import UserError

FAMILIES = ("grpo", "reinforce", "ppo", "kimi", "opd")
NUMBERS: dict[str, tuple[Any, ...]] = {
    "clip_low": (0.02, 0.3), "clip_high": (0.0, 0.6), "dual_clip": (None, 1.7), "kl_tolerance": (1.1, 1.5),
    "kl_target": (None, 0.002, 0.0128, 0.05), "kl_coef": (0.0, 0.3), "gamma": (0.5, 1.0), "lam": (0.5, 0.95),
    "value_lam": (None, 0.4, 1.0), "n_steps": (None, 1, 2), "value_clip": (None, 0.05),
    "off_policy_limit": (None, 0.02), "mismatch_low": (0.05, 0.6), "mismatch_high": (1.2, 4.0),
    "reward_coef": (0.0, 0.5),
}  # fmt: skip
"""Values of keys that are neither words nor switches; of others the value and half of it."""
ELSEWHERE = {"ptx_coef", "top_k"}
"""Keys of what is no part of this loss: pretraining text, and how many of the teacher's tokens are asked for."""


def values_of(field: Any, value: Any) -> tuple[Any, ...]:
    kinds = [kind for kind in options(field.hint) if isinstance(kind, type)]
    words = [kind for kind in kinds if issubclass(kind, Enum)]
    if words:  # auto is another of the words, chosen when a run is planned
        return tuple(word for word in words[0] if word != Mismatch.auto)
    if bool in kinds:
        return False, True
    return NUMBERS.get(field.name) or (value, value / 2 if value else 0.1)


def built(make: Any, name: str, keys: dict[str, Any]) -> Any:
    try:
        return make(name, **keys)
    except (UserError, ValidationError):
        return None


def random_algorithms(make: Any, name: str, number: int) -> Iterator[Any]:
    """The algorithm as it is, then with random values of all of its keys."""
    draws, algorithm = random.Random(name), make(name)
    yield algorithm
    while number:
        choices = {f.name: values_of(f, getattr(algorithm, f.name)) for f in fields_of(type(algorithm))}
        choices["kl_estimator"] = tuple(
            word for word in choices["kl_estimator"] if word != "exact"
        )  # only perturbed to
        drawn = {name: draws.choice(values) for name, values in choices.items()}
        if (other := built(make, name, drawn)) is not None:
            number -= 1
            yield other


@pytest.fixture
def gradients(full_step: Any, scale_of: Any) -> Any:
    """The gradients of a step's loss and of the next one's, whose KL coefficient may have changed, for some batches."""

    def gradients(algorithm: Any, moved: bool) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for seed in range(8):
            outputs, batch = full_step(seed)
            gap = batch.sampled_logprobs - batch.old_logprobs  # from too small for any limit to too large
            batch = replace(batch, sampled_logprobs=batch.old_logprobs + (1.0, 8.0)[seed // 4] * gap)
            distance = (-2.0, 2.0, -0.2, 0.2)[seed % 4] if moved else 0.0
            logprobs = batch.old_logprobs + distance * (outputs.logprobs.detach() - batch.old_logprobs)
            values = batch.old_values + distance * (outputs.values.detach() - batch.old_values)
            outputs = replace(outputs, logprobs=logprobs.requires_grad_(), values=values.requires_grad_())
            other = batch.old_logprobs if algorithm.kl_to == "old" else batch.reference_logprobs
            outputs = replace(outputs, kl=0.7 * (outputs.logprobs - other).square())  # like a KL 0 where both are equal
            batch = replace(batch, reference_kl=(batch.old_logprobs - batch.reference_logprobs).square())
            inputs = outputs.logprobs, outputs.entropy, outputs.values, outputs.top_k_logprobs
            measured = [{"kl/old_last": kl if moved else 0.0, "kl/reference": kl} for kl in (0.0026, 0.0166, 0.065)]
            following = [algorithm, *map(algorithm.adapt, measured)]
            of_each = {}
            for one in set(following):
                total = one.loss(outputs, one.credit(batch), scale_of(batch)).total
                keys = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
                of_each[one] = torch.autograd.grad(total, inputs, **keys)
            found += [gradient for one in following for gradient in of_each[one]]
        return found

    return gradients


@pytest.mark.parametrize("moved", [False, True], ids=["one update", "several updates"])
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_keys_without_effect_change_no_gradient(make, gradients, name, moved):
    for algorithm in random_algorithms(make, name, 4):
        keys = {f.name: getattr(algorithm, f.name) for f in fields_of(type(algorithm))}
        before, silent = gradients(algorithm, moved), set(algorithm.without_effect(moved=moved))
        for field in fields_of(type(algorithm)):
            others = [value for value in values_of(field, keys[field.name]) if value != keys[field.name]]
            perturbed = [one for value in others if (one := built(make, name, {**keys, field.name: value})) is not None]
            are_off = all(not one.mismatch.is_on for one in (algorithm, *perturbed))
            if field.name in ELSEWHERE or not perturbed or (field.name == "mismatch" and are_off):
                continue
            acts = any(
                not torch.allclose(new, old, rtol=1e-9, atol=1e-12)
                for one in perturbed
                for new, old in zip(gradients(one, moved), before, strict=True)
            )
            assert acts == (field.name not in silent), f"{field.name} {others} {keys}"


@pytest.mark.parametrize("name", catalog.choices("algorithm"))
def test_conditions_ask_for_what_is_known(make, name):
    assert {"clip_low", "tau"} & set(make(name).without_effect(moved=False))
