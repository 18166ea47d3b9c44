from __future__ import annotations

from dataclasses import replace

import torch

from rlft.model.branches import BranchPart, parts_of, paths_of


def test_a_row_without_branches_is_one_part(awkward_batch):
    lengths = awkward_batch.attention_mask.sum(1).tolist()
    assert parts_of(awkward_batch) == [[BranchPart(columns=(0, length))] for length in lengths]
    usual = torch.arange(-1, awkward_batch.token_ids.shape[1] - 1).repeat(len(lengths), 1)
    assert parts_of(replace(awkward_batch, previous=usual)) == parts_of(awkward_batch)


def test_a_part_reads_runs_of_columns_that_end_with_the_token_before_it(tree_batch):
    trees, _, _ = tree_batch
    assert parts_of(trees)[1] == [
        BranchPart(columns=(0, 10)),
        BranchPart(columns=(10, 3), read=((0, 7),)),
        BranchPart(columns=(13, 2), read=((0, 7), (10, 1))),
    ]
    assert [part.depth for part in parts_of(trees)[1]] == [0, 7, 8]
    assert parts_of(trees)[0][3] == BranchPart(columns=(15, 3), read=((0, 4),))


def test_paths_are_the_rows_that_one_would_write_by_hand(tree_batch):
    trees, linear, own = tree_batch
    paths = paths_of(trees)
    columns = slice(0, linear.token_ids.shape[1])
    real = linear.attention_mask
    assert torch.equal(paths.batch.attention_mask[:, columns], real)
    assert torch.equal(paths.batch.token_ids[:, columns][real], linear.token_ids[real])
    assert paths.batch.group_ids.tolist() == linear.group_ids.tolist()
    for r, places in enumerate(own):
        for b, column in places:
            k = column - places[0][1] + int(real[r].sum()) - len(places)
            assert paths.batch.loss_mask[r, k] == trees.loss_mask[b, column]
            assert paths.index[b, column] == r * paths.batch.token_ids.shape[1] + k
    assert paths.batch.loss_mask.sum() == trees.loss_mask.sum()  # each sampled token is learned once


def test_values_of_paths_are_folded_back_to_the_tokens(tree_batch):
    trees, _, _ = tree_batch
    paths = paths_of(trees)
    assert torch.equal(paths.fold(paths.batch.token_ids)[trees.attention_mask], trees.token_ids[trees.attention_mask])
