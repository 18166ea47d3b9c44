from rlft.data.episodes import Episodes
from rlft.types import Split


def test_prompts_differ_in_their_seeds_and_no_seed_is_in_both_splits():
    episodes = Episodes(text="Begin.", size=500, held_out_size=500, seed=0)
    train, held_out = episodes.load(Split.train), episodes.load(Split.held_out)
    assert all(prompt.messages == ({"role": "user", "content": "Begin."},) for prompt in [*train, *held_out])
    seeds = [prompt.metadata["seed"] for prompt in [*train, *held_out]]
    assert len(set(seeds)) == len({prompt.id for prompt in [*train, *held_out]}) == 1000
    assert {seed % 2 for seed in seeds[:500]} == {0}
    assert {seed % 2 for seed in seeds[500:]} == {1}


def test_more_prompts_begin_with_those_of_fewer_and_another_seed_has_others():
    few, many, other = (
        [p.metadata["seed"] for p in Episodes(text="", size=size, held_out_size=1, seed=seed).load(Split.train)]
        for size, seed in ((10, 0), (20, 0), (10, 1))
    )
    assert many[:10] == few
    assert not {*few} & {*other}
