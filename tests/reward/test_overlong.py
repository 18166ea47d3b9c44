from reward_groups import sized_group

from rlft.reward.overlong import Overlong


def scores(lengths, **keys):
    """Of completions with these numbers of tokens."""
    return Overlong(**keys)(sized_group(["18"] * len(lengths), lengths))


def test_the_penalty_grows_over_the_cache_from_0_to_minus_1():
    # L_max - L_cache = 90: nothing up to there, then (90 - n) / 10, and no more beyond the limit.
    lengths = [0, 89, 90, 91, 95, 99, 100, 101, 500]
    assert scores(lengths, max_tokens=100, cache=10) == [0, 0, 0, -0.1, -0.5, -0.9, -1, -1, -1]
    # Without a cache over a fifth of the limit: (40 - n) / 10 from 50 - 10 = 40.
    assert scores([40, 41, 50], max_tokens=50, cache=None) == [0, -0.1, -1]
    # A cache as long as the limit charges every token.
    assert scores([0, 1, 2, 4], max_tokens=4, cache=4) == [0, -0.25, -0.5, -1]
