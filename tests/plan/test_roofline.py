"""The model of a step on a GPU: a sum worked out by hand, what was measured on cards, and what the host launches."""

from collections import Counter
from dataclasses import replace

import pytest
import roofline

from rlft.commands.doctor.work import Size
from rlft.generation.decoding import READ_EVERY
from rlft.plan.cards import CARDS, Machine
from rlft.plan.duration import FACTOR
from rlft.plan.roofline import READING, SMALL, Work, sampling, seconds_of, update

NETWORK = roofline.network(Size(hidden=4, layers=1, heads=2, key_heads=1, intermediate=8, vocabulary=10))
WORK = Work(prompts=1, group=2, prompt=3, completion=2, budget=100)
# One pass over 3 + 2 x 2 = 7 tokens, in which 3 x 3 / 2 + 2 x (2 x 3 + 2 x 2 / 2) = 20.5 pairs attend.
LINEAR = 2 * 2 * 7 * (4 * 8 + 4 * 4 + 4 * 16 + 8 * 4)  # forward and of x, for q, k, v; o; gate, up; down
LORA = 3 * 2 * 7 * 16 * (32 + 32)  # three with B, whose outputs are 32 in all, and three with A, whose inputs are
ATTENTION = (1 + 2.5) * 4 * 20.5 * 4  # the backward is 2.5 forwards
HEAD = 2 * 2 * 4 * 4 * 10  # of 4 sampled tokens
ADAPTER = 16 * (8 + 6 + 6 + 8 + 12 + 12 + 12)  # inputs and outputs of the seven matrices
FREE = float("inf")


def test_an_update_is_the_sum_that_is_worked_out_by_hand():
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


PASSES = [  # forward and backward: card, model, prompts, tokens of a prompt and of a completion, seconds
    ("H100", "0.5B", 4, 128, 128, 0.168),
    ("H100", "0.5B", 8, 512, 256, 0.181),
    ("H100", "0.5B", 32, 128, 128, 0.291),
    ("H100", "1.5B", 2, 512, 768, 0.282),
    ("H200", "0.5B", 4, 128, 128, 0.172),
    ("H200", "0.5B", 8, 512, 256, 0.220),
    ("H200", "0.5B", 32, 128, 128, 0.334),
]


def test_the_factor_covers_each_pass_that_was_measured_on_a_card():
    ratios = {}
    for card, name, prompts, prompt, completion, seconds in PASSES:
        work = Work(prompts=prompts, group=8, prompt=prompt, completion=completion, budget=10**6)
        ratio = seconds / seconds_of(update(roofline.MODELS[name], work), CARDS[card])
        assert 1 / FACTOR <= ratio <= FACTOR, (card, name, prompts, ratio)
        ratios.setdefault(card, []).append(ratio)
    assert {card: f"{min(found):.2f} to {max(found):.2f}" for card, found in ratios.items()} == {
        "H100": "1.00 to 1.14", "H200": "1.02 to 1.48",
    }, "docs/benchmarks/performance.md says these"  # fmt: skip
    assert {card for card, machine in CARDS.items() if machine.is_compared} == ratios.keys()


def test_in_graphs_the_host_launches_once_a_token_and_reads_once_in_eight():
    network, rows = roofline.MODELS["0.5B"], Work(prompts=2, group=4, prompt=16, completion=64, budget=96)
    eager, graphs = (list(sampling(network, rows, in_graphs=each, by_vllm=False)) for each in (False, True))

    def launches(kernels):
        return sum(kernel.number for kernel in kernels if kernel.launch is None and kernel.name != "prompts")

    layer = 5 + SMALL  # products, attention, and what is between them
    assert launches(eager) == 64 * (24 * layer + 1 + 4)
    assert launches(graphs) == 64
    [reads] = [kernel for kernel in graphs if kernel.name == "reads"]
    assert (reads.number, reads.least) == (64 / READ_EVERY, READ_EVERY * READING)
    names = {kernel.name for kernel in graphs}
    assert names - {"graphs", "reads"} == {kernel.name for kernel in eager}
    assert sum(k.number for k in graphs if k.name not in ("graphs", "reads")) == sum(k.number for k in eager)
