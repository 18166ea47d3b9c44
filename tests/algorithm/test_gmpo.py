import math

import pytest
import torch

from rlft.types import Outputs, UserError


def test_the_loss_is_minus_the_mean_over_completions_of_advantage_times_geometric_mean(
    make, hand_batch, scale_of, close
):
    # A = 2, log-ratios 1 (clipped to 0.4) and -0.2: s = exp(0.1). A = -1, -2 (clipped to -0.4), 0.1, 0.9: s = exp(0.2).
    # Loss (-2 exp(0.1) + exp(0.2)) / 2; a token's gradient is -A s / (2 |o|), 0 where it is clipped.
    batch = hand_batch([2, 3], [0, 0], [0, 0], advantages=[2, -1])
    moved = torch.tensor([[9, 1, -0.2, 9, 9], [9, -2, 0.1, 0.9, 9]], dtype=torch.float64)
    outputs = Outputs(logprobs=(batch.old_logprobs + moved).requires_grad_())
    loss = make("gmpo").loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    good, bad = math.exp(0.1), math.exp(0.2)
    close(loss.total.detach(), (-2 * good + bad) / 2)
    close(gradient, [[0, 0, -2 * good / 4, 0, 0], [0, 0, bad / 6, bad / 6, 0]])
    close(loss.metrics["ratio/clip_high_fraction"], 1 / 5)
    close(loss.metrics["ratio/clip_low_fraction"], 1 / 5)


def test_without_a_clip_that_binds_it_is_gspos_ratio(make, full_step, scale_of, loss_of, close):
    outputs, batch = full_step()
    wide = {"clip_low": 1.0, "clip_high": 9.0}
    batch = make("gmpo").credit(batch)
    outputs = Outputs(logprobs=(batch.old_logprobs + 0.4 * (outputs.logprobs - batch.old_logprobs)).detach())
    outputs.logprobs.requires_grad_()
    mine, (gradient,) = loss_of(make("gmpo", **wide), outputs, batch, scale_of(batch))
    other, (wanted,) = loss_of(make("gspo", surrogate="importance"), outputs, batch, scale_of(batch))
    assert mine.metrics["ratio/clip_low_fraction"] == mine.metrics["ratio/clip_high_fraction"] == 0
    close(mine.total.detach(), other.total.detach())
    close(gradient, wanted)


def test_gmpo_differs_from_grpo_in_three_keys_only(make):
    assert make("gmpo") == make("grpo", surrogate="gmpo", clip_low=0.4, clip_high=0.4)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_a_ratio_of_completions_is_refused_as_gmpo_makes_its_own(make, level):
    with pytest.raises(UserError, match=rf"^algorithm\.ratio: .*mean itself, got {level}; use algorithm\.ratio=token"):
        make("gmpo", ratio=level)
