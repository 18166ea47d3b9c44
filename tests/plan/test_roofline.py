"""The model of a step on a GPU: a sum that can be worked out by hand, and its tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import roofline

from rlft.commands.doctor.work import Size
from rlft.plan.cards import Machine
from rlft.plan.roofline import Work, seconds_of, update

NETWORK = roofline.network(Size(hidden=4, layers=1, heads=2, key_heads=1, intermediate=8, vocabulary=10))
WORK = Work(prompts=1, group=2, prompt=3, completion=2, budget=100)
# One pass over 3 + 2 x 2 = 7 tokens, in which 3 x 3 / 2 + 2 x (2 x 3 + 2 x 2 / 2) = 20.5 pairs attend.
LINEAR = 2 * 2 * 7 * (4 * 8 + 4 * 4 + 4 * 16 + 8 * 4)  # forward and of x, for q, k, v; o; gate, up; down
LORA = 3 * 2 * 7 * 16 * (32 + 32)  # three with B, whose outputs are 32 in all, and three with A, whose inputs are
ATTENTION = (1 + 2.5) * 4 * 20.5 * 4  # the backward is 2.5 forwards
HEAD = 2 * 2 * 4 * 4 * 10  # of 4 sampled tokens
ADAPTER = 16 * (8 + 6 + 6 + 8 + 12 + 12 + 12)  # inputs and outputs of the seven matrices
FREE = float("inf")


def test_an_update_is_the_sum_that_is_worked_out_by_hand() -> None:
    kernels = list(update(NETWORK, WORK))
    slow = Machine(rate=1, of_the_rate=1, bandwidth=FREE, launch=0.0)
    assert seconds_of(kernels, slow) == pytest.approx(LINEAR + LORA + ATTENTION + HEAD)
    narrow = Machine(rate=FREE, bandwidth=1, of_the_bandwidth=1, launch=0.0)
    written = Counter[str]()
    for kernel in kernels:
        written[kernel.name] += kernel.seconds(narrow)
    assert written["gradients added up"] == pytest.approx(3 * 4 * ADAPTER)
    assert written["optimizer"] == pytest.approx(12 * 3 * 4 * ADAPTER)
    assert seconds_of(kernels, narrow) == pytest.approx(sum(written.values()))
    # 91 of a layer, 2 of the head, 3 of its softmax, 12 of the optimizer; they are launched while the GPU computes.
    busy = Machine(rate=FREE, bandwidth=FREE, launch=1.0)
    assert seconds_of(kernels, busy) == 91 + 2 + 3 + 12
    assert seconds_of(kernels, replace(busy, bandwidth=0.1)) > 91 + 2 + 3 + 12
    # A host that computes by itself launches before each kernel.
    found = seconds_of(kernels, replace(slow, launch=1.0, is_host=True))
    assert found == seconds_of(kernels, slow) + 91 + 2 + 3 + 12
