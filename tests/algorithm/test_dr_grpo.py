import torch

from rlft.types import Outputs


def test_dr_grpo_only_centres_and_divides_by_a_constant_length(make, hand_batch, scale_of):
    # Rewards 0 and 1: advantages -1/2 and 1/2. At the old policy each token's gradient is -A / (2 sequences * 6
    # tokens), the same for the long and the short completion.
    batch = make("dr_grpo").credit(hand_batch([3, 1], [0, 1], [0, 0]))
    assert batch.advantages.tolist() == [[0, -0.5, -0.5, -0.5, 0], [0, 0.5, 0, 0, 0]]
    outputs = Outputs(logprobs=batch.old_logprobs.clone().requires_grad_())
    loss = make("dr_grpo").loss(outputs, batch, scale_of(batch))
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    torch.testing.assert_close(gradient, -batch.advantages / 12, rtol=1e-12, atol=1e-12)


def test_dr_grpo_differs_from_grpo_in_two_keys_only(make):
    assert make("dr_grpo") == make("grpo", std="none", aggregate="constant")
