"""What a step should take on a GPU, by a model: nothing here is a measurement.

    python scripts/roofline.py                                   # the table of docs/performance.md
    python scripts/roofline.py --prompts 32 --group 8 --prompt 150 --completion 512 --budget 32768

Each kernel takes the longest of: its launch, its bytes at the card's bandwidth, its operations at the card's rate. A
stage is the sum of its kernels. Counted are the packed forward and backward in bfloat16 with LoRA on all linear layers,
as `model/kernels/` computes them, and decoding by an engine that reads weights once for a token of all rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from rlft.commands.doctor.work import SIZES, Size

ITEM, RANK = 2, 16
MODELS = {
    "0.5B": SIZES["0.5b"],
    "1.5B": SIZES["1.5b"],
    "7B": Size(hidden=3584, layers=28, heads=28, key_heads=4, intermediate=18944, vocabulary=152064),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Rates that are published, and the shares of them that large products and passes reach.

    Attributes:
        rate: bfloat16 operations per second of dense products, sums in float32.
        bandwidth: bytes per second.
        launch: seconds until the host has launched a kernel; a GPU with work waits for none.
    """

    rate: float
    bandwidth: float
    launch: float = 5e-6


CARDS = {
    "H100": Card(rate=989e12, bandwidth=3.35e12),
    "A100": Card(rate=312e12, bandwidth=2.04e12),
    "4090": Card(rate=165e12, bandwidth=1.01e12),
    "L4": Card(rate=121e12, bandwidth=0.30e12),
}
OF_THE_RATE, OF_THE_BANDWIDTH = 0.7, 0.8
IN_A_GRAPH = 1.5e-6
"""Seconds between two kernels of a CUDA graph, in which engines decode."""

SCHEDULED = 2e-3
"""Seconds in which an engine's host prepares a token of all rows; an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """number: how often it runs. bytes and operations are those of one run; launch in seconds, None: the card's."""

    name: str
    number: float
    bytes: float
    operations: float = 0.0
    launch: float | None = None

    def seconds(self, card: Card) -> tuple[float, str]:
        """(seconds of all runs, what bounds them)."""
        bounds = {
            "launches": card.launch if self.launch is None else self.launch,
            "memory": self.bytes / (OF_THE_BANDWIDTH * card.bandwidth),
            "arithmetic": self.operations / (OF_THE_RATE * card.rate),
        }
        bound = max(bounds, key=lambda name: bounds[name])
        return self.number * bounds[bound], bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    prompts: int
    group: int
    prompt: int
    completion: int
    budget: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        return self.prompts * self.prompt + self.rows * self.completion

    @property
    def passes(self) -> int:
        """Number of micro-batches, of whole groups where one fits."""
        groups = max(1, self.budget // (self.prompt + self.group * self.completion))
        return -(-self.prompts // groups)

    @property
    def pairs(self) -> float:
        """Number of (query, key) that see each other."""
        p, c = self.prompt, self.completion
        return self.prompts * (p * p / 2 + self.group * (c * p + c * c / 2))


def matrices(size: Size) -> list[tuple[str, int, int]]:
    """(name, inputs, outputs) of the linear layers that a layer computes together."""
    key = size.key_heads * size.hidden // size.heads
    return [
        ("q, k, v", size.hidden, size.hidden + 2 * key), ("o", size.hidden, size.hidden),
        ("gate, up", size.hidden, 2 * size.intermediate), ("down", size.intermediate, size.hidden),
    ]  # fmt: skip


def product(name: str, number: float, rows: float, inputs: float, outputs: float) -> Kernel:
    moved = (rows * inputs + rows * outputs + inputs * outputs) * ITEM
    return Kernel(name=name, number=number, bytes=moved, operations=2 * rows * inputs * outputs)


def update(size: Size, work: Work) -> Iterator[Kernel]:
    """The kernels of the forward and backward passes of a step's rows, and of the optimizer."""
    tokens, number = work.tokens / work.passes, work.passes * size.layers
    adapter = 0
    for _, inputs, outputs in matrices(size):
        adapter += RANK * (inputs + outputs)
        yield product("linear layers", 2 * number, tokens, inputs, outputs)
        yield product(
            "LoRA: down", 4 * number, tokens, inputs, RANK
        )  # forward, and backward of x, A and of what A gave
        yield product("LoRA: up", 2 * number, tokens, RANK, outputs)
        yield Kernel(name="LoRA: sums", number=2 * number, bytes=3 * tokens * outputs * ITEM)
    hidden, mlp = tokens * size.hidden * ITEM, tokens * size.intermediate * ITEM
    yield Kernel(name="norms, residual sums", number=4 * number, bytes=3.5 * hidden)
    yield Kernel(name="rotary positions", number=2 * number, bytes=2.5 * hidden)
    yield Kernel(name="SiLU", number=2 * number, bytes=4 * mlp)
    scores = 4 * work.pairs / work.passes * size.hidden
    yield Kernel(name="attention", number=2 * number, bytes=4 * hidden, operations=scores / 2)
    yield Kernel(name="attention", number=2 * number, bytes=8 * hidden, operations=1.25 * scores)
    yield Kernel(name="attention: merged", number=4 * number, bytes=2 * hidden)
    sampled = work.rows * work.completion
    yield product("LM head", 2, sampled, size.hidden, size.vocabulary)
    yield Kernel(name="softmax", number=3, bytes=sampled * size.vocabulary * ITEM)
    parameters = size.layers * adapter
    yield Kernel(name="gradients added up", number=number * 14, bytes=3 * 4 * parameters / (14 * size.layers))
    yield Kernel(name="optimizer", number=12, bytes=3 * 4 * parameters)


def sampling(size: Size, work: Work) -> Iterator[Kernel]:
    """The kernels of an engine that decodes all rows at once in CUDA graphs, with base and adapter merged."""
    steps, rows, number = work.completion, work.rows, work.completion * size.layers
    for _, inputs, outputs in matrices(size):
        yield product("prompts", size.layers, work.prompts * work.prompt, inputs, outputs)
        one = product("linear layers", number, rows, inputs, outputs)
        yield Kernel(name=one.name, number=number, bytes=one.bytes, operations=one.operations, launch=IN_A_GRAPH)
    head = product("LM head", steps, rows, size.hidden, size.vocabulary)
    yield Kernel(name="LM head", number=steps, bytes=head.bytes, operations=head.operations, launch=IN_A_GRAPH)
    yield Kernel(name="choice of a token", number=4 * steps, bytes=rows * size.vocabulary * 4)
    key = 2 * size.key_heads * size.hidden // size.heads * ITEM
    seen = rows * (work.prompt + work.completion / 2)
    yield Kernel(name="keys and values", number=number, bytes=seen * key, launch=IN_A_GRAPH)
    yield Kernel(name="small kernels", number=6 * number, bytes=rows * size.hidden * ITEM * 3, launch=IN_A_GRAPH)
    yield Kernel(name="scheduler", number=steps, bytes=0, launch=SCHEDULED)


def stages(name: str, work: Work) -> dict[str, list[Kernel]]:
    size = MODELS[name]
    adapted = size.layers * sum(inputs * outputs for _, inputs, outputs in matrices(size)) * ITEM
    publish = [Kernel(name="merged weights", number=1, bytes=3 * adapted), Kernel(name="probe", number=500, bytes=0)]
    return {
        "sample": list(sampling(size, work)),
        "update": list(update(size, work)),
        "publish": publish,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("prompts", 32), ("group", 8), ("prompt", 150), ("completion", 512), ("budget", 32768)):
        parser.add_argument(f"--{name}", type=int, default=value)
    work = Work(**vars(parser.parse_args()))
    print(f"A model, not a measurement: {work.prompts} x {work.group}, {work.prompt} + {work.completion} tokens.\n")
    print(
        "| model | card | sample, s | update, s | publish, s | step, s | bound of the update | the next ten per cent |"
    )
    print("|" + " --- |" * 8)
    for model in MODELS:
        for name, card in CARDS.items():
            print(row(model, name, card, work))


def row(model: str, name: str, card: Card, work: Work) -> str:
    of_stages = stages(model, work)
    seconds = {stage: sum(kernel.seconds(card)[0] for kernel in kernels) for stage, kernels in of_stages.items()}
    bounds = added_up((kernel.seconds(card)[1], kernel.seconds(card)[0]) for kernel in of_stages["update"])
    shares = ", ".join(f"{bound} {share / seconds['update']:.0%}" for bound, share in largest(bounds)[:2])
    cells = [f"{seconds[stage]:.2f}" for stage in of_stages]
    return f"| {' | '.join([model, name, *cells, f'{sum(seconds.values()):.2f}', shares, gains(of_stages, card)])} |"


def gains(of_stages: dict[str, list[Kernel]], card: Card) -> str:
    """The fewest groups of kernels whose time beyond their arithmetic is a tenth of the step, with these shares."""
    total = sum(kernel.seconds(card)[0] for kernels in of_stages.values() for kernel in kernels)
    beyond = added_up(
        (f"{stage}: {k.name}", k.seconds(card)[0] - k.number * k.operations / (OF_THE_RATE * card.rate))
        for stage, kernels in of_stages.items()
        for k in kernels
    )
    told, so_far = [], 0.0
    for name, seconds in largest(beyond):
        told.append(f"{name} {seconds / total:.0%}")
        so_far += seconds / total
        if so_far >= 0.1:
            break
    return ", ".join(told)


def added_up(pairs: Iterator[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, number in pairs:
        sums[name] = sums.get(name, 0.0) + number
    return sums


def largest(numbers: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(numbers.items(), key=lambda item: -item[1])


if __name__ == "__main__":
    main()
