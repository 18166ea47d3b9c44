"""Roundings: one more in each layer moves log-probs by so much, and none in float16 loses a gradient."""

from dataclasses import replace

import pytest
import torch
from slow_cases import slow_but

from rlft.config.model import CriticKind
from rlft.model.backbone import load_backbone
from rlft.model.critic import CRITIC
from rlft.model.networks import rounded_once_more
from rlft.model.roles import POLICY

SEQUENCES = [[5, 6, 7, 8, 9, 12, 40], [9, 10, 11, 77]]


def test_each_layers_output_is_off_by_up_to_half_a_unit_in_the_last_place(make_roles):
    model = make_roles().backbone.model
    layer, seen = model.model.layers[0], []
    ids = torch.tensor([SEQUENCES[0]])
    # transformers leaves one where hidden states were read
    hooks = [list(layer._forward_hooks) for layer in model.model.layers]

    def computed():
        keep = layer.register_forward_hook(lambda module, args, output: seen.append(output))
        with torch.no_grad():
            model(ids)
        keep.remove()
        return seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]

    exact = computed()
    with rounded_once_more(model):
        off = computed()
    assert torch.equal(computed(), exact)
    errors = ((off - exact) / exact).abs() / torch.finfo(torch.bfloat16).eps
    assert 0.49 < errors.max() < 0.501
    assert (errors > 0.25).float().mean() == pytest.approx(0.5, abs=0.1)
    assert [list(layer._forward_hooks) for layer in model.model.layers] == hooks


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 1e-4, 0.1), ("bfloat16", 1e-4, 0.1), ("float16", 1e-5, 0.02)]
)
def test_log_probs_move_by_roundings_to_16_bits_and_the_same_each_time(make_roles, model_config, dtype, least, most):
    roles = make_roles(backbone=load_backbone.__wrapped__(model_config(dtype=dtype)), noise=0.02)
    exact, rounded, again = (roles.score(SEQUENCES, rounded=rounded) for rounded in (False, True, True))
    assert rounded == again
    gaps = torch.cat([torch.tensor(x) - torch.tensor(y) for x, y in zip(rounded, exact, strict=True)]).abs()
    assert least < gaps.mean() < most
    assert roles.score(SEQUENCES) == exact


# -- float16: gradients of a loss over many tokens do not underflow, and reach the optimizer as they are ---------------
@pytest.fixture
def gradients(random_model, make_roles, backbone, awkward_batch):
    """The gradients of policy and critic, as one vector, for a loss that is a mean over so many tokens."""

    def compute(dtype, num_tokens, kind, layout):
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
        return torch.cat([p.grad.flatten() for _, p in named if p.grad is not None]) * num_tokens

    return compute


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", slow_but(CriticKind.adapter, CriticKind))
def test_a_loss_over_many_tokens_has_the_gradient_of_a_loss_over_few(kind, layout, gradients):
    exact = gradients(torch.float32, 1.0, kind, layout)
    few, many = (gradients(torch.float16, tokens, kind, layout) for tokens in (2.0**4, 2.0**18))
    # A float16 result is rounded by 2^-11 of itself, and a gradient here passes some 50 of them.
    assert (few - exact).norm() <= 50 * 2**-11 * exact.norm()
    assert (many - exact).norm() <= 50 * 2**-11 * exact.norm()
    assert ((many == 0) & (exact != 0)).float().mean() <= 0.01


def test_other_dtypes_have_no_scale(gradients):
    for dtype in (torch.float32, torch.bfloat16):
        one, other = (gradients(dtype, tokens, CriticKind.none, "packed") for tokens in (1.0, 2.0**18))
        assert torch.equal(one, other)
