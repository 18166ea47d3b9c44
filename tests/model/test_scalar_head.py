"""One number from a hidden state."""

from __future__ import annotations

import torch
from in_one_test import each

from rlft.model.critic import ScalarHead

CPU = torch.device("cpu")


def test_a_fresh_head_says_0_whatever_it_sees():
    head = ScalarHead(3, CPU, torch.float64)
    assert (head(torch.randn(5, 2, 3, dtype=torch.float64)) == 0).all()


def test_a_head_is_a_weighted_sum_plus_a_bias_and_keeps_the_leading_shape():
    head = ScalarHead(2, CPU, torch.float64)
    head.restore({"weight": torch.tensor([[2.0, -3.0]]), "bias": torch.tensor([0.5])})
    hidden = torch.tensor([[[1.0, 1.0], [0.0, 2.0], [-1.0, 0.25]]], dtype=torch.float64)
    # 2 - 3 + 0.5; -6 + 0.5; -2 - 0.75 + 0.5.
    assert head(hidden).tolist() == [[-0.5, -5.5, -2.25]]


@each(
    ("base", "head"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_head_is_at_least_float32_whatever_the_base_is(base, head):
    made = ScalarHead(2, CPU, base)
    assert {p.dtype for p in made.parameters()} == {head}
    assert made(torch.ones(4, 2, dtype=base)).dtype == head


def test_a_16_bit_hidden_state_is_read_in_float32():
    # 1 + 2^-12 times 256 is 256 + 2^-4, which bfloat16 (8 bits) would round to 256.
    head = ScalarHead(1, CPU, torch.bfloat16)
    head.restore({"weight": torch.tensor([[1 + 2**-12]]), "bias": torch.tensor([0.0])})
    assert head(torch.tensor([[256.0]], dtype=torch.bfloat16)).item() == 256 + 2**-4


def test_the_gradient_is_the_hidden_state_and_1_and_goes_on_as_the_weight():
    head = ScalarHead(2, CPU, torch.float64)
    head.restore({"weight": torch.tensor([[2.0, -3.0]]), "bias": torch.tensor([0.5])})
    hidden = torch.tensor([[0.25, 4.0]], dtype=torch.float64, requires_grad=True)
    head(hidden).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert head.bias.grad is not None
    assert (hidden.grad.tolist(), head.weight.grad.tolist(), head.bias.grad.tolist()) == (
        [[2.0, -3.0]],
        [[0.25, 4.0]],
        [1.0],
    )


def test_weights_are_copies_and_come_back_exactly():
    head = ScalarHead(3, CPU, torch.float32)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.1, 0.2, 0.3]]))
        head.bias.fill_(0.7)
    kept = head.weights()
    before = {name: tensor.clone() for name, tensor in kept.items()}
    with torch.no_grad():
        head.weight.add_(1)
    assert not any(tensor.requires_grad for tensor in kept.values())
    assert all(torch.equal(kept[name], before[name]) for name in before)
    parameters = {name: id(p) for name, p in head.named_parameters()}
    head.restore(kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.weights().items())
    assert {name: id(p) for name, p in head.named_parameters()} == parameters  # an optimizer holds on to them
