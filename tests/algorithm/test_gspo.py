import math
from dataclasses import replace

import torch

from rlft.types import Outputs


def loss_at(algorithm, batch, scale, moved):
    outputs = Outputs(logprobs=(batch.old_logprobs + torch.tensor(moved, dtype=torch.float64)).requires_grad_())
    loss = algorithm.loss(outputs, batch, scale)
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    return loss, gradient


def test_gspo_ratio_is_constant_within_a_sequence(make, hand_batch, scale_of):
    # Log-ratios 1e-4 and 3e-4: s = exp(2e-4), inside the range. Loss -s A; gradient -s A / 2 on both tokens alike.
    batch = hand_batch([2], [0], [0], advantages=[3])
    loss, gradient = loss_at(make("gspo"), batch, scale_of(batch), [[9, 1e-4, 3e-4, 9]])
    s = math.exp(2e-4)
    expected = torch.tensor([[0, -1.5 * s, -1.5 * s, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert abs(loss.total.item() + 3 * s) < 1e-12


def test_gspo_clips_whole_sequences_at_its_own_small_range(make, hand_batch, scale_of):
    # Row 0: mean log-ratio 5e-4, A > 0: s = 1.0005 > 1.0004, clipped, though one of its tokens did not move at all.
    # Row 1: mean -4e-4, A < 0: s = 0.9996 < 0.9997, clipped. Row 2: mean 5e-4, A < 0: not clipped.
    batch = hand_batch([2, 2, 1], [0, 0, 0], [0, 0, 0], advantages=[1, -1, -1])
    moved = [[0, 0, 1e-3, 0], [0, -4e-4, -4e-4, 0], [0, 5e-4, 0, 0]]
    loss, gradient = loss_at(make("gspo"), batch, scale_of(batch), moved)
    assert abs(loss.total.item() - (-1.0004 + 0.9997 + math.exp(5e-4)) / 3) < 1e-12
    assert (gradient[:2] == 0).all()
    assert abs(gradient[2, 1].item() - math.exp(5e-4) / 3) < 1e-12
    assert abs(loss.metrics["ratio/clip_high_fraction"].item() - 2 / 5) < 1e-12
    assert abs(loss.metrics["ratio/clip_low_fraction"].item() - 2 / 5) < 1e-12


def test_gspo_differs_from_grpo_in_three_keys_only(make):
    assert make("gspo") == make("grpo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


def test_gspo_token_agrees_with_gspo_where_a_completion_has_one_advantage(make, full_step, scale_of, loss_of, close):
    outputs, batch = full_step()
    batch = make("gspo").credit(batch)
    sequence, (gradient, *_) = loss_of(make("gspo"), outputs, batch, scale_of(batch))
    token, (gradient_of_token, *_) = loss_of(make("gspo_token"), outputs, batch, scale_of(batch))
    close(token.total.detach(), sequence.total.detach())
    close(gradient_of_token, gradient)


def test_gspo_token_gives_each_token_its_own_advantage_where_they_vary(make, hand_batch, scale_of, close):
    # Log-ratios 1e-4 and 3e-4: s = exp(2e-4) for both tokens, inside the range; A = 3 and -1. The loss is
    # -s (3 - 1) / 2 = -s either way. By token the gradients are -s 3/2 and s/2; one ratio for both tokens gives each
    # the mean advantage 1 times the mean's derivative, -s 1/2 and -s 1/2.
    batch = hand_batch([2], [0], [0])
    advantages = torch.tensor([[0, 3, -1, 0]], dtype=torch.float64)
    batch, s = replace(batch, advantages=advantages), math.exp(2e-4)
    moved = [[9, 1e-4, 3e-4, 9]]
    loss, gradient = loss_at(make("gspo_token"), batch, scale_of(batch), moved)
    close(loss.total.detach(), -s)
    close(gradient, [[0, -1.5 * s, 0.5 * s, 0]])
    loss, gradient = loss_at(make("gspo"), batch, scale_of(batch), moved)
    close(loss.total.detach(), -s)
    close(gradient, [[0, -0.5 * s, -0.5 * s, 0]])


def test_gspo_token_differs_from_gspo_in_one_key_only(make):
    assert make("gspo_token") == make("gspo", ratio="sequence_token")


def test_a_clip_of_grpos_size_is_warned_of(make):
    assert make("gspo").warnings == make("grpo").warnings == ()
    assert make("grpo", ratio="sequence").warnings == (
        "algorithm.clip_low: 0.2 never binds with algorithm.ratio=sequence, whose ratio is normalised by length; "
        "the paper's are clip_low=3e-4 clip_high=4e-4",
        "algorithm.clip_high: 0.2 never binds with algorithm.ratio=sequence, whose ratio is normalised by length; "
        "the paper's are clip_low=3e-4 clip_high=4e-4",
    )
    (only,) = make("gspo_token", clip_high=0.28).warnings
    assert only.startswith("algorithm.clip_high: 0.28 never binds with algorithm.ratio=sequence_token")
    assert make("grpo", ratio="sequence", surrogate="importance").warnings == ()  # which has no clip


def test_luspo_is_gspo_with_its_token_sum(make, hand_batch, scale_of, close):
    # LUSPO (arXiv 2602.05261): each completion's clipped s A times its length. Mean log-ratio 0.1 of two tokens, A = 1,
    # clipped at 1.0025; -0.1 of three, A = 2, s = exp(-0.1); -0.1 of one, A = -1, clipped at 0.998.
    batch = hand_batch([2, 3, 1], [0, 0, 0], [0, 0, 0], advantages=[1, 2, -1])
    moved = torch.tensor([[9, 0.3, -0.1, 9, 9], [9, 0.1, -0.3, -0.1, 9], [9, -0.1, 9, 9, 9]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + moved).requires_grad_())
    luspo = make("gspo", aggregate="sequence_mean_token_sum", clip_low=2e-3, clip_high=2.5e-3)
    loss = luspo.loss(outputs, batch, scale_of(batch)).total.detach()
    close(loss, -(2 * 1.0025 + 3 * 2 * math.exp(-0.1) - 0.998) / 3)
