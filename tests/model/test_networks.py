"""One more rounding in each layer: the size of what it does to log-probs."""

from __future__ import annotations

import pytest
import torch

from rlft.model.backbone import load_backbone
from rlft.model.networks import rounded_once_more

SEQUENCES = [[5, 6, 7, 8, 9, 12, 40], [9, 10, 11, 77]]


def gaps(one, other) -> torch.Tensor:
    return torch.tensor(
        [abs(x - y) for row, also in zip(one, other, strict=True) for x, y in zip(row, also, strict=True)]
    )


def test_each_layers_output_is_off_by_up_to_half_a_unit_in_the_last_place(make_roles):
    model = make_roles().backbone.model
    layer, seen = model.model.layers[0], []
    ids = torch.tensor([SEQUENCES[0]])
    hooks = [
        list(layer._forward_hooks) for layer in model.model.layers
    ]  # transformers leaves one where hidden states were read

    def computed() -> torch.Tensor:
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
    assert least < gaps(rounded, exact).mean() < most
    assert roles.score(SEQUENCES) == exact
