"""Completions of several turns: what an environment put between the sampled tokens is no part of any formula."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from in_one_test import each

from rlft.config import catalog
from rlft.types import Batch, Outputs

NAMES = catalog.choices("algorithm")
ALL_TERMS = {"kl_coef": 0.1, "entropy_coef": 0.02, "mismatch": "token_mask", "off_policy_limit": 0.3}
nan, inf = float("nan"), float("inf")


def wide(values, mask, holes, junk):
    """`[B, T]` with `holes[b, t]` columns put in before token t, filled with junk; padded on the right alike."""
    width = mask.shape[1] + int(holes.sum(1).max())
    rows = torch.full((len(mask), width), junk, dtype=values.dtype)
    position = torch.arange(mask.shape[1]) + holes.cumsum(1)
    return rows.scatter(1, position, values), position


def with_holes(outputs, batch, seed):
    """The same tokens with an environment's between them; its log-probs, values and rewards are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch.loss_mask
    holes = torch.randint(0, 3, mask.shape, generator=generator) * mask.cumsum(1).bool()
    more = {}
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if value is not None and value.shape == mask.shape:
            junk = {torch.bool: False, torch.int64: 7}.get(value.dtype, nan)
            more[field.name], position = wide(value, mask, holes, junk)
    more["attention_mask"] = torch.ones_like(more["loss_mask"])
    return replace(batch, **more), position


def widened(outputs, position, width):
    """The outputs as they stand there; junk between them, which gets no gradient."""

    def put(values, junk):
        rows = torch.full((len(values), width), junk, dtype=values.dtype)
        return rows.scatter(1, position, values.detach()).requires_grad_()

    return Outputs(
        logprobs=put(outputs.logprobs, inf), entropy=put(outputs.entropy, nan), values=put(outputs.values, -inf)
    )


CASES = [(name, extra) for name in NAMES for extra in ({}, ALL_TERMS)]
CASES += [(name, {"credit_span": "turn"}) for name in ("grpo_process", "ppo", "a2c")]


@each(("name", "extra"), CASES)
def test_holes_change_no_advantage_no_loss_no_metric_and_no_gradient(
    make, full_step, scale_of, loss_of, close, name, extra
):
    refused = ("mismatch", "off_policy_limit") if name == "kimi" else ()
    keys = {key: value for key, value in extra.items() if key not in refused}
    if extra and name in ("gspo", "gmpo"):  # which refuse the weights of single tokens
        keys["mismatch"] = "sequence_mask"
    algorithm = make(name, **keys)
    outputs, batch = full_step()
    holed, position = with_holes(outputs, batch, seed=1)
    assert (holed.loss_mask.int().diff(dim=1) == 1).sum() > len(holed.loss_mask), "some rows have several turns"
    there = widened(outputs, position, holed.loss_mask.shape[1])

    assert torch.equal(algorithm.zero_gradient_rows(holed), algorithm.zero_gradient_rows(batch))
    holed, batch = algorithm.credit(holed), algorithm.credit(batch)
    scale = scale_of(batch)
    assert scale_of(holed) == scale
    close(holed.advantages.gather(1, position)[batch.loss_mask], batch.advantages[batch.loss_mask])
    assert (holed.advantages[~holed.loss_mask] == 0).all()
    loss, gradients = loss_of(algorithm, outputs, batch, scale)
    same, there_gradients = loss_of(algorithm, there, holed, scale)
    close(same.total, loss.total)
    assert same.metrics.keys() == loss.metrics.keys()
    for metric, value in loss.metrics.items():
        close(same.metrics[metric], value.double())
    for found, gradient in zip(there_gradients, gradients, strict=True):
        close(found.gather(1, position)[batch.loss_mask], gradient[batch.loss_mask])
        assert (found[~holed.loss_mask] == 0).all(), "exactly"
