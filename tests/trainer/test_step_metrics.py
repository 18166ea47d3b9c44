"""The metrics of a step, from the records of its passes."""

from __future__ import annotations

import math

import pytest
import torch

from rlft.trainer.update import PassRecord, UpdateRecord, step_metrics


def done(share=1.0, *, real=0, network=0, **values):
    """A pass with these metrics, of which `__` stands for a slash."""
    metrics = {name.replace("__", "/"): torch.tensor(value) for name, value in values.items()}
    return PassRecord.of(metrics, share, real=real, network=network)


def update(*passes, **optimizers):
    """An update of one lane with these passes."""
    numbers = {name.replace("__", "/"): value for name, value in optimizers.items()}
    return UpdateRecord(passes={0: passes}, costs=[1.0], optimizers=numbers)


def means(*updates):
    """Without what is counted in tokens, or told of the last update alone."""
    others = ("kl/old_last", "tokens/trained", "waste/padding_fraction")
    return {name: value for name, value in step_metrics([updates]).items() if name not in others}


def test_metrics_add_up_over_passes_and_average_over_updates():
    assert means(
        update(
            done(loss__total=1.0, kl__old=0.25),
            done(loss__total=2.0, kl__old=0.5),
            policy__grad_norm=4.0,
            critic__lr=0.5,
        ),
        update(done(loss__total=-1.0, kl__old=0.25), policy__grad_norm=2.0, critic__lr=0.25),
    ) == {"loss/total": 1.0, "loss/policy": 0.0, "kl/old": 0.5, "policy/grad_norm": 3.0, "critic/lr": 0.375}


def test_lanes_of_all_ranks_are_added_in_their_order_and_say_how_balanced_they_are():
    # 1e16 + 1 - 1e16 is 0 in this order, and 1 in the order in which the ranks come.
    first = UpdateRecord(passes={0: [done(kl__old=1e16)], 2: [done(kl__old=-1e16)]}, costs=[3, 1, 2], optimizers={})
    second = UpdateRecord(passes={1: [done(kl__old=1.0)]}, costs=[3, 1, 2], optimizers={"policy/lr": 0.5})
    found = step_metrics([[first], [second]])
    assert (found["kl/old"], found["lanes/balance"]) == (0.0, 2 / 3)
    assert "policy/lr" not in found, "rank 0 has the numbers of the optimizers"


def test_maxima_are_combined_by_maximum():
    updates = [update(done(0.5, sampler__logprob_gap_max=value)) for value in (0.5, 2.0, 1.0)]
    assert means(*updates)["sampler/logprob_gap_max"] == 2.0


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_does_not_swallow_nan(values):
    passes = [done(sampler__logprob_gap_max=value) for value in values]
    assert math.isnan(means(update(*passes))["sampler/logprob_gap_max"])


def test_what_is_said_of_tokens_is_of_the_forwarded_ones_and_losses_are_of_the_whole_batch():
    # A quarter of the tokens is forwarded; the algorithm divides by all of them.
    found = means(update(done(0.25, loss__policy=0.1, ratio__clip_high_fraction=0.05, sampler__logprob_gap_max=0.3)))
    assert found == pytest.approx(
        {"loss/total": 0.0, "loss/policy": 0.1, "ratio/clip_high_fraction": 0.2, "sampler/logprob_gap_max": 0.3}
    )


def test_an_update_in_which_nothing_was_forwarded_has_loss_0():
    nothing = update(policy__grad_norm=0.0, policy__lr=0.1)
    assert means(nothing) == {"loss/total": 0.0, "loss/policy": 0.0, "policy/grad_norm": 0.0, "policy/lr": 0.1}
    found = step_metrics([[nothing]])
    assert (found["tokens/trained"], found["waste/padding_fraction"]) == (0, 0.0)


def test_how_far_the_step_has_moved_the_policy_is_the_kl_of_the_last_update_alone():
    # Updates of 0 + 0, 0.25 + 0.5 and 1 + 0.25: their mean is (0 + 0.75 + 1.25) / 3, the last one 1.25.
    parts = ((0.0, 0.0), (0.25, 0.5), (1.0, 0.25))
    updates = [update(*(done(kl__old=part) for part in two)) for two in parts]
    assert [step_metrics([updates[:n]])["kl/old_last"] for n in range(4)] == [0.0, 0.0, 0.75, 1.25]
    assert step_metrics([updates])["kl/old"] == pytest.approx(2 / 3, abs=1e-15)


def test_the_kl_of_the_last_update_is_of_the_forwarded_tokens_like_every_other():
    half = update(done(0.5, kl__old=0.125))  # half of the tokens is forwarded
    assert step_metrics([[half]])["kl/old_last"] == 0.25
    assert step_metrics([[half, update()]])["kl/old_last"] == 0.0  # nothing was forwarded


def test_tokens_add_up_over_all_passes_of_all_updates_and_padding_is_their_share():
    # 30 and 20 tokens in rectangles of 40 and 24: 14 of 64 are padding. They are sums, not means over updates.
    found = step_metrics([[update(done(real=30, network=40)), update(done(real=20, network=24))]])
    assert (found["tokens/trained"], found["waste/padding_fraction"]) == (50, 14 / 64)


def test_the_effective_sample_size_is_of_all_passes_together():
    # Weights 1, 1, 1 and 3 in passes of three tokens and one: (sum w)^2 / (n sum w^2) = 36 / (4 x 12).
    passes = [done(sampler__weight=0.75, sampler__weight_squared=squared) for squared in (0.75, 2.25)]
    found = means(update(*passes))
    assert found["sampler/effective_sample_size"] == 0.75
    assert not {"sampler/weight", "sampler/weight_squared"} & found.keys()
