"""The flash attention of packed rows on a GPU, in bfloat16, against attention through a mask in float64."""

import pytest
import torch
from dense_attention import masked

from rlft.batch import to_device
from rlft.model.kernels import flash_attention
from rlft.model.kernels.attention import RowAttention
from rlft.model.kernels.split_attention import Scoring
from rlft.model.packing import pack

SCALE = 0.3


@pytest.mark.parametrize(("heads", "key_heads", "head_size"), [(4, 2, 64), (14, 2, 64), (12, 2, 128), (8, 1, 96)])
@pytest.mark.parametrize(("prompt", "completion", "group"), [(7, 5, 3), (256, 128, 4), (64, 300, 2)])
def test_outputs_and_gradients_are_off_by_roundings_alone(
    heads, key_heads, head_size, prompt, completion, group, make_batch, gpu
):
    """Each number is rounded by two calls and once merged, by half of 2^-7 of the largest one."""
    rows = [
        (unit, range(1, prompt + unit + 1), range(1, completion + i)) for unit in (0, 1) for i in range(1, group + 1)
    ]
    packed = pack(to_device(make_batch(rows), gpu), prompts_first=True)
    dice = torch.Generator().manual_seed(0)
    shapes = [(packed.num_tokens, number, head_size) for number in (heads, key_heads, key_heads)]
    made = [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes]
    tensors = [x.to(gpu, torch.bfloat16).requires_grad_() for x in made]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    assert packed.lengths() is not None
    assert flash_attention.takes(torch.bfloat16, head_size, gpu)
    ours = RowAttention.apply(*tensors, None, packed.lengths(), Scoring(SCALE))
    theirs = masked(exact[0], exact[1], exact[2], packed, SCALE)
    weight = torch.randn(ours.shape, generator=dice, dtype=torch.float64).to(gpu)
    mine = torch.autograd.grad((ours * weight.bfloat16()).sum(), tensors)
    its = torch.autograd.grad((theirs * weight.bfloat16().double()).sum(), exact)
    for one, other in zip((ours, *mine), (theirs, *its), strict=True):
        assert (one.double() - other).abs().max() <= 3 * 2**-8 * max(1.0, other.abs().max().item())
