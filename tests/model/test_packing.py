import itertools
import random
from dataclasses import replace

import pytest
import torch
from in_one_test import each

from rlft.model.packing import (
    BranchPart,
    micro_batches,
    num_packed_tokens,
    pack,
    padded_micro_batches,
    parts_of,
    prompt_lengths,
    state_rows,
)


@pytest.fixture
def two_groups(make_batch):
    """Prompts of 4 and 3 tokens; completions of 2, 3, 1 and 5, 2. Packed: 4 + 6 = 10 and 3 + 7 = 10 tokens."""
    completions = [20, 21], [22, 23, 24], [25], [26, 27, 28, 29, 30], [31, 32]
    return make_batch([(b // 3, [9, 10, 11] if b > 2 else [5, 6, 7, 8], row) for b, row in enumerate(completions)])


@pytest.fixture
def many_rows(make_batch):
    """128 groups of 4 in a batch of random lengths, without tokens that matter."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 30, (128,), generator=generator).repeat_interleave(4)
    completion = torch.randint(0, 30, (512,), generator=generator)
    return make_batch([(b // 4, [b // 4 + 1] * int(prompt[b]), [7] * int(completion[b])) for b in range(512)])


# -- micro-batches ---------------------------------------------------------------------------------------------------
@each(("rows", "budget", "expected"), [
    ([0, 1, 2, 3, 4], 20, [[0, 1, 2, 3, 4]]),  # groups that fit together
    ([0, 1, 2, 3, 4], 19, [[0, 1, 2], [3, 4]]),
    ([0, 1, 2, 3, 4], 10, [[0, 1, 2], [3, 4]]),
    # 4 + 2 + 3 = 9 fits, the third row starts again with 4 + 1 = 5. Group 1 does not fit beside it (10), and alone:
    # 3 + 5 = 8, the second with 2 more would be 10.
    ([0, 1, 2, 3, 4], 9, [[0, 1], [2], [3], [4]]),
    ([0, 1, 2, 3, 4], 1, [[0], [1], [2], [3], [4]]),  # a row over the budget stands by itself
    ([3, 0, 4, 1], 14, [[3, 4], [0, 1]]),  # siblings that stand apart
])  # fmt: skip
def test_groups_stay_together_where_they_fit_and_pay_for_their_prompt_again_where_not(
    rows, budget, expected, two_groups
):
    assert [part.tolist() for part in micro_batches(two_groups, torch.tensor(rows), budget)] == expected


def test_no_rows_make_no_micro_batches(two_groups):
    none = torch.tensor([], dtype=torch.int64)
    assert micro_batches(two_groups, none, 10) == padded_micro_batches(two_groups, none, 10) == []


@each("budget", [1, 30, 60, 100, 500, 10**6])
def test_every_row_is_there_exactly_once_in_order_within_the_budget_in_parts_that_cannot_be_larger(budget, many_rows):
    rows = torch.arange(512)[torch.arange(512) % 7 != 0]
    parts = micro_batches(many_rows, rows, budget)
    assert torch.equal(torch.cat(parts), rows)
    for part in parts:
        assert len(part) == 1 or num_packed_tokens(many_rows.select(part)) <= budget
    if budget >= 60:  # no part could take the next group whole
        for part, following in itertools.pairwise(micro_batches(many_rows, torch.arange(512), budget)):
            whole = (many_rows.group_ids == many_rows.group_ids[following[0]]).nonzero()[:, 0]
            assert num_packed_tokens(many_rows.select(torch.cat([part, whole]).unique())) > budget


@each("budget", [1, 30, 100, 500, 10**6])
def test_padded_micro_batches_keep_to_the_budget_with_their_padding(budget, many_rows):
    lengths = many_rows.attention_mask.sum(1)
    parts = padded_micro_batches(many_rows, torch.arange(512), budget)
    assert torch.equal(torch.cat(parts), torch.arange(512))
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert len(part) == 1 or len(part) * lengths[part].max() <= budget
        if following is not None:  # and the next row would not have fitted
            assert (len(part) + 1) * max(lengths[part].max(), lengths[following[0]]) > budget


# -- packing ---------------------------------------------------------------------------------------------------------
def test_the_packed_row_holds_each_prompt_once_before_its_completions_and_predicts_from_the_token_before(two_groups):
    packed = pack(two_groups)
    first, second = [5, 6, 7, 8, 20, 21, 22, 23, 24, 25], [9, 10, 11, 26, 27, 28, 29, 30, 31, 32]
    assert packed.token_ids.tolist() == [first + second]
    first, second = [0, 1, 2, 3, 4, 5, 4, 5, 6, 4], [0, 1, 2, 3, 4, 5, 6, 7, 3, 4]
    assert packed.position_ids.tolist() == [first + second]
    assert packed.owner == (0, 0, 0, 1, 1)
    assert packed.prompts == ((0, 4), (10, 3))
    assert packed.completions == ((4, 2), (6, 3), (9, 1), (13, 5), (18, 2))
    # A first token is predicted from the end of the prompt.
    assert packed.predictor.tolist() == [3, 4, 3, 6, 7, 3, 12, 13, 14, 15, 16, 12, 18]
    assert packed.target.tolist() == list(range(20, 33))
    assert packed.rows.tolist() == [0] * 2 + [1] * 3 + [2] + [3] * 5 + [4] * 2
    assert packed.columns.tolist() == [4, 5, 4, 5, 6, 4, 3, 4, 5, 6, 7, 3, 4]


def test_the_number_of_packed_tokens_is_known_without_packing(two_groups, many_rows):
    for batch in (two_groups, many_rows, two_groups.select(torch.tensor([4, 0, 2]))):
        assert num_packed_tokens(batch) == pack(batch).num_tokens


def test_the_prompt_ends_where_the_first_trained_token_stands(make_batch):
    batch = make_batch([(0, [3, 4], [5, -6, 7]), (0, [3, 4], [-5, 6]), (0, [3, 4], []), (0, [3], [-5, -6])])
    assert prompt_lengths(batch).tolist() == [2, 3, 2, 3]


# -- several turns -----------------------------------------------------------------------------------------------------
@each("budget", [20, 30, 44, 100])
def test_micro_batches_keep_to_the_budget_where_completions_begin_with_other_answers(budget, make_batch):
    generator = torch.Generator().manual_seed(1)
    lead = torch.randint(0, 6, (60,), generator=generator).tolist()
    batch = make_batch([(b // 5, [b // 5 + 1] * 6, [-(b + 9)] * n + [7] * 3) for b, n in enumerate(lead)])
    parts = micro_batches(batch, torch.arange(60), budget)
    assert torch.equal(torch.cat(parts), torch.arange(60))
    assert max(num_packed_tokens(batch.select(part)) for part in parts) <= budget


def test_a_row_without_branches_is_one_part(awkward_batch):
    lengths = awkward_batch.attention_mask.sum(1).tolist()
    assert parts_of(awkward_batch) == [[BranchPart(columns=(0, length))] for length in lengths]
    usual = torch.arange(-1, awkward_batch.token_ids.shape[1] - 1).repeat(len(lengths), 1)
    assert parts_of(replace(awkward_batch, previous=usual)) == parts_of(awkward_batch)


def test_a_part_reads_runs_of_columns_that_end_with_the_token_before_it(tree_batch):
    trees, _, _ = tree_batch
    branches = BranchPart(columns=(10, 3), read=((0, 7),)), BranchPart(columns=(13, 2), read=((0, 7), (10, 1)))
    assert parts_of(trees)[1] == [BranchPart(columns=(0, 10)), *branches]
    assert [part.depth for part in parts_of(trees)[1]] == [0, 7, 8]
    assert parts_of(trees)[0][3] == BranchPart(columns=(15, 3), read=((0, 4),))


def test_each_token_is_computed_once_behind_the_tokens_that_it_continues():
    generator = random.Random(0)
    for _ in range(100):
        lengths = [generator.randrange(1, 9) for _ in range(generator.randrange(1, 5))]
        owner = [unit for unit in range(len(lengths)) for _ in range(generator.randrange(4))]
        sizes = [*lengths, *(generator.randrange(9) for _ in owner)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        spans = list(zip(starts, sizes, strict=True))
        prompts, completions = spans[: len(lengths)], spans[len(lengths) :]
        rows = state_rows(prompts, completions, owner, torch.device("cpu"))
        columns = torch.cat([runs.index.flatten() for runs in rows.runs])
        assert columns[rows.place].tolist() == list(range(sum(sizes)))
        first = [runs for runs in rows.runs if runs.after is None]
        begins = [row[mask].tolist() for runs in first for row, mask in zip(*masked(runs), strict=True)]
        owners = {start: unit for (start, size), unit in zip(completions, owner, strict=True) if size}
        for runs in rows.runs:
            for row, mask, after in zip(*masked(runs), () if runs.after is None else runs.after, strict=False):
                start, length = prompts[owners[int(row[mask][0])]]
                assert begins[int(after)] == list(range(start, start + length))


def masked(runs):
    index, mask = runs.index, runs.mask
    return index, torch.ones_like(index, dtype=torch.bool) if mask is None else mask
