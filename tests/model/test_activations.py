"""What a forward keeps for its backward: counted from the config, and found in the autograd graph."""

from __future__ import annotations

import pytest
import torch

from rlft.model.activations import activation_bytes


def test_the_count_is_what_the_packed_forward_keeps(make_roles, make_batch):
    roles = make_roles()
    dice = torch.Generator().manual_seed(0)
    rows = [
        (g, [g + 1] * 20, torch.randint(1, 200, (60,), generator=dice).tolist()) for g in range(4) for _ in range(4)
    ]
    batch, storages = make_batch(rows), {}
    weights = {p.untyped_storage().data_ptr() for p in roles.model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = roles.outputs(batch, False)
    assert outputs.logprobs.requires_grad
    tokens = 4 * 20 + 16 * 60
    counted = activation_bytes(roles.backbone.model.config, tokens, 4)
    assert counted == pytest.approx(sum(storages.values()), rel=0.04)
