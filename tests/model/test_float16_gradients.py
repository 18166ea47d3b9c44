"""In float16 the gradients of a loss over many tokens do not underflow, and reach the optimizer as they are."""

from __future__ import annotations

from dataclasses import replace

import half_model
import pytest
import torch
from slow_cases import slow_but

from rlft.config.model import CriticKind
from rlft.model.critic import CRITIC
from rlft.model.roles import POLICY

model_config, backbone = half_model.model_config, half_model.backbone


@pytest.fixture
def gradients(random_model, make_roles, backbone, awkward_batch):
    """The gradients of policy and critic, as one vector, for a loss that is a mean over so many tokens."""

    def compute(dtype: torch.dtype, num_tokens: float, kind: CriticKind, layout: str) -> torch.Tensor:
        model = random_model("qwen2", dtype=dtype)
        roles = make_roles(noise=0.05, backbone=replace(backbone, model=model), kind=kind)
        if layout == "padded":
            roles.forward = replace(roles.forward, packed=False)
        weights = torch.randn(awkward_batch.loss_mask.shape, generator=torch.Generator().manual_seed(0))
        with roles.training():
            outputs = roles.outputs(awkward_batch, entropy=True)
            losses = [outputs.logprobs, outputs.entropy]
            if kind is CriticKind.shared:
                losses.append(outputs.values)
            (sum((loss * weights).sum() for loss in losses) / num_tokens).backward()
        if kind is CriticKind.adapter:
            with roles.learning(CRITIC):
                ((roles.values(awkward_batch) * weights).sum() / num_tokens).backward()
        named = roles.named_parameters(POLICY) + (roles.named_parameters(CRITIC) if kind is not CriticKind.none else [])
        found = torch.cat([p.grad.flatten() for _, p in named if p.grad is not None]) * num_tokens
        roles.close()
        return found

    return compute


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", slow_but(CriticKind.adapter, CriticKind))
def test_a_loss_over_many_tokens_has_the_gradient_of_a_loss_over_few(kind, layout, gradients) -> None:
    exact = gradients(torch.float32, 1.0, kind, layout)
    few, many = (gradients(torch.float16, tokens, kind, layout) for tokens in (2.0**4, 2.0**18))
    # A float16 result is rounded by 2^-11 of itself, and a gradient here passes some 50 of them.
    assert (few - exact).norm() <= 50 * 2**-11 * exact.norm()
    assert (many - exact).norm() <= 50 * 2**-11 * exact.norm()
    assert ((many == 0) & (exact != 0)).float().mean() <= 0.01


def test_other_dtypes_have_no_scale(gradients) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        one, other = (gradients(dtype, tokens, CriticKind.none, "packed") for tokens in (1.0, 2.0**18))
        assert torch.equal(one, other)
