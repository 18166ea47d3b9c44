import itertools

from rlft.system.seeds import derive, sampling_seeds


def test_equal_arguments_give_equal_numbers_on_every_machine():
    # `printf 0/0/sample | b2sum -l 48`, read as one number.
    assert derive(0, 0, "sample") == 0x9ED6FA83F426


def test_seed_step_and_purpose_all_matter():
    asked = list(itertools.product(range(20), range(20), ("sample", "evaluate", "dropout", "minibatches")))
    numbers = {derive(*arguments) for arguments in asked}
    assert len(numbers) == len(asked), "such as 1, 11 and 11, 1"
    assert all(0 <= number < 2**48 for number in numbers), "they fit every generator"


def test_prompts_are_spaced_by_the_group_size_so_that_no_two_completions_share_a_seed():
    seeds = sampling_seeds(3, 7, num_prompts=5, group_size=4)
    assert [b - a for a, b in itertools.pairwise(seeds)] == [4, 4, 4, 4]
    used = [seed + i for seed in seeds for i in range(4)]
    assert len(set(used)) == 20


def test_training_and_evaluation_draw_other_numbers():
    assert sampling_seeds(0, 0, 3, 4) != sampling_seeds(0, 0, 3, 4, "evaluate")
    assert sampling_seeds(0, 0, 3, 4) != sampling_seeds(0, 1, 3, 4)
