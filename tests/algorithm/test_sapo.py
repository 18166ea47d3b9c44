import math

import torch

from rlft.types import Outputs


def test_the_loss_is_the_mean_over_completions_of_the_gated_advantages(make, hand_batch, scale_of, close):
    # A = 2, tau 1: r - 1 = ln 3 and 0, gates 4 * 3/4 and 4 * 1/2. A = -1, tau 1.05: 1.05 (r - 1) = ln 3, gate 3 / 1.05.
    # Loss (-2 (3 + 2) / 2 + 3 / 1.05) / 2. A token's gradient: -A 4 p (1 - p) r / (2 |o|), with p = 3/4, 1/2, 3/4.
    batch = hand_batch([2, 1], [0, 0], [0, 0], advantages=[2, -1])
    good, bad = 1 + math.log(3), 1 + math.log(3) / 1.05
    r = torch.tensor([[1, good, 1, 1], [1, bad, 1, 1]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + r.log()).requires_grad_())
    loss = make("sapo").loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    close(loss.total.detach(), (-2 * (3 + 2) / 2 + 3 / 1.05) / 2)
    close(gradient, [[0, -2 * 0.75 * good / 4, -2 / 4, 0], [0, 0.75 * bad / 2, 0, 0]])
    assert loss.metrics["ratio/clip_low_fraction"] == loss.metrics["ratio/clip_high_fraction"] == 0


def test_no_token_is_cut_off_where_grpos_clip_has_let_go_of_it(make, hand_batch, scale_of):
    batch = hand_batch([1, 1], [0, 0], [0, 0], advantages=[1, -1])
    outputs = Outputs(logprobs=(batch.old_logprobs + torch.tensor([[0.5], [-0.5]])).requires_grad_())
    gradients = {
        name: torch.autograd.grad(make(name).loss(outputs, batch, scale_of(batch)).total, outputs.logprobs)[0][:, 1]
        for name in ("grpo", "sapo")
    }
    assert gradients["grpo"].tolist() == [0, 0]
    assert gradients["sapo"][0] < 0 < gradients["sapo"][1]


def test_sapo_differs_from_grpo_in_the_surrogate_only(make):
    assert make("sapo") == make("grpo", surrogate="sapo", tau_positive=1.0, tau_negative=1.05)
