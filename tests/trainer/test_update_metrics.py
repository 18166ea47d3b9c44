from __future__ import annotations

import math

import pytest
import torch

from rlft.trainer.update_metrics import UpdateMetrics


def numbers(**values):
    return {name.replace("__", "/"): torch.tensor(value) for name, value in values.items()}


def means(found):
    """Without what is counted in tokens, or told of the last update alone."""
    others = ("kl/old_last", "tokens/trained", "waste/padding_fraction")
    return {name: value for name, value in found.mean().items() if name not in others}


def test_metrics_add_up_over_micro_batches_and_average_over_updates():
    found = UpdateMetrics()
    found.add(numbers(loss__total=1.0, kl__old=0.25), share=1.0)
    found.add(numbers(loss__total=2.0, kl__old=0.5), share=1.0)
    found.add_update({"policy/grad_norm": 4.0, "critic/lr": 0.5})
    found.add(numbers(loss__total=-1.0, kl__old=0.25), share=1.0)
    found.add_update({"policy/grad_norm": 2.0, "critic/lr": 0.25})
    assert means(found) == {"loss/total": 1.0, "loss/policy": 0.0, "kl/old": 0.5, "policy/grad_norm": 3.0} | {
        "critic/lr": 0.375
    }


def test_maxima_are_combined_by_maximum():
    found = UpdateMetrics()
    for value in (0.5, 2.0, 1.0):
        found.add(numbers(sampler__logprob_gap_max=value), share=0.5)
        found.add_update({})
    assert found.mean()["sampler/logprob_gap_max"] == 2.0


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_does_not_swallow_nan(values):
    found = UpdateMetrics()
    for value in values:
        found.add(numbers(sampler__logprob_gap_max=value), share=1.0)
    assert math.isnan(found.mean()["sampler/logprob_gap_max"])


def test_what_is_said_of_tokens_is_of_the_forwarded_ones_and_losses_are_of_the_whole_batch():
    # A quarter of the tokens is forwarded; the algorithm divides by all of them.
    found = UpdateMetrics()
    found.add(numbers(loss__policy=0.1, ratio__clip_high_fraction=0.05, sampler__logprob_gap_max=0.3), share=0.25)
    found.add_update({})
    assert means(found) == pytest.approx(
        {"loss/total": 0.0, "loss/policy": 0.1, "ratio/clip_high_fraction": 0.2, "sampler/logprob_gap_max": 0.3}
    )


def test_an_update_in_which_nothing_was_forwarded_has_loss_0():
    found = UpdateMetrics()
    found.add_update({"policy/grad_norm": 0.0, "policy/lr": 0.1})
    assert means(found) == {"loss/total": 0.0, "loss/policy": 0.0, "policy/grad_norm": 0.0, "policy/lr": 0.1}
    assert (found.mean()["tokens/trained"], found.mean()["waste/padding_fraction"]) == (0, 0.0)


def test_how_far_the_step_has_moved_the_policy_is_the_kl_of_the_last_update_alone():
    # Updates of 0 + 0, 0.25 + 0.5 and 1 + 0.25: their mean is (0 + 0.75 + 1.25) / 3, the last one 1.25.
    found = UpdateMetrics()
    assert found.mean()["kl/old_last"] == 0.0
    for parts in ((0.0, 0.0), (0.25, 0.5), (1.0, 0.25)):
        for part in parts:
            found.add(numbers(kl__old=part), share=1.0)
        found.add_update({"policy/lr": 0.1})
        assert found.mean()["kl/old_last"] == sum(parts)
    assert found.mean()["kl/old"] == pytest.approx(2 / 3, abs=1e-15)


def test_the_kl_of_the_last_update_is_of_the_forwarded_tokens_like_every_other():
    found = UpdateMetrics()
    found.add(numbers(kl__old=0.125), share=0.5)  # half of the tokens is forwarded
    found.add_update({})
    assert found.mean()["kl/old_last"] == 0.25
    found.add_update({})  # nothing was forwarded
    assert found.mean()["kl/old_last"] == 0.0


def test_tokens_add_up_over_all_micro_batches_of_all_updates_and_padding_is_their_share():
    # 30 and 20 tokens in rectangles of 40 and 24: 14 of 64 are padding. They are sums, not means over updates.
    found = UpdateMetrics()
    for real, network in ((30, 40), (20, 24)):
        found.add_tokens(real, network)
        found.add_update({})
    assert (found.mean()["tokens/trained"], found.mean()["waste/padding_fraction"]) == (50, 14 / 64)


def test_the_effective_sample_size_is_of_all_micro_batches_together():
    # Weights 1, 1, 1 and 3 in micro-batches of three tokens and one: (sum w)^2 / (n sum w^2) = 36 / (4 x 12).
    found = UpdateMetrics()
    found.add(numbers(sampler__weight=0.75, sampler__weight_squared=0.75), share=1.0)
    found.add(numbers(sampler__weight=0.75, sampler__weight_squared=2.25), share=1.0)
    found.add_update({})
    assert means(found)["sampler/effective_sample_size"] == 0.75
    assert not {"sampler/weight", "sampler/weight_squared"} & means(found).keys()
