"""What is noted of rows while they are decoded: several tokens of each at a time are those that come one by one."""

import pytest
import torch

from rlft.generation.decoding import Sampled
from rlft.generation.stops import StopStrings

LETTERS = "abcdef"
ENDS = frozenset({5})


def sampled(rows, tokens, limits_R, stop):
    watch = StopStrings(stop, lambda ids: "".join(LETTERS[i] for i in ids), [()] * rows) if stop else None
    return Sampled(torch.Size((rows, tokens)), ENDS, watch, limits_R, None)


@pytest.mark.parametrize("stop", [(), ("ab",), ("cc", "bda")])
@pytest.mark.parametrize("at_once", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_several_tokens_at_a_time_are_those_that_come_one_by_one(stop, at_once, seed):
    """Rows end by a token, a string or their limit, at any place among those that come together."""
    rows, tokens = 24, 21
    random = torch.Generator().manual_seed(seed)
    token_RT = torch.randint(len(LETTERS), (rows, tokens), generator=random)
    logprob_RT = -torch.rand(rows, tokens, generator=random)
    limits_R = torch.randint(1, tokens + 1, (rows,), generator=random)
    single, several = (sampled(rows, tokens, limits_R, stop) for _ in range(2))

    live = torch.ones(rows, dtype=torch.bool)
    for t in range(tokens):
        going = live.nonzero()[:, 0]
        live[going] = single.add(going, torch.full_like(going, t), token_RT[going, t], logprob_RT[going, t])
    unread = torch.ones(rows, dtype=torch.bool)  # as far as the host knows
    there = torch.ones(rows, dtype=torch.bool)  # by end tokens and limits alone, which is what the device knows
    for first in range(0, tokens, at_once):
        shown, lives, places = [], [], range(first, min(first + at_once, tokens))
        for t in places:
            shown.append(token_RT[:, t].where(there, -1).int())
            there = there & (token_RT[:, t] != 5) & (limits_R > t + 1)
            lives.append(there.int())
        going = unread.nonzero()[:, 0]
        bits = logprob_RT[:, list(places)].t().contiguous().view(torch.int32)
        shown, lives = torch.stack(shown)[:, going], torch.stack(lives)[:, going]
        stays = several.add_several(going, first, shown, bits[:, going], lives)
        unread[going] = stays
        there = there & unread
    assert torch.equal(several.tokens_RT, single.tokens_RT)
    assert torch.equal(several.logprobs_RT, single.logprobs_RT)
    lengths = (single.tokens_RT >= 0).sum(1)
    assert lengths.unique().numel() > 4
    assert (lengths < limits_R).any()
