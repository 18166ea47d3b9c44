"""Room for keys and values that stays where it is, and what is left of it where there is no memory for more."""

import pytest
import torch

from rlft.model.kernels.fixed_keys import FixedKeys


class Scarce(torch.Tensor):
    """Keys of which no room can be made."""

    def new_empty(self, *size, **kwargs):
        raise torch.OutOfMemoryError("none")


def keys_of(tokens):
    return [(torch.ones(tokens, 2, 4), torch.ones(tokens, 2, 4)) for _ in range(3)]


def places(keys):
    return [x.data_ptr() for x in keys.tensors]


def test_room_stays_where_it_is_until_more_is_needed():
    keys = FixedKeys()
    keys.fit(8, 16, 2, keys_of(80))
    assert keys.sizes == (8, 16, 2, 80)
    before = places(keys)
    keys.fit(4, 12, 1, keys_of(70))
    assert places(keys) == before
    for more in ((9, 16, 2, 80), (9, 17, 2, 80), (9, 17, 3, 80), (9, 17, 3, 200)):
        before, sizes = places(keys), keys.sizes
        keys.fit(*more[:3], keys_of(more[3]))
        assert places(keys) != before
        assert all(has >= had for has, had in zip(keys.sizes, sizes, strict=True))
        assert keys.own[0][0].shape == (keys.rows, keys.tokens, 2, 4)


@pytest.mark.parametrize("scarce", range(6))
def test_without_memory_for_more_there_is_no_room_at_all_and_the_next_batch_makes_its_own(scarce):
    keys = FixedKeys()
    keys.fit(8, 16, 2, keys_of(80))
    pairs = [list(pair) for pair in keys_of(200)]
    pairs[scarce // 2][scarce % 2] = pairs[scarce // 2][scarce % 2].as_subclass(Scarce)
    with pytest.raises(torch.OutOfMemoryError):
        keys.fit(8, 16, 2, [(k, v) for k, v in pairs])
    assert keys.sizes == (0, 0, 0, 0)
    keys.fit(2, 3, 1, keys_of(5))
    assert keys.sizes == (2, 3, 1, 5)
    assert [x.shape for x in keys.own[2]] == [(2, 3, 2, 4)] * 2
    assert len(keys.own) == len(keys.of_prompts) == 3
