"""Completions of several turns: what an environment put between the sampled tokens is no part of any formula."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
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


@each("extra", [{}, ALL_TERMS], ids=["as it is", "all terms"])
@each("name", NAMES)
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


# -- by hand -----------------------------------------------------------------------------------------------------------
# Two siblings. The first: a token, an answer of two tokens, a token, an answer of one, a token. The second: a token, an
# answer of one, a token. Everything has log-prob -1 by everybody; what stands in the answers is no number.
MASK = torch.tensor([[0, 1, 0, 0, 1, 0, 1], [0, 1, 0, 1, 0, 0, 0]], dtype=torch.bool)
ENDS = torch.tensor([[0, 1, 0, 0, 1, 0, 1], [0, 1, 0, 1, 0, 0, 0]], dtype=torch.bool)


def two_siblings(turn_rewards, rewards=(0.0, 0.0), logprob=-1.0):
    """(outputs, batch); turn_rewards: of each sampled token, row after row."""

    def at_tokens(values):
        return torch.full(MASK.shape, nan, dtype=torch.float64).masked_scatter(MASK, values)

    minus_one = at_tokens(torch.full((5,), -1.0, dtype=torch.float64))
    batch = Batch(
        token_ids=torch.ones(MASK.shape, dtype=torch.int64),
        attention_mask=torch.ones_like(MASK),
        loss_mask=MASK,
        sampled_logprobs=minus_one,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor([3, 3]),
        old_logprobs=minus_one,
        reference_logprobs=minus_one,
        token_rewards=at_tokens(torch.tensor(turn_rewards, dtype=torch.float64)),
        step_ends=ENDS,
    )
    logprobs = at_tokens(torch.full((5,), logprob, dtype=torch.float64)).requires_grad_()
    return Outputs(logprobs=logprobs), batch


def sampled(values):
    return values[MASK].tolist()


def test_grpo_process_by_hand(make):
    # Turn rewards 1, 2, 3 | 0, 4: mean 2, squares 1 + 0 + 1 + 4 + 4 = 10, variance 10 / 4 (n - 1), deviation s.
    s = (10 / 4) ** 0.5
    _, batch = two_siblings([1, 2, 3, 0, 4])
    credited = make("grpo_process", eps=0.0, std="sample").credit(batch)
    # z: -1, 0, 1 | -2, 2, each over s; a token has those of its own turn and of later ones.
    assert sampled(credited.advantages) == pytest.approx([0, 1 / s, 1 / s, 0, 2 / s], abs=1e-15)


def test_reinforce_by_hand(make):
    # To go, gamma 1/2 a sampled token: 3; 2 + 3/2 = 3.5; 1 + 3.5/2 = 2.75 | 4; 0 + 4/2 = 2. Answers discount nothing.
    _, batch = two_siblings([1, 2, 3, 0, 4])
    credited = make("reinforce", gamma=0.5).credit(batch)
    assert sampled(credited.advantages) == [2.75, 3.5, 3.0, 2.0, 4.0]


def test_ppo_by_hand(make):
    # gamma = lam = 1/2, V = 1 everywhere. d: 1 + 1/2 - 1 = 1/2; 2 - 1/2 = 3/2; 3 - 1 = 2 | 0 - 1/2 = -1/2; 4 - 1 = 3.
    # A, with 1/4 a token: 2; 3/2 + 2/4 = 2; 1/2 + 2/4 = 1 | 3; -1/2 + 3/4 = 1/4. Returns: A + 1.
    _, batch = two_siblings([1, 2, 3, 0, 4])
    batch = replace(batch, old_values=torch.full(MASK.shape, nan, dtype=torch.float64).masked_fill(MASK, 1.0))
    credited = make("ppo", gamma=0.5, lam=0.5, whiten=False).credit(batch)
    assert sampled(credited.advantages) == [1.0, 2.0, 2.0, 0.25, 3.0]
    assert sampled(credited.returns) == [2.0, 3.0, 3.0, 1.25, 4.0]


@each(
    ("how", "weights"),
    [
        ("token_mean", [1 / 5] * 5),  # five tokens were sampled, of fourteen
        ("sequence_mean_token_mean", [1 / 6] * 3 + [1 / 4] * 2),  # each of two rows half, over its 3 and 2 tokens
        ("sequence_mean_token_sum", [1 / 2] * 5),
        ("constant", [1 / 12] * 5),  # 2 rows of at most 6 tokens
    ],
)
def test_a_length_is_the_number_of_sampled_tokens(make, scale_of, loss_of, close, how, weights):
    outputs, batch = two_siblings([0] * 5, rewards=(1.0, 0.0))
    algorithm = make("grpo", aggregate=how, std="none", surrogate="policy_gradient")
    batch = algorithm.credit(replace(batch, token_rewards=None, step_ends=None))
    assert sampled(batch.advantages) == [0.5, 0.5, 0.5, -0.5, -0.5]
    _, (gradient,) = loss_of(algorithm, outputs, batch, scale_of(batch))
    close(gradient[MASK], [-w * a for w, a in zip(weights, sampled(batch.advantages), strict=True)])
    assert (gradient[~MASK] == 0).all()


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_kl_by_hand(make, scale_of, loss_of, close, kl_in):
    # lp - lp_ref = 0.2 at each of the five sampled tokens, k1.
    outputs, batch = two_siblings([0] * 5, logprob=-0.8)
    batch = replace(batch, token_rewards=None, step_ends=None, old_logprobs=outputs.logprobs.detach())
    algorithm = make("grpo", kl_coef=0.5, kl_in=kl_in, kl_estimator="k1", std="none", aggregate="token_mean")
    credited = algorithm.credit(batch)
    if kl_in == "reward":  # the scores are -0.5 x 0.2 x 3 tokens and x 2: their mean is -0.25
        assert sampled(credited.advantages) == pytest.approx([-0.05] * 3 + [0.05] * 2, abs=1e-15)
    else:
        loss, _ = loss_of(algorithm, outputs, credited, scale_of(batch))
        close(loss.metrics["loss/kl"], 0.5 * 0.2)


def test_gspos_ratio_is_the_mean_over_sampled_tokens(make, scale_of, loss_of, close):
    # lp - lp_old = 0.3, 0.6, 0 | 0, 0: s = exp(0.3), 1. Advantages 1/2 and -1/2.
    outputs, batch = two_siblings([0] * 5, rewards=(1.0, 0.0))
    moved = torch.tensor([-0.7, -0.4, -1, -1, -1], dtype=torch.float64)
    outputs = Outputs(logprobs=outputs.logprobs.detach().masked_scatter(MASK, moved).requires_grad_())
    algorithm = make("gspo", std="none", clip_low=0.9, clip_high=0.9)
    batch = algorithm.credit(replace(batch, token_rewards=None, step_ends=None))
    loss, (gradient,) = loss_of(algorithm, outputs, batch, scale_of(batch))
    s = torch.tensor(0.3, dtype=torch.float64).exp()
    close(loss.metrics["loss/policy"], -(0.5 * s - 0.5) / 2)  # mean over two rows of the mean over their tokens
    close(gradient[MASK], [-0.5 * s / 3 / 2] * 3 + [0.5 / 2 / 2] * 2)


def test_kimis_square_is_of_the_sampled_tokens_log_ratio(make, scale_of, loss_of, close):
    # L = sum_t(lp - lp_old) = 0.9 in the first row. Its loss: -A sum(lp) + tau / 2 L^2 with tau = 1; advantages +-1/2.
    outputs, batch = two_siblings([0] * 5, rewards=(1.0, 0.0))
    moved = torch.tensor([-0.7, -0.4, -1, -1, -1], dtype=torch.float64)
    outputs = Outputs(logprobs=outputs.logprobs.detach().masked_scatter(MASK, moved).requires_grad_())
    algorithm = make("kimi", tau=1.0)
    batch = algorithm.credit(replace(batch, token_rewards=None, step_ends=None))
    assert sampled(batch.advantages) == pytest.approx([0.5, 0.5, 0.5, -0.5, -0.5])
    loss, (gradient,) = loss_of(algorithm, outputs, batch, scale_of(batch))
    close(loss.metrics["loss/policy"], (0.5 * 2.1 + 0.5 * 0.9**2 - 0.5 * 2.0) / 2)
    close(gradient[MASK], [(-0.5 + 0.9) / 2] * 3 + [0.5 / 2] * 2)
